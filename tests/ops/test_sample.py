"""Sampling: distributions against exact enumeration, filters against sorting, noise that depends on nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import SamplingRows, is_broken
from dflash_jax.ops.reference.sample import GROUP, GROUPS, _first_kept, gumbel, processed_logits, sample_tokens

DRAWS = 20_000


def rows(count: int, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> SamplingRows:
    """`count` rows that differ in their seed only."""
    return SamplingRows(
        temperature=jnp.full(count, temperature, jnp.float32),
        min_p=jnp.full(count, min_p, jnp.float32),
        top_k=jnp.full(count, top_k, jnp.int32),
        top_p=jnp.full(count, top_p, jnp.float32),
        seed=jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 7, jnp.uint32)], axis=1),
    )


def kept_by_sorting(logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities float64 [V] by the definition: temperature, min-p, top-k, top-p in this order."""
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < np.sort(p)[::-1][min(top_k, p.size) - 1]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    above = np.cumsum(p[order]) - p[order]
    p[order[above >= top_p]] = 0
    return p / p.sum()


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of `counts` under probabilities `expected`; what cannot happen must not have happened."""
    possible = expected > 0
    assert counts[~possible].sum() == 0
    want = expected[possible] * counts.sum()
    statistic = ((counts[possible] - want) ** 2 / want).sum()
    return float(jax.scipy.special.gammaincc((possible.sum() - 1) / 2, statistic / 2)) if possible.sum() > 1 else 1.0


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.5, "top_p": 0.75},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 3, "top_p": 0.9},
]


@pytest.mark.parametrize("vocab", [4, 16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_definition(options: dict[str, Any], vocab: int, vary: str):
    logits = np.random.default_rng(vocab).normal(scale=1.5, size=vocab).astype(np.float32)
    if vary == "seed":
        drawn = sample_tokens(jnp.tile(logits, (DRAWS, 1, 1)), rows(DRAWS, **options), jnp.zeros((DRAWS, 1), jnp.int32))
    else:
        positions = jnp.arange(DRAWS, dtype=jnp.int32)[None]
        drawn = sample_tokens(jnp.tile(logits, (1, DRAWS, 1)), rows(1, **options), positions)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=vocab)
    expected = kept_by_sorting(logits, **{"min_p": 0.0, "top_k": 0, "top_p": 1.0} | options)
    assert chi_square_p(counts, expected) > 1e-3


def test_a_bias_of_two_per_cent_is_caught():
    logits = np.zeros(4, np.float32)
    drawn = sample_tokens(jnp.tile(logits, (DRAWS, 1, 1)), rows(DRAWS), jnp.zeros((DRAWS, 1), jnp.int32))
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=4)
    assert chi_square_p(counts, np.full(4, 0.25)) > 1e-3
    assert chi_square_p(counts, np.array([0.27, 0.25, 0.24, 0.24])) < 1e-3


def test_successive_positions_are_independent():
    positions = jnp.arange(2 * DRAWS, dtype=jnp.int32)[None]
    drawn = np.asarray(sample_tokens(jnp.zeros((1, 2 * DRAWS, 4)), rows(1), positions, filters=False)).reshape(-1, 2)
    counts = np.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16)
    assert chi_square_p(counts, np.full(16, 1 / 16)) > 1e-3


@pytest.mark.parametrize(("seed", "vocab"), [(0, 1000), (1, 1000), (2, GROUP * GROUPS + 999), (3, 3 * GROUP * GROUPS)])
@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [(0.7, 0.0, 40, 1.0), (1.0, 0.0, 0, 0.9), (1.2, 0.01, 0, 1.0), (0.8, 0.02, 50, 0.95), (1.0, 0.0, 1, 1.0),
     (1.0, 0.0, 5000, 1.0), (1.0, 1.0, 0, 1.0), (1.0, 0.0, 0, 1e-6), (1.0, 0.0, 5000, 0.5), (3.0, 1e-4, 0, 0.999),
     (1.0, 0.5, 5000, 0.9)],
)  # fmt: skip
def test_filters_keep_what_sorting_keeps(
    seed: int, vocab: int, temperature: float, min_p: float, top_k: int, top_p: float
):
    """Whether what is kept lies among the likeliest groups or not."""
    logits = np.random.default_rng(seed).normal(scale=3, size=(2, 3, vocab)).astype(np.float32)
    logits[0, 1, 5] += 20  # one row with next to no doubt
    asked = rows(2, temperature, min_p, top_k, top_p)
    kept = np.isfinite(np.asarray(jax.jit(processed_logits)(jnp.asarray(logits), asked)))
    for s, k in np.ndindex(2, 3):
        expected = kept_by_sorting(logits[s, k], temperature, min_p, top_k, top_p) > 0
        np.testing.assert_array_equal(kept[s, k], expected)


@pytest.mark.parametrize("spread", [0.2, 3.0])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0.0, 40, 1.0), (0.0, 0, 0.9), (0.0, 0, 0.3), (0.01, 0, 1.0), (0.0, 5000, 1.0), (0.0, 5000, 0.5), (0.3, 2000, 0.9),
     (0.0, 0, 1.0), (1.0, 0, 1.0)],
)  # fmt: skip
def test_every_way_to_a_sample_gives_the_same(spread: float, min_p: float, top_k: int, top_p: float):
    """Whether the sample is found among the likeliest, pass by pass, or behind the threshold itself."""
    vocab = GROUP * GROUPS + 500
    logits = np.random.default_rng(4).normal(scale=spread, size=(6, 4, vocab)).astype(np.float32)
    logits[5, 2, 17] = np.nan
    asked = rows(6, 1.0, min_p, top_k, top_p)
    asked = dataclasses.replace(asked, temperature=asked.temperature.at[3].set(0.0))
    positions = jnp.arange(24, dtype=jnp.int32).reshape(6, 4)
    tokens = jnp.arange(vocab, dtype=jnp.int32)[None, None]
    z = processed_logits(jnp.asarray(logits), asked)
    noise = jnp.where(asked.temperature[:, None, None] > 0, gumbel(asked.seed, positions, tokens), 0)
    want = np.asarray(jnp.argmax(z + noise, axis=-1))
    np.testing.assert_array_equal(jax.jit(sample_tokens)(logits, asked, positions), want)
    np.testing.assert_array_equal(jax.jit(_first_kept)(logits, asked, positions, tokens), want)
    assert want[5, 2] == 17


def test_filters_that_are_off_change_no_bit():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 97)), jnp.float32)
    asked = rows(4, temperature=0.9)
    np.testing.assert_array_equal(processed_logits(logits, asked), processed_logits(logits, asked, filters=False))


def test_greedy_rows_take_the_likeliest_whatever_else_is_in_the_batch():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5, 97)), jnp.float32)
    mixed = dataclasses.replace(rows(3, top_k=2), temperature=jnp.asarray([0.0, 1.0, 9e-6], jnp.float32))
    drawn = sample_tokens(logits, mixed, jnp.zeros((3, 5), jnp.int32))
    best = jnp.argmax(logits, axis=-1)
    np.testing.assert_array_equal(drawn[0], best[0])
    np.testing.assert_array_equal(drawn[2], best[2])


def test_noise_is_the_same_in_any_batch_block_and_list_of_candidates():
    asked, positions = rows(3), jnp.asarray([[5, 6, 7], [9, 10, 11], [5, 6, 7]], jnp.int32)
    whole = gumbel(asked.seed, positions, jnp.arange(50, dtype=jnp.int32)[None, None])
    alone = gumbel(asked.seed[1:2], positions[1:2, 2:], jnp.arange(50, dtype=jnp.int32)[None, None])
    np.testing.assert_array_equal(whole[1:2, 2:], alone)
    some = jnp.asarray([[[7, 3, 49]] * 3] * 3, jnp.int32)
    np.testing.assert_array_equal(gumbel(asked.seed, positions, some), whole[..., jnp.asarray([7, 3, 49])])
    assert (np.asarray(whole[0]) != np.asarray(whole[2])).all()  # same positions, other seed


def test_candidates_with_names_have_their_own_noise_however_many_they_are():
    size = GROUP * GROUPS + 100
    asked, positions = rows(8, top_k=50), jnp.arange(8, dtype=jnp.int32)[:, None]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1, size)), jnp.float32)
    ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[::-1] + 7, logits.shape)
    want = (processed_logits(logits, asked) + gumbel(asked.seed, positions, ids)).argmax(axis=-1)
    np.testing.assert_array_equal(sample_tokens(logits, asked, positions, ids=ids), want)


def test_noise_has_the_moments_of_a_gumbel():
    noise = np.asarray(gumbel(rows(1).seed, jnp.arange(200, dtype=jnp.int32)[None], jnp.arange(5000)[None, None]))
    assert abs(noise.mean() - 0.5772) < 0.005 and abs(noise.var() - np.pi**2 / 6) < 0.02
    assert np.isfinite(noise).all() and noise.max() > 12  # the tail is there: a million draws reach about 13.8


@pytest.mark.parametrize("options", OPTIONS)
def test_a_nan_is_noticed_whatever_is_filtered(options: dict[str, Any]):
    logits = np.random.default_rng(2).normal(size=(2, 1, 97)).astype(np.float32)
    logits[1, 0, 40] = -np.nan
    logits = jnp.asarray(logits)
    drawn = sample_tokens(logits, rows(2, **options), jnp.zeros((2, 1), jnp.int32))
    np.testing.assert_array_equal(is_broken(logits, drawn), [[False], [True]])


@pytest.mark.parametrize("vocab", [97, GROUP * GROUPS + 500])
@pytest.mark.parametrize("top_p", [0.0, 1e-45, 1e-38, 1e-30])  # the first underflows, the next two do once multiplied
def test_a_tiny_top_p_leaves_the_likeliest_token(vocab: int, top_p: float):
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, vocab)), jnp.float32)
    asked, at = rows(2, 1.0, 0.0, 0, top_p), jnp.zeros((2, 3), jnp.int32)
    best = jnp.argmax(logits, axis=-1)
    np.testing.assert_array_equal(jax.jit(sample_tokens)(logits, asked, at), best)
    np.testing.assert_array_equal(np.isfinite(processed_logits(logits, asked)).sum(axis=-1), 1)
    tokens = jnp.arange(vocab, dtype=jnp.int32)[None, None]
    np.testing.assert_array_equal(jax.jit(_first_kept)(logits, asked, at, tokens), best)


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("fill", [-np.inf, np.inf])
def test_rows_without_a_finite_logit_end(fill: float, top_k: int):
    """Those behind a draft after which a grammar allows nothing, or of a model whose logits overflow."""
    vocab = GROUP * GROUPS + 500
    logits = np.random.default_rng(5).normal(size=(1, 3, vocab)).astype(np.float32)
    logits[0, 1] = fill
    logits[0, 2, 7] = np.inf
    drawn = jax.jit(sample_tokens)(logits, rows(1, 1.0, 0.0, top_k, 0.9), jnp.zeros((1, 3), jnp.int32))
    assert 0 <= int(drawn[0, 1]) < vocab and int(drawn[0, 2]) == 7
