"""A mistake is one sentence on stderr that names the thing and the values, exit code 2, and nothing on stdout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm.pairs import FOLDER  # pyright: ignore[reportMissingImports]
from llm.text_target import PAIR, START, known_prompt, write_text_target  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file, save_file

from .conftest import Cli, run_process

TARGET = ["--target", PAIR / "target"]
BOTH = [*TARGET, "--draft", PAIR / "draft"]
IDS = ["--prompt-ids", "1,2"]

MISTAKES: list[tuple[list[Any], str]] = [
    # the command line itself
    ([], "no prompt is given: pass one as an argument, or use --prompts-file or --prompt-ids"),
    (["--foo", "x"], "unrecognized arguments: --foo (--help lists the options)"),
    (["--max-new", "5", "x"], "unrecognized arguments: --max-new (--help lists the options)"),
    ([*IDS, "--max-new-tokens", "x"], "argument --max-new-tokens: invalid int value: 'x' (--help lists the options)"),
    ([*IDS, "--seed", "1.5"], "argument --seed: invalid int value: '1.5' (--help lists the options)"),
    ([*IDS, "--seed", "5" * 5000], f"argument --seed: invalid int value: '{'5' * 162}… (--help lists the options)"),
    ([*IDS, "--temperature", "warm"], "argument --temperature: invalid float value: 'warm' (--help lists the options)"),
    ([*IDS, "--dtype", "int8"], "argument --dtype: invalid choice: 'int8' (choose from "),
    ([*IDS, "--kernels", "cuda"], "argument --kernels: invalid choice: 'cuda' (choose from "),
    ([*IDS, "--platform", "rocm"], "argument --platform: invalid choice: 'rocm' (choose from "),
    ([*IDS, "--target"], "argument --target: expected one argument (--help lists the options)"),
    # sampling
    ([*IDS, "--max-new-tokens", "0"], "max_new_tokens must be an integer of at least 1, not 0"),
    ([*IDS, "--max-new-tokens", "-3"], "max_new_tokens must be an integer of at least 1, not -3"),
    ([*IDS, "--temperature", "nan"], "temperature must be a number of at least 0, not nan"),
    ([*IDS, "--top-p", "1.1"], "top_p must be above 0 and at most 1, not 1.1"),
    ([*IDS, "--top-k", "-5"], "top_k must be a positive integer, or 0 for no limit, not -5"),
    ([*IDS, "--n", "2"], "n is 2, and greedy decoding gives one output: set a temperature, or n to 1"),
    ([*IDS, "--n", "65", "--temperature", "1"], "n must be an integer from 1 to 64, not 65"),
    ([*IDS, "--min-tokens", "257"], "min_tokens must be from 0 to max_new_tokens, which is 256, not 257"),
    ([*IDS, "--min-p", "-1"], "min_p must be from 0 to 1, not -1.0"),
    ([*IDS, "--stop-token-ids", "2,x"], "--stop-token-ids must be integers separated by commas, not '2,x'"),
    ([*IDS, "--stop-token-ids", "2,-1"], "stop_token_ids holds -1, which is not a token id"),
    ([*BOTH, *IDS, "--stop-token-ids", "71"], "stop_token_ids holds 71, which is not a token id from 0 to 70"),
    ([*IDS, "--stop", ""], "stop must be texts of at least one character, not ['']"),
    # penalties, biases, lists
    ([*IDS, "--repetition-penalty", "0"], "repetition_penalty must be above 0 and at most 10, not 0.0"),
    ([*IDS, "--repetition-penalty", "x"], "argument --repetition-penalty: invalid float value: 'x' (--help lists"),
    ([*IDS, "--presence-penalty", "-3"], "presence_penalty must be from -2 to 2, not -3.0"),
    ([*IDS, "--frequency-penalty", "nan"], "frequency_penalty must be from -2 to 2, not nan"),
    ([*IDS, "--logit-bias", ""], "--logit-bias must be TOKEN=NUMBER separated by commas, not ''"),
    ([*IDS, "--logit-bias", "5"], "--logit-bias must be TOKEN=NUMBER separated by commas, not '5'"),
    ([*IDS, "--logit-bias", "5=1,"], "--logit-bias must be TOKEN=NUMBER separated by commas, not '5=1,'"),
    ([*IDS, "--logit-bias", "a=1"], "--logit-bias must be TOKEN=NUMBER separated by commas, not 'a=1'"),
    ([*IDS, "--logit-bias", "5=1=2"], "--logit-bias must be TOKEN=NUMBER separated by commas, not '5=1=2'"),
    ([*IDS, "--logit-bias", "7" * 4000 + "=1"], "--logit-bias holds " + "7" * 59 + "…, which is not a token id"),
    ([*IDS, "--logit-bias=-1=1"], "logit_bias holds -1, which is not a token id"),
    ([*IDS, "--logit-bias", "5=101"], "logit_bias of token 5 must be a number from -100 to 100, not 101.0"),
    ([*IDS, "--logit-bias", "5=nan"], "logit_bias of token 5 must be a number from -100 to 100, not nan"),
    ([*IDS, "--logit-bias", "5=1,6=2,5=3"], "--logit-bias names token 5 twice"),
    ([*BOTH, *IDS, "--logit-bias", "71=1"], "logit_bias holds 71, which is not a token id from 0 to 70"),
    ([*IDS, "--allowed-token-ids", "1;2"], "--allowed-token-ids must be integers separated by commas, not '1;2'"),
    ([*IDS, "--allowed-token-ids", "1", "--bad-token-ids", "1"], "together leave no token that may come"),
    ([*BOTH, *IDS, "--allowed-token-ids", "1,71"], "allowed_token_ids holds 71, which is not a token id from 0 to 70"),
    ([*IDS, "--bad-token-ids", ""], "--bad-token-ids must be integers separated by commas, not ''"),
    ([*IDS, "--bad-token-ids", "1,-2"], "bad_token_ids holds -2, which is not a token id"),
    ([*BOTH, *IDS, "--bad-token-ids", ",".join(map(str, range(71)))], "bad_token_ids forbid every token of the"),
    # log-probabilities
    ([*IDS, "--logprobs", "21"], "logprobs must be an integer from 0 to 20, not 21"),
    ([*IDS, "--logprobs", "all"], "argument --logprobs: invalid int value: 'all' (--help lists the options)"),
    ([*IDS, "--prompt-logprobs", "-1"], "prompt_logprobs must be an integer from 0 to 20, not -1"),
    ([*IDS, "--logprobs", "1", "--logprobs-mode", "log"], "argument --logprobs-mode: invalid choice: 'log' (choose"),
    # structured output
    ([*IDS, "--json-schema", "no.json"], "--json-schema is neither a file nor a JSON object: 'no.json'"),
    ([*IDS, "--json-schema", ""], "--json-schema is neither a file nor a JSON object: ''"),
    ([*IDS, "--json-schema", str(FOLDER)], f"--json-schema is neither a file nor a JSON object: '{str(FOLDER)[:40]}"),
    ([*IDS, "--json-schema", '{"type": '], "structured output: json is not a JSON schema: Expecting value: line 1"),
    ([*IDS, "--grammar", "no.lark"], "--grammar is neither a file nor a grammar: 'no.lark'"),
    ([*IDS, "--regex", ""], "structured output: regex must be a text of at least one character, not ''"),
    ([*IDS, "--json-object", "--regex", "a"], "--regex and --json-object are given, and a text has one shape at most"),
    ([*IDS, "--choice", "a", "--choice", "b", "--json-schema", "{}"], "--json-schema and --choice are given, and a "),
    ([*IDS, "--regex", "a", "--ignore-eos"], "structured_outputs cannot be combined with ignore_eos"),
    ([*IDS, "--regex", "a", "--min-tokens", "1"], "structured_outputs cannot be combined with min_tokens"),
    ([*IDS, "--choice", "a", "--bad-token-ids", "1"], "structured_outputs cannot be combined with bad_token_ids"),
    ([*BOTH, *IDS, "--regex", "a"], "structured output needs a tokenizer, and the target comes without one"),
    # prompts
    ([""], "the prompt is empty"),
    (["a", "  "], "prompt 2 is empty"),
    (["--prompt-ids", ""], "--prompt-ids must be integers separated by commas, not ''"),
    (["--prompt-ids", "1,two"], "--prompt-ids must be integers separated by commas, not '1,two'"),
    (["--prompt-ids", "7" * 5000], "--prompt-ids must be integers separated by commas, not '" + "7" * 58 + "…"),
    (["--prompt-ids", "7" * 4000], "--prompt-ids holds " + "7" * 59 + "…, which is not a token id"),
    ([*BOTH, *IDS, "--prompt-ids", "3,71"], "prompt 2 holds 71, which is not a token id from 0 to 70"),
    ([*BOTH, "--prompt-ids", "-1"], "the prompt holds -1, which is not a token id from 0 to 70"),
    ([*BOTH, "hello"], f"the prompt: target {PAIR / 'target'} has no tokenizer: give token ids instead of text"),
    ([*BOTH, *IDS, "--stop", "x"], "has no tokenizer, so stop texts cannot be found: use stop_token_ids (--stop-"),
    ([*BOTH, *IDS, "--system", "x"], "--system needs prompts of text or messages, and token ids are given"),
    ([*BOTH, "hi", "--system", "x"], "--system needs a chat template, and target "),
    (
        [*BOTH, "--prompt-ids", ",".join(["5"] * 256)],
        "the prompt has 256 tokens, which leaves no room for",
    ),
    # models
    (["--target", "/no/such/model", *IDS], "/no/such/model: no such file or folder"),
    (["--target", "", *IDS], "target is empty: name one, or leave the option out for the default"),
    ([*TARGET, "--draft", " ", *IDS], "draft is empty: name one, or leave the option out for the default"),
    (["--target", FOLDER, *IDS], f"{FOLDER} has no config.json"),
    ([*TARGET, "--draft", "/no/such/draft", *IDS], "/no/such/draft: no such file or folder"),
    ([*TARGET, "--draft", FOLDER / "qwen3-v2" / "draft", *IDS], "draft/config.json: "),
    ([*TARGET, "--draft", "/no/such/draft", *IDS, "--speculation", "never"], "/no/such/draft: no such file or folder"),
    ([*TARGET, "--draft", "ngram:0", *IDS, "--speculation", "never"], "draft 'ngram:0' is not ngram:MAX or "),
    ([*TARGET, "--draft", TARGET[1], *IDS, "--speculation", "never"], "is not a draft that this version knows"),
    ([*BOTH, *IDS, "--draft-sampling", "gumbel"], "argument --draft-sampling: invalid choice: 'gumbel' (choose from "),
    ([*BOTH, *IDS, "--draft-temperature", "0"], "draft_temperature must be a number above 0, not 0.0"),
    (
        [*TARGET, *IDS, "--draft", "none", "--draft-temperature", "0.5"],
        "draft_temperature 0.5 needs a draft, and draft is 'none'",
    ),
    (
        [*TARGET, *IDS, "--draft", "ngram:3", "--draft-temperature", "0.5"],
        "draft_temperature 0.5 has no meaning with draft 'ngram:3', which looks its tokens up",
    ),
    ([*BOTH, *IDS, "--draft-temperature", "nan"], "draft_temperature must be a number above 0, not nan"),
    (
        [*BOTH, *IDS, "--draft-temperature", "0.5", "--draft-sampling", "argmax"],
        "draft_temperature 0.5 has no meaning with draft_sampling 'argmax'",
    ),
    ([*TARGET, "--draft", "ngram", *IDS, "--block-size", "1000000"], "block_size 1000000 is outside 2 … 256 of draft"),
    ([*BOTH, *IDS, "--block-size", "0"], "block_size must be an integer of at least 2, not 0"),
    ([*BOTH, *IDS, "--block-size", "1"], "block_size must be an integer of at least 2, not 1"),
    ([*BOTH, *IDS, "--block-size", "13"], "block_size 13 is outside 2 … 12"),
    ([*TARGET, *IDS, "--draft", "none", "--block-size", "4"], "block_size 4 needs a draft, and draft is 'none'"),
    # execution
    ([*TARGET, *IDS, "--kernels", "triton"], "kernels 'triton' cannot be used: they run on gpu, and the platform is"),
    ([*TARGET, *IDS, "--kv-cache-bytes", "1000"], "kv_cache_bytes 1000 holds 0 pages of 16 tokens ("),
    ([*TARGET, *IDS, "--max-model-len", "1"], "max_model_len must be an integer of at least 2, not 1"),
    ([*TARGET, *IDS, "--max-running-requests", "0"], "max_running_requests must be an integer of at least 1, not 0"),
]


@pytest.mark.parametrize("argv, message", MISTAKES, ids=[message[:50] for _, message in MISTAKES])
def test_mistakes(cli: Cli, argv: list[Any], message: str) -> None:
    error = cli(*argv, "--json").error
    assert message in error
    assert not error.endswith(".")


LOGPROBS = [["--logprobs", 2], ["--prompt-logprobs", 0], ["--logprobs", 1, "--prompt-logprobs", 1]]


@pytest.mark.parametrize("argv", LOGPROBS)
def test_log_probabilities_have_no_place_in_text(cli: Cli, argv: list[Any]) -> None:
    asked = " and ".join(str(word) for word in argv if str(word).startswith("--"))
    assert cli(*BOTH, *IDS, *argv).error == f"{asked} would be lost in plain text: add --json"


SHAPES: list[tuple[list[str], str]] = [
    (["--regex", "(a"], "structured output: regex '(a' cannot be used: "),
    (["--regex", "a\udcff"], "structured output: regex 'a\\udcff' cannot be used: "),
    (["--choice", "a\udcff"], "structured output: choice ('a\\udcff',) cannot be used: "),
    (["--regex", "€"], "structured output: regex '€' cannot be used: "),
    (["--grammar", "start: a"], "structured output: grammar 'start: a' cannot be used: "),
    (["--json-schema", '{"type": "unknown"}'], 'structured output: json \'{"type": "unknown"}\' cannot be used: '),
]


@pytest.mark.parametrize(("argv", "message"), SHAPES, ids=[" ".join(argv) for argv, _ in SHAPES])
def test_shapes_that_cannot_be_had(cli: Cli, pair: list[str], argv: list[str], message: str) -> None:
    error = cli(*pair, "hi", *argv, "--json").error
    assert error.startswith(message) and len(error) > len(message)


def test_a_shape_that_the_vocabulary_cannot_fill_ends_its_prompt(cli: Cli, pair: list[str]) -> None:
    """As far as it goes it is shown, with the reason behind it."""
    found = cli(*pair, "hi", "--regex", "hi(€)", "--json")
    assert found.code == 2 and found.objects[0]["text"] == "hi"
    assert found.objects[0]["finish_reason"] == "abort"
    assert "error: the prompt had to be given up: structured output after 2 tokens: " in found.err


def test_files_of_shapes_that_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "shape"
    file.write_bytes(b"\xff")
    for option in ("--json-schema", "--grammar"):
        assert cli(*IDS, option, file).error.startswith(f"{option} {file} is not UTF-8 text: ")
    file.write_bytes(b"")
    assert cli(*IDS, "--json-schema", file).error.startswith("structured output: json is not a JSON schema: ")
    assert cli(*IDS, "--grammar", file).error.startswith("structured output: grammar must be a text of at least one")
    missing = tmp_path / "memory"
    missing.symlink_to("/proc/self/mem")
    if missing.exists():
        assert cli(*IDS, "--grammar", missing).error == f"cannot read --grammar {missing}: Input/output error"


def test_text_that_is_no_unicode(cli: Cli, pair: list[str]) -> None:
    """A byte that is not UTF-8 on the command line reaches Python as half a surrogate."""
    error = cli(*pair, "fine", "a\udcff").error
    assert error == "prompt 2 is not valid Unicode: it has half of a surrogate pair, U+DCFF at position 1"


def test_a_template_that_refuses(cli: Cli, tmp_path: Path) -> None:
    folder = write_text_target(tmp_path / "target")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}", encoding="utf-8")
    error = cli("--target", folder, "--draft", "none", "hi").error
    assert error == "the prompt: the chat template failed: no users here"


def test_files_that_are_broken(cli: Cli, tmp_path: Path) -> None:
    """Each is named; later files are only looked at when the earlier ones are right."""
    folder = tmp_path / "target"
    shutil.copytree(PAIR / "target", folder)
    argv = ["--target", folder, "--draft", "none", *IDS]
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, message in ((whole[:-10], "truncated"), (b"", ""), (whole[:4], ""), (b"\xff" * 100, "")):
        weights.write_bytes(content)
        error = cli(*argv).error
        assert str(weights) in error and message in error
    weights.unlink()
    assert "safetensors" in cli(*argv).error
    (folder / "config.json").write_text("[]", encoding="utf-8")
    assert str(folder / "config.json") in cli(*argv).error


def test_missing_and_odd_tensors_come_in_one_error(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(PAIR / "target", folder)
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.layers.9.extra"] = lost.copy()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].copy()
    save_file(tensors, folder / "model.safetensors")
    error = cli("--target", folder, "--draft", "none", *IDS).error
    for part in ("3 problems", "model.layers.1.mlp.up_proj.weight", "model.layers.9.extra", "model.norm.weight", "[5]"):
        assert part in error


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_platform_that_is_not_there(platform: str) -> None:
    """In a process of its own, where JAX has not begun yet."""
    if os.environ["JAX_PLATFORMS"] != "cpu":
        pytest.skip("there may be one")
    result = run_process(*TARGET, "--draft", "none", *IDS, "--platform", platform)
    assert result.error.startswith(f"platform '{platform}' cannot be used here: ")


def test_a_model_that_fails_on_a_prompt(cli: Cli, tmp_path: Path) -> None:
    """The others are shown as ever; the sentence follows the summary, and the exit code is 2."""
    folder = write_text_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][69] = np.nan
    save_file(tensors, folder / "model.safetensors")
    known = ",".join(map(str, known_prompt()))
    argv = ["--target", folder, "--draft", "none", "--prompt-ids", known, "--prompt-ids", "5,6,7"]
    result = cli(*argv, "--max-new-tokens", 9, "--json", "--max-running-requests", 2)
    first, second = result.objects
    assert (first["text"], first["finish_reason"], second["finish_reason"]) == (START, "abort", "length")
    assert result.code == 2
    summary, error = result.err.splitlines()[-2:]
    assert summary.endswith("1 of 2 prompts not finished)")
    assert error.startswith(
        "error: prompt 1 had to be given up after 8 tokens: the target's logits are not numbers (NaN)"
    )


def test_a_target_of_nan_alone(cli: Cli, tmp_path: Path) -> None:
    folder = write_text_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}, folder / "model.safetensors")
    result = cli("--target", folder, "--draft", PAIR / "draft", "hi", "--max-running-requests", 2)
    assert (result.code, result.out) == (2, "\n")
    assert "Traceback" not in result.err
    assert result.err.splitlines()[-1].startswith(
        "error: the prompt had to be given up at its first token: the target's"
    )


def test_a_full_disk(cli: Cli, pair: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as full:
        result = run_process(*BOTH, *IDS, "--max-new-tokens", 2, stdout=full)
    assert (result.code, result.err.splitlines()[-1]) == (2, "error: cannot write to stdout: No space left on device")
    assert "Traceback" not in result.err
