"""What log-probabilities are of, by the definition: a target whose logits are known to the last digit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dflash_jax import Engine, SamplingParams
from dflash_jax.drafters import NgramDrafter
from dflash_jax.engine.request import Request
from dflash_jax.engine.settings import LOGPROBS_MODES

from .bigram import bigram_logits, changed_logits, filtered, make_engine

VOCAB = 16
PROMPT = [0, 1, 2, 0, 1, 2, 0, 1, 2]
ASKED = [
    SamplingParams(max_new_tokens=20, temperature=0.7, seed=1, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.3,
                   presence_penalty=0.2, frequency_penalty=0.3, logit_bias={4: 1.5}, bad_token_ids=[7],
                   stop_token_ids=[3], min_tokens=20, logprobs=5, prompt_logprobs=3),
    SamplingParams(max_new_tokens=14, frequency_penalty=0.4, allowed_token_ids=range(2, 12), logprobs=12),
    SamplingParams(max_new_tokens=12, temperature=1.4, seed=2, logprobs=0),
]  # fmt: skip


def ask(engine: Engine, asked: Sequence[SamplingParams], prompt: Sequence[int] = PROMPT) -> list[Request]:
    requests = [engine.add_request(prompt, params) for params in asked]
    while engine.has_work:
        engine.step()
    return requests


def values_of(mode: str, raw: np.ndarray, params: SamplingParams, text: Sequence[int]) -> np.ndarray:
    """float64 [V], after PROMPT and text; −∞ for what must not come."""
    of, kind = mode.split("_")
    x = raw.astype(np.float64)
    if of == "processed":
        x = changed_logits(x, params, PROMPT, text)
        if not params.greedy:
            kept = filtered(np.exp((x - x.max()) / params.temperature), params) > 0
            x = np.where(kept, x / params.temperature, -np.inf)
    return x if kind == "logits" else x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.slow
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_every_mode_is_what_it_says(mode: str) -> None:
    """Beside each other: a sampled request with every option, a greedy one with some, a sampled one with none."""
    engine = make_engine(NgramDrafter(4), logprobs_mode=mode, chunked_prefill_size=32)
    requests = ask(engine, ASKED)
    assert sum(map(len, (one.accept_lengths for one in requests))) < sum(len(one.output_ids) - 1 for one in requests)
    for params, request in zip(ASKED, requests, strict=True):
        assert len(request.logprobs) == len(request.output_ids)
        for i, (token, found) in enumerate(zip(request.output_ids, request.logprobs, strict=True)):
            text = request.output_ids[:i]
            values = values_of(mode, bigram_logits(VOCAB)[[*PROMPT, *text][-1]], params, text)
            best = np.sort(values)[::-1][: params.logprobs]
            np.testing.assert_allclose(found.logprob, values[token], atol=1e-5)
            np.testing.assert_allclose(found.top_logprobs, best, atol=1e-5)
            np.testing.assert_allclose(values[found.top_ids], best, atol=1e-5)
            assert found.rank == 1 + (values > values[token]).sum()
    check_prompt(requests[0])


def check_prompt(request: Request) -> None:
    """Always of the target's own distribution."""
    for before, token, found in zip(PROMPT, PROMPT[1:], request.prompt_logprobs, strict=False):
        values = values_of("raw_logprobs", bigram_logits(VOCAB)[before], ASKED[0], ())
        np.testing.assert_allclose(found.logprob, values[token], atol=1e-5)
        assert found.rank == 1 + (values > values[token]).sum()
        assert found.top_ids == np.argsort(-values)[:3].tolist()
    assert len(request.prompt_logprobs) == len(PROMPT) - 1


def test_ties_and_more_alternatives_than_tokens() -> None:
    """Equal tokens share the last of their ranks, the lowest id is listed (and, greedily, taken) first."""
    logits = np.zeros((8, 8), np.float32)
    logits[:, [2, 5, 6]] = 1.0
    engine = make_engine(NgramDrafter(4), vocab=8, logits=logits)
    params = SamplingParams(max_new_tokens=9, logprobs=20, prompt_logprobs=9)
    [request] = ask(engine, [params], [5, 6, 1, 0, 7])
    assert request.output_ids == [2] * 9 and max(request.accept_lengths) > 1
    for one in request.logprobs:
        assert (one.rank, one.top_ids) == (3, [2, 5, 6, 0, 1, 3, 4, 7])
        assert one.logprob == one.top_logprobs[0] == one.top_logprobs[2] > one.top_logprobs[3]
    assert [one.rank for one in request.prompt_logprobs] == [3, 8, 8, 8]
    assert {len(one.top_ids) for one in request.prompt_logprobs} == {8}


@pytest.mark.parametrize("chunk", [33, 40, 12])
def test_prompts_in_chunks_of_any_size(chunk: int) -> None:
    """Rows of a chunk are read some at a time, and a chunk need be no multiple of that."""
    prompt = [0, 1, 2, 3] * 10
    engine = make_engine(NgramDrafter(4), chunked_prefill_size=chunk)
    [request] = ask(engine, [SamplingParams(max_new_tokens=2, prompt_logprobs=0)], prompt)
    values = [values_of("raw_logprobs", bigram_logits(VOCAB)[token], ASKED[0], ()) for token in prompt]
    want = [row[token] for row, token in zip(values, prompt[1:], strict=False)]
    np.testing.assert_allclose([one.logprob for one in request.prompt_logprobs], want, atol=1e-5)
