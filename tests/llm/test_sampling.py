"""Sampled output: token for token what a slow reader of the definition draws, whatever drafts, batches or overlaps."""

from __future__ import annotations

import random

import pytest

from dflash_jax import SamplingParams

from .oracle import Oracle
from .pairs import FOLDER, open_llm

NAME = "qwen3-v2"
NEW_TOKENS = 24


def combination(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=rng.randint(1, NEW_TOKENS),
        temperature=rng.choice([0.0, 0.5, 0.8, 1.0, 1.6]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.3]),
        seed=rng.getrandbits(64),
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(11)
    prompts = [[rng.randrange(3, 96) for _ in range(rng.choice([1, 2, 7, 16]))] for _ in range(40)]
    return [(prompt, combination(rng)) for prompt in prompts]


@pytest.fixture(scope="module")
def drawn(asked: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    oracle = Oracle(open_llm(FOLDER / NAME / "target", "none", max_running_requests=2, chunked_prefill_size=16))
    return [oracle.answer(prompt, params).token_ids for prompt, params in asked]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "block_size", "overlap"),
    [("none", None, True), ("v2", None, True), ("v2", 3, False), ("ngram", None, True)],
)
def test_samples_are_the_oracle_s(draft: str, block_size: int | None, overlap: bool, asked, drawn):  # noqa: ANN001
    """All in one go, four at a time, with greedy and sampled requests side by side."""
    name = str(FOLDER / NAME / "draft") if draft == "v2" else draft
    llm = open_llm(FOLDER / NAME / "target", name, block_size=block_size, overlap=overlap, max_running_requests=4,
                   chunked_prefill_size=16)  # fmt: skip
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert [out.token_ids for out in outputs] == drawn
    rounds = [length for out in outputs for length in out.accept_lengths]
    mean = sum(rounds) / len(rounds)
    assert mean == 1 if draft == "none" else mean > 1.25
    assert [out.seed for out in outputs] == [None if p.temperature == 0 else p.seed for _, p in asked]


@pytest.mark.slow
def test_a_seed_that_is_not_given_is_random_and_reported():
    llm = open_llm(FOLDER / NAME / "target", "none", max_running_requests=2, chunked_prefill_size=16)
    free = SamplingParams(max_new_tokens=12, temperature=1.5, ignore_eos=True)
    first, second = llm.generate([[5, 9, 3]] * 2, free)
    assert first.seed is not None and first.seed != second.seed and first.token_ids != second.token_ids
    again = llm.generate([5, 9, 3], SamplingParams(**{**vars(free), "seed": first.seed}))[0]
    assert again.token_ids == first.token_ids
