"""What a user sees: text as it comes, objects, the summary, and which stream carries what."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from llm.text_target import PAIR, PERIOD, START, known_case, known_prompt  # pyright: ignore[reportMissingImports]

from dflash_jax import SamplingParams, UserError
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.generate import Printer, main, make_parser

from .conftest import KEYS, Cli

KNOWN = ",".join(map(str, known_prompt()))
STEADY = ",".join(map(str, known_prompt(12)))
SUMMARY = re.compile(r"(\d+) tokens? in (\d+\.\d\d) s, (\d+\.\d) tok/s, mean acceptance (\d+\.\d\d|-)( \(.*\))?")


def known(limit: int) -> list[object]:
    return ["--prompt-ids", KNOWN, "--max-new-tokens", limit]


# -- JSON --------------------------------------------------------------------------------------------------------------


def test_an_object_has_the_keys_of_the_contract(cli: Cli, pair: list[str]) -> None:
    result = cli(*pair, *known(40), "--json")
    assert result.code == 0
    [found] = result.objects
    assert list(found) == KEYS
    expected = {
        "prompt": known_prompt(), "prompt_tokens": 2, "token_ids": known_case().token_ids,
        "text": START + PERIOD * 3 + PERIOD[:4] + "\ufffd", "finish_reason": "length", "rounds": 9,
        "accept_lengths": [2, 3, 1, 1, 1, 12, 12, 3, 4], "target": pair[1], "draft": pair[3], "dtype": "float32",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert found["mean_accept_length"] == pytest.approx(39 / 9)
    assert found["tokens_per_s"] == pytest.approx(39 / found["decode_s"])
    assert found["time_to_first_token_s"] > 0


def test_objects_are_one_a_line_in_the_order_of_the_prompts(cli: Cli, pair: list[str]) -> None:
    """The first prompt ends last."""
    result = cli(*pair, "--prompt-ids", STEADY, "--prompt-ids", "2", "--raw", "hi\nyou", "--json",
                 "--max-new-tokens", 30, "--stop", "zz", "--max-running-requests", 3)  # fmt: skip
    assert [item["prompt"] for item in result.objects] == ["hi\nyou", known_prompt(12), [2]]
    assert "你" in result.out, "JSON is written as UTF-8, not as escapes"


def test_without_rounds_there_is_no_mean(cli: Cli, pair: list[str]) -> None:
    [found] = cli(*pair, *known(1), "--json").objects
    assert [found[key] for key in ("rounds", "accept_lengths", "mean_accept_length", "tokens_per_s")] == [
        0,
        [],
        None,
        None,
    ]


def test_without_a_draft_each_round_is_a_token(cli: Cli, target: Path) -> None:
    [found] = cli("--target", target, "--draft", "none", *known(12), "--json").objects
    assert (found["draft"], found["accept_lengths"], found["mean_accept_length"]) == ("none", [1] * 11, 1.0)
    assert found["token_ids"] == known_case().token_ids[:12]


def test_without_a_tokenizer_text_is_null(cli: Cli) -> None:
    bare = ["--target", PAIR / "target", "--draft", PAIR / "draft"]
    [found] = cli(*bare, *known(5), "--json").objects
    assert (found["text"], found["token_ids"]) == (None, known_case().token_ids[:5])
    assert cli(*bare, *known(5), "--prompt-ids", KNOWN).out == "1,54,15,56,34\n\n1,54,15,56,34\n"


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_stop_and_ignore_eos(cli: Cli, pair: list[str]) -> None:
    [found] = cli(*pair, *known(40), "--stop", "nowhere", "--stop", "b你xay", "--json").objects
    assert (found["text"], found["finish_reason"]) == (START[:-1], "stop")
    assert found["token_ids"] == known_case().token_ids[:12]
    assert sum(found["accept_lengths"]) == 11
    for word in ("hi", "why", "you", "so", "yes"):
        [ends] = cli(*pair, word, "--json", "--max-new-tokens", 60).objects
        [goes_on] = cli(*pair, word, "--json", "--max-new-tokens", 60, "--ignore-eos").objects
        assert len(goes_on["token_ids"]) == 60
        assert goes_on["token_ids"][: len(ends["token_ids"])] == ends["token_ids"]
        assert (ends["finish_reason"] == "stop") == (ends["token_ids"][-1] == 2) == (len(ends["token_ids"]) < 60)


def test_what_ends_the_output_may_be_kept_and_may_have_to_wait(cli: Cli, pair: list[str]) -> None:
    words = [*pair, *known(40), "--stop", "b你xay", "--json"]
    [kept] = cli(*words, "--include-stop-str-in-output").objects
    assert (kept["text"], kept["token_ids"]) == (START + "你xay", known_case().token_ids[:12])
    [later] = cli(*words, "--min-tokens", 12).objects
    assert (later["text"], later["token_ids"]) == (START + PERIOD[:-1], known_case().token_ids[:21])


def test_stop_token_ids_without_a_tokenizer(cli: Cli) -> None:
    bare = ["--target", PAIR / "target", "--draft", PAIR / "draft", *known(40), "--json"]
    [found] = cli(*bare, "--stop-token-ids", "70, 34").objects
    assert (found["token_ids"], found["finish_reason"]) == ([1, 54, 15, 56, 34], "stop")


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_with_any_draft(cli: Cli, pair: list[str]) -> None:
    hot = ["--temperature", 0.7, "--top-p", 0.9, "--top-k", 20, "--min-p", 0.01, "--json", *known(40)]
    [first] = cli(*pair, *hot, "--seed", 5).objects
    [without] = cli(*pair[:2], "--draft", "none", *hot, "--seed", 5).objects
    [other] = cli(*pair, *hot, "--seed", 6).objects
    assert first["token_ids"] == without["token_ids"] != other["token_ids"]
    assert [found["seed"] for found in (first, without, other)] == [5, 5, 6]
    assert first["token_ids"] != known_case().token_ids


def test_a_seed_that_was_not_given_is_reported_and_can_be_used_again(cli: Cli, pair: list[str]) -> None:
    hot = ["--temperature", 1.0, "--json", *known(40)]
    first, second = (cli(*pair, *hot).objects[0] for _ in range(2))
    assert first["seed"] != second["seed"]
    [again] = cli(*pair, *hot, "--seed", first["seed"]).objects
    assert again["token_ids"] == first["token_ids"] != second["token_ids"]


def test_options_that_have_no_effect_are_named(cli: Cli, pair: list[str]) -> None:
    err = cli(*pair, *known(2), "--top-p", 0.5, "--seed", 1).err
    assert err.splitlines()[0] == "--top-p --seed without --temperature: decoding is greedy"
    assert "without" not in cli(*pair, *known(2), "--top-p", 0.5, "--seed", 1, "--temperature", 0.1).err
    err = cli(*pair, *known(2), "--draft-temperature", 0.5, "--seed", 1, "--temperature", 1e-7).err
    assert err.splitlines()[0] == "--seed --draft-temperature without --temperature: decoding is greedy"


SAMPLES = ["--temperature", 0.7, "--seed", 5, "--max-new-tokens", 9, "--n", 3, "--max-running-requests", 2]


def test_several_samples_are_an_object_each(cli: Cli, pair: list[str]) -> None:
    """The others of a prompt come before the next prompt; each is that of its own seed."""
    found = cli(*pair, "--prompt-ids", KNOWN, "--prompt-ids", STEADY, *SAMPLES, "--json").objects
    assert [(item["prompt"], item["index"], item["seed"]) for item in found] == [
        (prompt, i, 5 + i) for prompt in (known_prompt(), known_prompt(12)) for i in range(3)
    ]
    assert list(found[0])[:2] == ["prompt", "index"]
    solo = cli(*pair, "--prompt-ids", STEADY, *SAMPLES, "--n", 1, "--seed", 7, "--json").objects
    assert (solo[0]["token_ids"], solo[0]["text"]) == (found[5]["token_ids"], found[5]["text"])
    assert "index" not in solo[0]


def test_several_samples_stand_under_headings(cli: Cli, pair: list[str]) -> None:
    words = [*pair, "--prompt-ids", KNOWN, *SAMPLES]
    texts = [item["text"] for item in cli(*words, "--json").objects]
    expected = "\n".join(f"--- the prompt, sample {i} ---\n{text}\n" for i, text in enumerate(texts))
    assert cli(*words).out == expected
    two = cli(*words, "--prompt-ids", STEADY).out
    assert two.startswith(expected.replace("the prompt", "prompt 1"))
    assert "\n\n--- prompt 2, sample 0 ---\n" in two


def test_ctrl_c_ends_all_samples(cli: Cli, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first token: the others have not been submitted for a whole step."""
    show = Printer.show

    def interrupted(self: Printer) -> None:
        show(self)
        if not self.jobs[0].finished:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Printer, "show", interrupted)
    result = cli(*pair, "--prompt-ids", KNOWN, *SAMPLES, "--max-new-tokens", 200, "--ignore-eos", "--json")
    assert result.code == 130
    assert [(item["index"], item["finish_reason"]) for item in result.objects] == [(i, "abort") for i in range(3)]
    assert result.err.splitlines()[-1].endswith("3 of 3 samples not finished)")


OPTIONS: dict[str, Any] = {
    "block_size": 5, "speculation": "always", "draft_sampling": "argmax", "draft_temperature": 0.5,
    "logprobs_mode": "raw_logits", "dtype": "float32", "max_model_len": 99, "kernels": "xla", "max_running_requests": 3,
    "kv_cache_bytes": 10**6, "weights_cache": "w",
}  # fmt: skip


def test_options_reach_the_engine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its value, and none that is not given."""
    asked: list[Any] = []

    def refuse(*args: object, **options: object) -> NoReturn:
        asked.append((args, options))
        raise UserError("enough")

    monkeypatch.setattr("dflash_jax.llm.LLM", refuse)
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert cli("--target", "t", "--draft", "d", "x", *words, "--disable-overlap").error == "enough"
    assert cli("x").error == "enough"
    bare = {"platform": None, "progress": False}
    assert asked == [(("t", "d"), {**bare, **OPTIONS, "overlap": False}), ((None, None), bare)]
    assert set(OPTIONS) <= {field.name for field in dataclasses.fields(EngineSettings)}


@pytest.mark.slow
def test_drafts_may_be_chosen_in_either_way(cli: Cli, pair: list[str]) -> None:
    words = [*pair, *known(40), "--temperature", 1, "--seed", 3, "--max-running-requests", 1, "--json"]
    coupled = cli(*words, "--draft-temperature", 0.2).objects[0]
    argmax = cli(*words, "--draft-sampling", "argmax").objects[0]
    assert coupled["token_ids"] == argmax["token_ids"]
    assert coupled["accept_lengths"] != argmax["accept_lengths"]


# -- text --------------------------------------------------------------------------------------------------------------


def test_text_streams_as_it_is_accepted(cli: Cli, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("dflash_jax.generate.write", written.append)
    assert cli(*pair, *known(39)).code == 0
    pieces = [piece for piece in written if piece]
    assert pieces[:4] == ["hi", "\ufffdxay!", " ", "b"]
    assert "".join(pieces) == START + PERIOD * 3 + "你xay" + "\n"


def test_texts_of_several_prompts_stay_apart(cli: Cli, pair: list[str]) -> None:
    """The second ends first and waits for its turn."""
    result = cli(*pair, "--prompt-ids", KNOWN, "--prompt-ids", STEADY, "--max-new-tokens", 12)
    assert result.out == START + "你xay" + "\n\n" + "😀b你xay" + "\ufffd\n"


def test_the_summary_is_the_last_line_on_stderr(cli: Cli, pair: list[str]) -> None:
    result = cli(*pair, *known(40), "--prompt-ids", KNOWN)
    found = SUMMARY.fullmatch(result.err.splitlines()[-1])
    assert found, result.err
    assert found[1] == "80"
    assert float(found[3]) == pytest.approx(80 / float(found[2]), rel=0.6) or float(found[2]) < 0.05
    assert found[4] == f"{78 / 18:.2f}"


def test_the_summary_of_one_token(cli: Cli, pair: list[str]) -> None:
    found = SUMMARY.fullmatch(cli(*pair, *known(1)).err.splitlines()[-1])
    assert found and (found[1], found[4]) == ("1", "-")
    assert "1 token in" in found[0]


def test_quiet(cli: Cli, pair: list[str], target: Path) -> None:
    result = cli("--target", target, *known(3), "--quiet", "--max-running-requests", 5)
    assert (result.out, result.err) == ("hi\n", "")


def test_the_log_has_a_line_for_each_step_made_ready(cli: Cli, target: Path) -> None:
    result = cli("--target", target, *known(3), "--max-running-requests", 6)
    lines = result.err.splitlines()
    assert lines[0] == "no draft is given: decoding without a draft"
    assert [line.split(":")[0] for line in lines[1:3]] == ["kernels", "memory"]
    assert len([line for line in lines if "ready in" in line]) == 2
    assert len(lines) == 6 and SUMMARY.fullmatch(lines[-1])
    again = cli("--target", target, *known(3), "--max-running-requests", 6).err.splitlines()
    assert len(again) == 1 and "make the steps ready" not in again[0]
    assert "make the steps ready" in lines[-1]


def test_logging_is_set_up_once(cli: Cli, pair: list[str]) -> None:
    for _ in range(2):
        cli(*pair, *known(1))
    assert len(logging.getLogger("dflash_jax").handlers) == 1


# -- terminals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [True, False])
def test_a_terminal_that_knows_only_ascii(cli: Cli, pair: list[str], as_json: bool, monkeypatch: Any) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli(*pair, *known(16), *["--json"] * as_json).code == 0
    if as_json:
        assert json.loads(raw.getvalue().decode("utf-8"))["text"] == START + "你xay😀"
    else:
        assert raw.getvalue() == b"hi?xay! b?xay?\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option has a word of explanation, and the defaults named there are those of the code."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(action.help for action in make_parser()._actions)
    for option in ("--target", "--draft", "--prompts-file", "--prompt-ids", "--raw", "--system", "--max-new-tokens",
                   "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--ignore-eos", "--block-size",
                   "--dtype", "--max-model-len", "--kernels", "--platform", "--json", "--n", "--min-tokens",
                   "--stop-token-ids", "--draft-sampling", "--draft-temperature", "--repetition-penalty",
                   "--presence-penalty", "--frequency-penalty", "--logit-bias", "--allowed-token-ids",
                   "--bad-token-ids", "--logprobs", "--prompt-logprobs", "--logprobs-mode", "--json-schema",
                   "--json-object", "--regex", "--choice", "--grammar",
                   "--include-stop-str-in-output"):  # fmt: skip
        assert option in text
    assert f"in tokens (default: {SamplingParams().max_new_tokens})" in text
    assert f"at once (default: {EngineSettings('x').max_running_requests})" in text
