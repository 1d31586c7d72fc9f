"""Where prompts come from, and what is made of them before the model sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llm.text_target import TEMPLATE  # pyright: ignore[reportMissingImports]

from dflash_jax.text import load_tokenizer, render_chat
from dflash_jax.text.prompts import read_prompts_file

from .conftest import Cli

SHORT = ["--max-new-tokens", 1, "--json", "--max-running-requests", 1]


def ids(target: Path, text: str) -> list[int]:
    tokenizer = load_tokenizer(target)
    assert tokenizer
    return tokenizer.encode(text)


def chat(*turns: tuple[str, str]) -> str:
    return render_chat(TEMPLATE, [{"role": role, "content": content} for role, content in turns], {})


def lengths(cli: Cli, *argv: object, **options: Any) -> list[int]:
    """`prompt_tokens` of each prompt: every text below has its own length."""
    result = cli(*argv, *SHORT, **options)
    assert result.code == 0, result.err
    return [item["prompt_tokens"] for item in result.objects]


# -- template, --raw, --system -----------------------------------------------------------------------------------------


def test_a_text_becomes_a_user_message(cli: Cli, pair: list[str], target: Path) -> None:
    [found] = cli(*pair, "why?", *SHORT).objects
    assert found["prompt"] == "why?"
    assert found["prompt_tokens"] == len(ids(target, chat(("user", "why?"))))


def test_raw_text_stays_as_it_is(cli: Cli, pair: list[str], target: Path) -> None:
    [found] = cli(*pair, "why?", "--raw", *SHORT).objects
    assert (found["prompt"], found["prompt_tokens"]) == ("why?", 4)


def test_a_system_message_goes_first(cli: Cli, pair: list[str], target: Path, tmp_path: Path) -> None:
    expected = len(ids(target, chat(("system", "be kind"), ("user", "why?"))))
    assert lengths(cli, *pair, "why?", "--system", "be kind") == [expected]
    file = tmp_path / "chats.jsonl"
    user = {"role": "user", "content": "why?"}
    chats = [[user], [{"role": "system", "content": "its own"}, user]]
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats), encoding="utf-8")
    own = len(ids(target, chat(("system", "its own"), ("user", "why?"))))
    assert lengths(cli, *pair, "--prompts-file", file, "--system", "be kind") == [expected, own]


def test_the_output_is_that_of_the_same_prompt_as_ids(cli: Cli, pair: list[str], target: Path) -> None:
    numbers = ",".join(map(str, ids(target, chat(("user", "why is the sky blue?")))))
    common = ["--max-new-tokens", 30, "--json"]
    [as_text] = cli(*pair, "why is the sky blue?", *common).objects
    [as_ids] = cli(*pair, "--prompt-ids", numbers, *common).objects
    for key in ("token_ids", "text", "accept_lengths", "finish_reason"):
        assert as_text[key] == as_ids[key]


# -- prompts from everywhere -------------------------------------------------------------------------------------------


def test_all_sources_together_keep_their_order(cli: Cli, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("three\nfour\n", encoding="utf-8")
    result = cli(
        *pair, "one", "--prompts-file", file, "--prompt-ids", "7, 8", "--raw", *SHORT, "two", "--prompt-ids", 9
    )
    assert [item["prompt"] for item in result.objects] == ["one", "two", [7, 8], [9], "three", "four"]


def test_a_prompt_that_looks_like_an_option(cli: Cli, pair: list[str]) -> None:
    result = cli(*pair, "a", "--raw", *SHORT, "-5", "--", "--json", "-b")
    assert [item["prompt"] for item in result.objects] == ["a", "-5", "--json", "-b"]


LINES: list[tuple[str, Any]] = [
    ("plain text", "plain text"),
    ("  spaces around  \r", "spaces around"),
    ('"a \\"JSON\\" string\\nof two lines"', 'a "JSON" string\nof two lines'),
    ('"Hello," she said', '"Hello," she said'),
    ('{"prompt": "text"}', "text"),
    ('{"prompt": [1, 2]}', [1, 2]),
    ('{"messages": [{"role": "user", "content": "why"}]}', [{"role": "user", "content": "why"}]),
    ("[1, 2] is a list", "[1, 2] is a list"),
    ("[sic]", "[sic]"),
    ("[" * 100_000, "[" * 100_000),
    ("7", "7"),
    ("null", "null"),
    ('"\u2028 ends no line, nor does \u0085"', "\u2028 ends no line, nor does \u0085"),
    ("nor \u000b nor \u000c do", "nor \u000b nor \u000c do"),
]


def test_every_kind_of_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("\n".join(["", " ", *(line for line, _ in LINES), "  ", ""]).encode())
    found = read_prompts_file(str(file))
    assert [prompt for _, prompt in found] == [prompt for _, prompt in LINES]
    assert [name for name, _ in found] == [f"{file} line {number}" for number in range(3, 3 + len(LINES))]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a"}'.encode())
    assert read_prompts_file(str(file)) == [(f"{file} line 1", "a")]


def test_stdin(cli: Cli, pair: list[str]) -> None:
    result = cli(*pair, "--prompts-file", "-", "--raw", *SHORT, stdin='na\n\n{"prompt": "your 你"}\n'.encode())
    assert [(item["prompt"], item["prompt_tokens"]) for item in result.objects] == [("na", 2), ("your 你", 8)]


# -- lines that are none -----------------------------------------------------------------------------------------------

BAD_LINES = [
    ('{"prompt": "a"', 'begins like a JSON object but is not valid JSON: {"prompt": "a"'),
    ('{"text": "a"}', "must have one of the keys prompt and messages, and has text"),
    ("{}", "must have one of the keys prompt and messages, and has none"),
    ('{"prompt": "a", "messages": []}', "must have one of the keys prompt and messages, and has prompt, messages"),
    ('{"prompt": 5}', ": prompt must be text or a list of token ids, not 5"),
    ('{"prompt": []}', ": prompt must be text or a list of token ids, not []"),
    ('{"prompt": [1, true]}', ": prompt must be text or a list of token ids, not [1, true]"),
    ('{"messages": "a"}', ': messages must be a list of message objects, not "a"'),
    ('{"messages": [["user", "a"]]}', ': messages must be a list of message objects, not [["user", "a"]]'),
    ('{"messages": [{"role": "user"}]}', ": messages[0].content is None, not a string"),
    ('{"prompt": " "}', " is empty"),
    ('""', " is empty"),
    ("[1, 2,3]", 'is a JSON array: write {"prompt": [1, 2, 3]}'),
    ("[]", 'is a JSON array: write {"prompt": []}'),
    ('[{"role": "user"}]', 'is a JSON array: write {"messages": [{"role": "user"}]}'),
    (
        '{"prompt": "a", "id": 7, "temperature": 1}',
        "may have the key prompt or the key messages and no other, and has prompt, id, temperature",
    ),
    ('{"prompt": [' + "9" * 4000 + "]}", "holds " + "9" * 59 + "…, which is not a token id"),
    ('{"prompt": [71]}', " holds 71, which is not a token id from 0 to 70"),
    ('{"prompt": "a\\ud83d"}', " is not valid Unicode: it has half of a surrogate pair, U+D83D at position 1"),
    ('{"a":' * 5000, "begins like a JSON object but is not valid JSON: " + ('{"a":' * 12)[:59] + "…"),
]


@pytest.mark.parametrize("line, message", BAD_LINES, ids=[line[:30] for line, _ in BAD_LINES])
def test_bad_lines(cli: Cli, pair: list[str], tmp_path: Path, line: str, message: str) -> None:
    """The error names file and line; the good prompt before it does not run."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"good\n\n{line}\n", encoding="utf-8")
    error = cli(*pair, "--prompts-file", file, *SHORT).error
    assert error.startswith(f"{file} line 3")
    assert message in error


def test_files_that_cannot_be_read(cli: Cli, pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n\n", encoding="utf-8")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name, message in (
        ("empty", "holds no prompt"),
        ("nowhere", "No such file or directory"),
        ("latin", "is not UTF-8 text: "),
        ("", "Is a directory"),
    ):
        error = cli(*pair, "--prompts-file", tmp_path / name).error
        assert "--prompts-file" in error and str(tmp_path / name) in error and message in error


def test_an_empty_stdin(cli: Cli, pair: list[str]) -> None:
    assert cli(*pair, "--prompts-file", "-").error == "--prompts-file - holds no prompt"
    assert "stdin line 2" in cli(*pair, "--prompts-file", "-", stdin=b"a\n{").error
