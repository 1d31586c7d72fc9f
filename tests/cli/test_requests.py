"""What a request may ask for, by options: they arrive as they are, and what comes is what they say."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
from llm.text_target import PAIR, START, known_case, known_prompt  # pyright: ignore[reportMissingImports]

from dflash_jax import SamplingParams, StructuredOutputs
from dflash_jax.engine.settings import DRAFT_SAMPLING, DTYPES, LOGPROBS_MODES, SPECULATION
from dflash_jax.generate import make_parser, parse_arguments
from dflash_jax.options import ENGINE_OPTIONS, sampling_params

from .conftest import ROOT, Cli, Result

KNOWN = ["--prompt-ids", ",".join(map(str, known_prompt()))]
STEADY = ["--prompt-ids", ",".join(map(str, known_prompt(12)))]  # nine tokens again and again

ARRIVALS: list[tuple[list[str], dict[str, Any]]] = [
    (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
    (["--presence-penalty", "-1", "--frequency-penalty", "0.5"], {"presence_penalty": -1, "frequency_penalty": 0.5}),
    (["--logit-bias", "50=2.5, 7=-100"], {"logit_bias": {50: 2.5, 7: -100}}),
    (["--allowed-token-ids", "1, 2", "--bad-token-ids", "2"], {"allowed_token_ids": (1, 2), "bad_token_ids": (2,)}),
    (["--stop-token-ids", "3", "--stop", "a", "--stop", "b"], {"stop_token_ids": (3,), "stop": ("a", "b")}),
    (["--logprobs", "0", "--prompt-logprobs", "3", "--json"], {"logprobs": 0, "prompt_logprobs": 3}),
    (["--regex", "a+"], {"structured_outputs": StructuredOutputs(regex="a+")}),
    (["--choice", "a", "--choice", ""], {"structured_outputs": StructuredOutputs(choice=("a", ""))}),
    (["--json-object", "--json"], {"structured_outputs": StructuredOutputs(json_object=True)}),
    (["--json-schema", '{"type": "null"}'], {"structured_outputs": StructuredOutputs(json={"type": "null"})}),
    (["--grammar", 'start: "a"'], {"structured_outputs": StructuredOutputs(grammar='start: "a"')}),
    ([], {}),
]


@pytest.mark.parametrize(("words", "expected"), ARRIVALS, ids=[" ".join(words) for words, _ in ARRIVALS])
def test_options_arrive_as_they_are(words: list[str], expected: dict[str, Any]) -> None:
    assert sampling_params(parse_arguments(["x", *words])) == SamplingParams(**expected)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_shapes_may_stand_in_files(tmp_path: Path, bom: bytes) -> None:
    """Also in one whose name looks like a schema."""
    file = tmp_path / "{} 你"
    for option, name, text in (("--json-schema", "json", '{"const": "你"}'), ("--grammar", "grammar", 'start: "你"')):
        file.write_bytes(bom + text.encode())
        params = sampling_params(parse_arguments(["x", option, str(file)]))
        assert params.structured_outputs == StructuredOutputs(**{name: text})


def actions() -> dict[str, argparse.Action]:
    return {action.dest: action for action in make_parser()._actions}


def test_choices_are_those_of_the_engine() -> None:
    for name, choices in (("dtype", DTYPES), ("speculation", SPECULATION), ("draft_sampling", DRAFT_SAMPLING),
                          ("logprobs_mode", LOGPROBS_MODES)):  # fmt: skip
        assert actions()[name].choices == choices
        assert name in ENGINE_OPTIONS


def test_the_readme_names_every_option() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("## Options of", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"--[a-z][a-z-]+|--n\b", table))
    given = {word for action in make_parser()._actions for word in action.option_strings} - {"-h", "--help"}
    assert given - named == set()
    assert named - given <= {"--help"}


# -- what may come -----------------------------------------------------------------------------------------------------


def tokens(result: Result) -> list[int]:
    assert result.code == 0, result.err
    return result.objects[0]["token_ids"]


@pytest.mark.parametrize(
    ("words", "allowed", "needed"),
    [
        (["--logit-bias", "30=100"], {30}, {30}),
        (["--allowed-token-ids", "7,61"], {7, 61}, {7, 61}),
        (["--bad-token-ids", "54,15", "--ignore-eos"], set(range(71)) - {54, 15}, set()),
        (["--logit-bias", "54=-100,15=-100", "--ignore-eos"], set(range(71)) - {54, 15}, set()),
        (["--frequency-penalty", "2", "--presence-penalty", "2", "--repetition-penalty", "3"], set(range(71)), set()),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_tokens_are_those_that_may_come(
    cli: Cli, pair: list[str], words: list[str], allowed: set[int], needed: set[int]
) -> None:
    """With a draft as without; and without the option they would be others."""
    argv = [*KNOWN, "--max-new-tokens", 24, *words, "--json"]
    found = tokens(cli(*pair, *argv))
    assert found != known_case().token_ids[:24]
    assert needed <= set(found) <= allowed
    assert found == tokens(cli(*pair[:2], "--draft", "none", *argv))


def test_penalties_break_a_cycle(cli: Cli, pair: list[str]) -> None:
    argv = [*pair, *STEADY, "--max-new-tokens", 24, "--ignore-eos", "--json"]
    assert len(set(tokens(cli(*argv)))) == 9
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        assert len(set(tokens(cli(*argv, option, 2)))) > 9


# -- log-probabilities -------------------------------------------------------------------------------------------------


def refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")


def test_log_probabilities_of_output_and_prompt(cli: Cli, pair: list[str]) -> None:
    argv = [*KNOWN, "--max-new-tokens", 12, "--json"]
    [found] = cli(*pair, *argv, "--logprobs", 2, "--prompt-logprobs", 1).objects
    assert list(found)[-2:] == ["logprobs", "prompt_logprobs"]
    assert [one["token_id"] for one in found["logprobs"]] == known_case().token_ids[:12] == found["token_ids"]
    assert [one["token"] for one in found["logprobs"][1:3]] == ["h", "i"]
    for one in found["logprobs"]:
        assert list(one) == ["token_id", "token", "logprob", "rank", "top"]
        assert one["rank"] == 1 and one["top"][0] == [one["token_id"], one["logprob"]]
        assert len(one["top"]) == 2 and one["top"][1][1] < one["logprob"] < 0
    first, second = found["prompt_logprobs"]
    assert first is None
    assert second["token_id"] == known_prompt()[1] and len(second["top"]) == 1
    assert second["rank"] > 1 and second["top"][0][1] > second["logprob"], "it is no token that was chosen"


def test_alternatives_that_cannot_come_are_left_out(cli: Cli) -> None:
    """−∞ is no JSON.  Without a tokenizer, tokens have no text."""
    argv = ["--target", PAIR / "target", "--draft", "none", *KNOWN, "--max-new-tokens", 3, "--json"]
    hot = ["--temperature", 1, "--seed", 1, "--top-k", 2, "--logprobs", 5, "--logprobs-mode", "processed_logprobs"]
    result = cli(*argv, *hot)
    found = json.loads(result.out, parse_constant=refuse)["logprobs"]
    assert [len(one["top"]) for one in found] == [2, 2, 2]
    for one in found:
        assert math.isclose(sum(math.exp(value) for _, value in one["top"]), 1, rel_tol=1e-5)
        assert one["token"] is None and [one["token_id"], one["logprob"]] in one["top"]
    assert "changes nothing" not in result.err


def test_a_mode_without_log_probabilities_is_named(cli: Cli, pair: list[str]) -> None:
    err = cli(*pair, *KNOWN, "--max-new-tokens", 1, "--logprobs-mode", "raw_logprobs").err
    assert err.splitlines()[0] == "--logprobs-mode without --logprobs: it changes nothing"


# -- structured output -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--choice", "你😀", "--choice", "b 你"], {"你😀", "b 你"}),
        (["--regex", "(xay|hi){2}!"], {"xayxay!", "xayhi!", "hixay!", "hihi!"}),
        (["--grammar", 'start: "b" word+ "."\nword: " hi"'], {"b" + " hi" * n + "." for n in range(1, 9)}),
        (["--json-schema", '{"type": "integer", "minimum": -3, "maximum": 12}'], set(map(str, range(-3, 13)))),
    ],
    ids=["choice", "regex", "grammar", "schema"],
)
def test_texts_have_the_shape(cli: Cli, pair: list[str], words: list[str], texts: set[str]) -> None:
    """As they stream, and in JSON; with a draft and without."""
    argv = [*KNOWN, *words, "--max-new-tokens", 24]
    result = cli(*pair, *argv, "--json")
    [found] = result.objects
    assert found["text"] in texts and found["text"] != START[: len(found["text"])]
    assert found["finish_reason"] == "stop"
    assert found["text"] in result.out, "UTF-8, not escapes"
    assert cli(*pair[:2], "--draft", "none", *argv).out == found["text"] + "\n"


def test_an_object_needs_its_braces(cli: Cli, pair: list[str]) -> None:
    """They are not in the vocabulary of this target."""
    found = cli(*pair, *KNOWN, "--json-object", "--json")
    assert found.code == 2 and "had to be given up: structured output after 0 tokens: " in found.err
    assert found.objects[0]["finish_reason"] == "abort"


@pytest.mark.slow
def test_samples_have_the_shape_too(cli: Cli, pair: list[str]) -> None:
    hot = ["--temperature", 2, "--seed", 3, "--n", 2, "--max-running-requests", 1]
    found = cli(*pair, *KNOWN, "--regex", "[a-z]{4}", *hot, "--logprobs", 0, "--json").objects
    texts = [one["text"] for one in found]
    assert all(len(text) == 4 and text.isalpha() for text in texts) and len(set(texts)) > 1
    for one in found:
        assert [each["token_id"] for each in one["logprobs"]] == one["token_ids"]
        assert "prompt_logprobs" not in one and not any(each["top"] for each in one["logprobs"])
