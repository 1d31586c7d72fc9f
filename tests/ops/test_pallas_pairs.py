"""Recorded pairs with `--kernels pallas`, interpreted: the same tokens and the same acceptance as the reference's.

In a process of its own, compiled without optimisation: interpreted kernels are large programs.  Two pairs are for every
day (DFlash 2; windows both ways); the others take minutes together and run with `-m soak`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llm.pairs import FOLDER, NAMES, block_sizes, cases_of  # pyright: ignore[reportMissingImports]

EVERY_DAY = ("x-v2-one-layer", "x-noncausal-window")
ROOT = Path(__file__).resolve().parents[2]
LONGEST = 16  # tokens of a prompt: longer ones compile further prefills


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.soak) for name in NAMES]
)
def test_tokens_and_acceptance(name: str, tmp_path: Path):
    cases = [case for case in cases_of(name, block_sizes(name)[0]) if len(case.prompt_ids) <= LONGEST]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": case.prompt_ids}) for case in cases), encoding="utf-8")
    longest = max(case.max_new_tokens for case in cases)
    said, found = generate(
        "--target", FOLDER / name / "target", "--draft", FOLDER / name / "draft", "--prompts-file", prompts,
        "--max-new-tokens", longest, "--max-running-requests", 1, "--max-model-len", 256,
    )  # fmt: skip
    assert "pallas for" in said and "interpreted on cpu" in said
    assert len(found) == len(cases) > 0
    for case, one in zip(cases, found, strict=True):
        assert one["token_ids"][: case.max_new_tokens] == case.token_ids
        rounds = whole_rounds(one["accept_lengths"], case.max_new_tokens - 1)[: case.comparable_rounds]
        assert rounds == case.accept_lengths[: len(rounds)]


def whole_rounds(lengths: list[int], tokens: int) -> list[int]:
    """The rounds that lie within so many tokens whole: the run went on for longer than the case."""
    return [length for i, length in enumerate(lengths) if sum(lengths[: i + 1]) <= tokens]


def generate(*argv: object) -> tuple[str, list[dict]]:
    """(stderr, the JSON objects) of the command line in float32."""
    options = ("--kernels", "pallas", "--platform", "cpu", "--dtype", "float32", "--ignore-eos", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "dflash_jax.generate", *map(str, argv), *options],
        cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr, [json.loads(line) for line in done.stdout.splitlines()]
