"""The recorded pairs through the command line: token ids in, token ids out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from llm.pairs import FOLDER, NAMES, Case, block_sizes, cases_of, read_cases  # pyright: ignore[reportMissingImports]

from .conftest import Cli, Result, run_process

ALL_LENGTHS = ["qwen3-v2", "x-noncausal-window"]  # elsewhere the prompts that share one compiled prefill
SOME = ("qwen3-v1", "llama-v2-window", "x-noncausal-window")  # the library decodes all of them in tests/llm


def arguments(name: str) -> list[object]:
    return [
        "--target",
        FOLDER / name / "target",
        "--draft",
        FOLDER / name / "draft",
        "--ignore-eos",
        "--dtype",
        "float32",
    ]


def check(case: Case, found: dict[str, Any]) -> None:
    """The run went on for longer than the case: its tokens come first, and so do its comparable rounds."""
    assert found["prompt"] == case.prompt_ids
    assert found["prompt_tokens"] == len(case.prompt_ids)
    assert found["token_ids"][: case.max_new_tokens] == case.token_ids
    rounds = case.comparable_rounds
    assert cut(found["accept_lengths"], case.max_new_tokens - 1)[:rounds] == case.accept_lengths[:rounds]
    assert found["rounds"] == len(found["accept_lengths"])
    assert sum(found["accept_lengths"]) == len(found["token_ids"]) - 1
    assert found["mean_accept_length"] == pytest.approx(sum(found["accept_lengths"]) / found["rounds"])
    assert (found["text"], found["finish_reason"]) == (None, "length")


def cut(lengths: list[int], tokens: int) -> list[int]:
    """The rounds of the first so many tokens."""
    before = [sum(lengths[:index]) for index in range(len(lengths))]
    return [min(length, tokens - start) for length, start in zip(lengths, before, strict=True) if start < tokens]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SOME else pytest.mark.soak) for name in NAMES])
def test_every_pair(cli: Cli, name: str, tmp_path: Path) -> None:
    cases = [case for case in cases_of(name, block_sizes(name)[0]) if name in ALL_LENGTHS or len(case.prompt_ids) <= 16]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": case.prompt_ids}) for case in cases), encoding="utf-8")
    longest = max(case.max_new_tokens for case in cases)
    result = cli(*arguments(name), "--prompts-file", file, "--max-new-tokens", longest, "--max-running-requests", 1,
                 "--json")  # fmt: skip
    assert result.code == 0
    for case, found in zip(cases, result.objects, strict=True):
        check(case, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-v1", "llama-v2-window", "x-default-taps"])
def test_block_size(cli: Cli, name: str) -> None:
    for block_size in block_sizes(name)[1:]:
        [case] = cases_of(name, block_size)
        result = cli(*arguments(name), "--block-size", block_size, "--prompt-ids", written(case), "--disable-overlap",
                     "--max-new-tokens", case.max_new_tokens, "--json")  # fmt: skip
        [found] = result.objects
        check(case, found)
        assert max(found["accept_lengths"]) == block_size


def written(case: Case) -> str:
    return ",".join(map(str, case.prompt_ids))


def in_a_process(name: str, *extra: object) -> tuple[Case, Result]:
    """Compiled as users compile, which the tests above are not."""
    case = read_cases(name)[1]
    numbers = ["--prompt-ids", written(case), "--max-new-tokens", case.max_new_tokens]
    return case, run_process(*arguments(name), *numbers, *extra, env={"XLA_FLAGS": os.environ["XLA_FLAGS"]})


@pytest.mark.slow
def test_as_a_process_with_json() -> None:
    case, result = in_a_process("llama-v2-window", "--json")
    assert result.code == 0
    [found] = result.objects
    check(case, found)
    assert found["token_ids"] == case.token_ids
    assert (found["dtype"], found["draft"]) == ("float32", str(FOLDER / "llama-v2-window" / "draft"))


@pytest.mark.slow
def test_as_a_process_without_json() -> None:
    """Without a tokenizer the ids themselves stream; stderr has a line for each thing that happened."""
    case, result = in_a_process("x-v2-one-layer")
    assert result.code == 0
    assert result.out == ",".join(map(str, case.token_ids)) + "\n"
    kinds = [line.split(":")[0].split(" ")[0] for line in result.err.splitlines()]
    assert kinds[:2] == ["kernels", "memory"]
    assert kinds[-1] == str(case.max_new_tokens)
    assert "%" not in result.err and "\r" not in result.err, "progress bars are for terminals"
