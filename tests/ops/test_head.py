"""The head's logits, and which token wins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.ops import first_largest, is_broken
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.shapes import TINY
from dflash_jax.sharding import TENSOR, make_mesh

MODELS = {shape.model.name: shape.model for shape in TINY}


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-5)])
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (1.7, None), (1.7, 3.0)])
def test_logits_of_each_shape(kernels: Kernels, model, dtype, tolerance, multiplier, softcap):
    """float32 logits whatever the weights: products of bfloat16 inputs are not rounded to bfloat16."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(2, 3, model.hidden)), dtype)
    head = jnp.asarray(rng.normal(size=(model.vocab, model.hidden)), dtype)
    found = kernels.head_logits(hidden, head, multiplier, softcap)
    expected = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T * multiplier
    if softcap is not None:
        expected = np.tanh(expected / softcap) * softcap
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * model.hidden)


def test_ties_go_to_the_lowest_id():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-np.inf, -np.inf, -5.0, -5.0]])
    token = first_largest(logits)
    np.testing.assert_array_equal(token, [1, 0, 2])
    assert not np.asarray(is_broken(logits, token)).any() and token.dtype == jnp.int32


def test_ties_across_shards_of_the_vocabulary_go_to_the_lowest_id():
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("needs two devices")
    mesh = make_mesh(devices)
    logits = np.zeros((3, 8), np.float32)
    logits[0, [3, 4]] = 5.0  # the best of each shard alike
    logits[1, [4, 7]] = 5.0
    logits[2, [0, 3, 4]] = 5.0
    placed = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, TENSOR)))
    token = jax.jit(first_largest)(placed)
    np.testing.assert_array_equal(token, [3, 4, 0])
    assert not np.asarray(is_broken(placed, token)).any()


@pytest.mark.parametrize("at", [0, 2, 5, 600, 999])
def test_a_row_with_one_nan_is_broken_and_its_neighbours_are_not(at: int):
    """Before the largest or after it: a vectorised maximum need not notice a NaN."""
    for vocab in (6, 1000):
        logits = np.random.default_rng(0).normal(size=(2, 3, vocab)).astype(np.float32)
        logits[0, 1, 3] = 9.0
        logits[0, 1, at % vocab] = np.nan
        token = jax.jit(first_largest)(jnp.asarray(logits))
        broken = is_broken(jnp.asarray(logits), token)
        np.testing.assert_array_equal(broken, [[False, True, False], [False, False, False]])
        np.testing.assert_array_equal(np.asarray(token)[1], logits[1].argmax(axis=-1))


def test_infinite_logits_are_not_nan():
    logits = jnp.asarray([[0.0, np.inf, 1.0], [-np.inf, 1.0, -np.inf], [-np.inf] * 3])
    token = first_largest(logits)
    np.testing.assert_array_equal(token, [1, 1, 0])
    assert not np.asarray(is_broken(logits, token)).any()
