"""Chat templates: rendered as the hub's templates expect, in a sandbox, with errors in one sentence."""

from __future__ import annotations

from datetime import datetime

import pytest
import tokenizers

from dflash_jax.errors import UserError
from dflash_jax.text import Tokenizer, encode_chat, render_chat

from . import tiny

HI = [{"role": "user", "content": "Hi <b> é"}]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages: list | None = None, **extra: object) -> str:
    return render_chat(template, messages or HI, SPECIALS, **extra)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['role'] }}{{ messages[0].content }}{{ eos_token }}", "<s>userHi <b> é</s>"),
        ("{% if add_generation_prompt %}A{% else %}B{% endif %}", "A"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b> é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "Hi <b> é"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{% continue %}{% endfor %}x", "x"),
        ("a{% generation %}{{ messages[0].role }}{% endgeneration %}b", "auserb"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 5 %}{% endfor %}{{ ns.n }}", "5"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "TrueTrueFalse"),
        ("[{{ pad_token }}]", "[]"),
        ("{{ messages[0].content.split('<')[-1].strip() | upper }}", "B> É"),
    ],
)
def test_rendering(template: str, expected: str) -> None:
    assert render(template) == expected


def test_what_the_caller_passes_reaches_the_template() -> None:
    template = "{{ tools[0].name }}{{ enable_thinking }}{{ add_generation_prompt }}"
    assert render(template, tools=[{"name": "f"}], enable_thinking=False, add_generation_prompt=False) == "fFalseFalse"


def test_todays_date() -> None:
    days = {datetime.now().strftime("%d %b %Y")}
    text = render("{{ strftime_now('%d %b %Y') }}")
    assert text in days | {datetime.now().strftime("%d %b %Y")}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must\n alternate') }}", "Roles must alternate"),
        ("x\n{% if %}", "line 2: "),
        ("{{ 'a' + none }}", "can only concatenate str"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ messages[0].update({'role': 'x'}) }}", "unsafe|safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(1000000000) | list }}", "[Rr]ange"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_template_errors_are_one_sentence(template: str, message: str) -> None:
    with pytest.raises(UserError, match="^the chat template failed: ") as caught:
        render(template)
    import re

    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "must be a non-empty list"),
        ([], "must be a non-empty list"),
        ({"role": "user", "content": "x"}, "must be a non-empty list"),
        (["hi"], r"messages\[0\] is 'hi', not an object"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role is ''"),
        ([*HI, {"role": "user"}], r"messages\[1\].content is None, not a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5, not a string"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content is \['x'\]"),
    ],
)
def test_malformed_messages(messages: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        render_chat("x", messages, {})  # pyright: ignore[reportArgumentType]


def test_content_may_be_parts_or_left_to_tool_calls() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "tool_calls": [{"name": "f"}]},
    ]
    assert render("{{ messages[0].content[0].text }}{{ messages[1].tool_calls[0].name }}", messages) == "Hif"


def test_ids_of_a_conversation(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the sky"}]
    body = tokenizer.encode("user\nthe sky")
    newline, assistant = tokenizer.encode("\n"), tokenizer.encode("assistant\n")
    assert encode_chat(tokenizer, messages, add_generation_prompt=False) == [1, *body, 2, *newline]
    assert encode_chat(tokenizer, messages) == [1, *body, 2, *newline, 1, *assistant]


def test_bos_is_not_put_twice(backend: tokenizers.Tokenizer) -> None:
    made = Tokenizer.from_gguf_metadata(
        tiny.metadata(backend, add_bos_token=True)
        | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    )
    assert made.encode("the")[0] == 1
    assert encode_chat(made, [{"role": "user", "content": "the"}]) == made.encode("the")


def test_no_template_is_said(backend: tokenizers.Tokenizer) -> None:
    fields = tiny.metadata(backend)
    del fields["tokenizer.chat_template"]
    with pytest.raises(UserError, match="^x.gguf: the tokenizer has no chat template; give the prompt as plain text"):
        encode_chat(Tokenizer.from_gguf_metadata(fields, "x.gguf"), HI)
    named = Tokenizer.from_gguf_metadata(fields | {"tokenizer.chat_template.rag": "R"}, "x.gguf")
    with pytest.raises(UserError, match=r"no chat template named 'default' \(it has rag\)"):
        encode_chat(named, HI)
