"""Prompt look-up beside requests that sample: the same seed gives the same tokens with it and without."""

from __future__ import annotations

from dflash_jax import EngineSettings, SamplingParams
from dflash_jax.drafters import NgramDrafter, NoDrafter
from drafters.cycles import make_engine


def test_the_same_seed_gives_the_same_tokens():
    """Nine tokens in ten follow the cycle, so that look-up is often right."""
    settings = EngineSettings("cycles", "ngram", page_size=4, max_running_requests=1, max_model_len=128)
    sampled = [SamplingParams(max_new_tokens=60, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2, 3)]
    results, accepted = [], []
    for drafter in (NoDrafter(), NgramDrafter()):
        engine = make_engine(settings, drafter)
        requests = [engine.add_request([0, 1, 2, 3, 4, 0], params) for params in sampled]
        while engine.has_work:
            engine.step()
        results.append([request.output_ids for request in requests])
        accepted.append([length for request in requests for length in request.accept_lengths])
    assert results[0] == results[1] and len({tuple(ids) for ids in results[0]}) == 3
    assert set(accepted[0]) == {1} and sum(accepted[1]) / len(accepted[1]) > 1.5
