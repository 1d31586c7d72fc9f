"""The recorded target/draft pairs, and models opened once for all tests of a run: compiling is what takes time."""

from __future__ import annotations

import functools
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from dflash_jax import LLM, RequestOutput, SamplingParams

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pairs"
NAMES = sorted(path.name for path in FOLDER.iterdir())


@dataclass(frozen=True)
class Case:
    """What the reference decoded: see tests/data/make_pairs.py."""

    prompt_ids: list[int]
    max_new_tokens: int
    block_size: int
    greedy_token_ids: list[int]
    token_ids: list[int]
    accept_lengths: list[int]
    comparable_rounds: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=True)

    def check(self, token_ids: list[int], accept_lengths: list[int]) -> None:
        """Tokens to the end, acceptance over the rounds in which the reference drafts whole blocks, too."""
        assert token_ids == self.token_ids
        assert sum(accept_lengths) == max(self.max_new_tokens - 1, 0)
        count = self.comparable_rounds
        assert accept_lengths[:count] == self.accept_lengths[:count]


@functools.cache
def read_cases(name: str) -> tuple[Case, ...]:
    return tuple(Case(**case) for case in json.loads((FOLDER / name / "expected.json").read_text(encoding="utf-8")))


def block_sizes(name: str) -> list[int]:
    """Of the cases, the trained one first."""
    return sorted({case.block_size for case in read_cases(name)}, reverse=True)


def cases_of(name: str, block_size: int) -> list[Case]:
    return [case for case in read_cases(name) if case.block_size == block_size]


_OPEN: dict[tuple[Any, ...], LLM] = {}


def open_llm(target: str | Path, draft: str | Path | None = None, *, light: bool = True, **options: Any) -> LLM:
    """An LLM in float32, opened once in a run for the same arguments.

    light: on CPU, compile without LLVM's optimiser, which takes half as long.
    """
    options = {"dtype": "float32", **options}
    key = (str(target), str(draft), light, *sorted(options.items()))
    if key not in _OPEN:
        with compiling_lightly() if light else nullcontext():
            _OPEN[key] = LLM(str(target), None if draft is None else str(draft), **options)
    return _OPEN[key]


def compiling_lightly() -> AbstractContextManager[Any]:
    """Steps made inside are compiled lightly, then or later."""
    if jax.default_backend() != "cpu":
        return nullcontext()
    lightly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    return mock.patch.object(jax, "jit", lightly)


def open_pair(name: str, **options: Any) -> LLM:
    return open_llm(FOLDER / name / "target", FOLDER / name / "draft", **options)


def generate_one(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    """One prompt's output, its own books checked."""
    [out] = llm.generate([prompt], SamplingParams(**params))
    assert sum(out.accept_lengths) == len(out.token_ids) - 1, "the first token is in no round, all others are in one"
    assert out.rounds == len(out.accept_lengths)
    return out
