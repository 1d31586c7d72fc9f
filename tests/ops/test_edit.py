"""Changes to logits: against a slow reader of the definition, row by row of a block."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import EditRows, edited_logits, masked_logits, packed_logprobs, token_logprobs
from dflash_jax.state import no_edits

V, B, PROMPT_LEN = 23, 5, 7


def edit_rows(count: int, rng: np.random.Generator, **fixed: Any) -> EditRows:
    """`count` random rows; `fixed` replaces columns."""
    made: dict[str, Any] = {
        "active": np.ones(count, bool),
        "bias": np.where(rng.random((count, V)) < 0.2, -np.inf, rng.normal(size=(count, V))),
        "emitted": rng.integers(0, 3, (count, V)),
        "in_prompt": rng.random((count, V)) < 0.3,
        "repetition": rng.uniform(0.5, 2, count),
        "presence": rng.uniform(-2, 2, count),
        "frequency": rng.uniform(-2, 2, count),
        "stops_from": rng.integers(0, 2 * PROMPT_LEN, count),
    } | fixed
    kinds = no_edits(count, V)
    return EditRows(**{name: jnp.asarray(value, getattr(kinds, name).dtype) for name, value in made.items()})


def by_definition(logits: np.ndarray, rows: EditRows, stop_ids: list[list[int]], positions: np.ndarray, ids: Any):  # noqa: ANN201
    out = logits.astype(np.float64)
    for s in range(len(logits)):
        if not rows.active[s]:
            continue
        emitted = np.asarray(rows.emitted[s]).copy()
        for k in range(logits.shape[1]):
            if ids is not None and k:
                emitted[ids[s][k]] += 1
            x = out[s, k] + np.asarray(rows.bias[s], np.float64)
            if positions[s, k] < rows.stops_from[s]:
                x[[i for i in stop_ids[s] if i >= 0]] = -np.inf
            for v in range(V):
                if emitted[v] or rows.in_prompt[s, v]:
                    x[v] = x[v] / float(rows.repetition[s]) if x[v] > 0 else x[v] * float(rows.repetition[s])
                x[v] -= float(rows.frequency[s]) * emitted[v] + float(rows.presence[s]) * (emitted[v] > 0)
            out[s, k] = x
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [False, True])
def test_every_row_of_a_block_is_changed_as_defined(seed: int, drafts: bool):
    rng = np.random.default_rng(seed)
    rows = edit_rows(3, rng, active=[True, False, True])
    logits = rng.normal(scale=2, size=(3, B, V)).astype(np.float32)
    positions = rng.integers(0, 9, (3, 1)) + np.arange(B)
    ids = rng.integers(0, 4, (3, B)) if drafts else None  # few values: drafts repeat
    stops = [[2, 5, -1], [1, -1, -1], [-1, -1, -1]]
    got = edited_logits(jnp.asarray(logits), rows, jnp.asarray(stops, jnp.int32), jnp.asarray(positions, jnp.int32),
                        None if ids is None else jnp.asarray(ids, jnp.int32))  # fmt: skip
    np.testing.assert_allclose(got, by_definition(logits, rows, stops, positions, ids), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(got[1], logits[1])


def test_rows_that_ask_for_nothing_are_not_touched():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, B, V)), jnp.float32)
    stops, at = jnp.full((2, 3), -1, jnp.int32), jnp.zeros((2, B), jnp.int32)
    off = dataclasses.replace(no_edits(2, V), active=jnp.ones(2, bool))
    for rows in (no_edits(2, V), off):
        np.testing.assert_array_equal(edited_logits(logits, rows, stops, at, jnp.zeros((2, B), jnp.int32)), logits)


def test_a_nan_stays_one():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 1, V)).astype(np.float32)
    logits[0, 0, 7] = np.nan
    at = jnp.zeros((1, 1), jnp.int32)
    got = edited_logits(jnp.asarray(logits), edit_rows(1, rng), at - 1, at)
    assert np.isnan(np.asarray(got)).nonzero()[2].tolist() == [7]


@pytest.mark.parametrize("vocab", [23, 32, 70])
def test_masks_are_read_bit_by_bit(vocab: int):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((2, 3, vocab)) < 0.5
    padded = np.zeros((2, 3, -(-vocab // 32) * 32), bool)
    padded[..., :vocab] = allowed
    words = np.packbits(padded, axis=-1, bitorder="little").view("<u4")
    logits = rng.normal(size=(2, 3, vocab)).astype(np.float32)
    got = masked_logits(jnp.asarray(logits), jnp.asarray(words))
    np.testing.assert_array_equal(got, np.where(allowed, logits, -np.inf))
    assert masked_logits(jnp.asarray(logits), None) is not None


@pytest.mark.parametrize("n", [0, 1, 5])
def test_log_probabilities_ranks_and_alternatives(n: int):
    rng = np.random.default_rng(n)
    logits = rng.normal(scale=3, size=(2, 3, V)).astype(np.float32)
    chosen = rng.integers(0, V, (2, 3))
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    got = token_logprobs(jnp.asarray(logits), jnp.asarray(chosen, jnp.int32), n)
    order = np.argsort(-logits, axis=-1)
    own = np.take_along_axis(expected, chosen[..., None], -1)[..., 0]
    np.testing.assert_allclose(got.chosen, own, atol=1e-5)
    np.testing.assert_array_equal(got.rank, 1 + (order == chosen[..., None]).argmax(-1))
    np.testing.assert_array_equal(got.tokens, order[..., :n])
    np.testing.assert_allclose(got.values, np.take_along_axis(expected, order[..., :n], -1), atol=1e-5)
    assert packed_logprobs(got).shape == (2, 3 * (2 + 2 * n))
    raw = token_logprobs(jnp.asarray(logits), jnp.asarray(chosen, jnp.int32), n, normalise=False)
    np.testing.assert_array_equal(raw.chosen, np.take_along_axis(logits, chosen[..., None], -1)[..., 0])
