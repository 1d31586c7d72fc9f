"""Rounds of changing width on recorded pairs: the tokens stay the reference's."""

from __future__ import annotations

import random

import pytest
from steps.lab import Request, Run, oracle_cases, oracle_lab


@pytest.mark.parametrize("name", ["x-default-taps", "x-v2-one-layer"])
def test_tokens_at_random_widths(name: str):
    """v1 and DFlash 2, six requests together; 1 among the widths, so that the draft misses rounds altogether."""
    lab, rng = oracle_lab(name), random.Random(name)
    cases = [case for case in oracle_cases(name) if case["block_size"] == lab.block]
    sizes = sorted({1, *(case["block_size"] for case in oracle_cases(name))})  # all but 1 are compiled elsewhere too
    requests = [Request(i, c["prompt_ids"], len(c["prompt_ids"]) + c["max_new_tokens"]) for i, c in enumerate(cases)]
    run, widths = Run(lab, requests).prefill(), []
    while run.live:
        widths.append(rng.choice(sizes))
        run.round(widths[-1])
    for request, case in zip(requests, cases, strict=True):
        assert request.tokens == case["token_ids"]
        assert all(n <= width for n, width in zip(request.accepted, widths, strict=False))
        assert sum(request.accepted) == len(request.tokens) - 1
    assert set(widths) == set(sizes) and max(n for request in requests for n in request.accepted) > 2


@pytest.mark.parametrize("name", ["x-default-taps"])
def test_a_wide_round_after_narrow_ones_drafts_as_well(name: str):
    """CASE 6: what narrow rounds commit is absorbed too: at the first wide round the draft is the reference's."""
    lab = oracle_lab(name)
    cases = [case for case in oracle_cases(name) if case["block_size"] == lab.block]
    case = max(cases, key=lambda case: max(case["accept_lengths"][: case["comparable_rounds"]], default=0))
    at = max(range(case["comparable_rounds"]), key=case["accept_lengths"].__getitem__)
    before = sum(case["accept_lengths"][:at])
    request = Request(0, case["prompt_ids"], len(case["prompt_ids"]) + case["max_new_tokens"])
    run = Run(lab, [request]).prefill()
    for _ in range(before):
        run.round(1)
    run.round()
    assert request.accepted == [1] * before + [case["accept_lengths"][at]] and request.accepted[-1] > 2
