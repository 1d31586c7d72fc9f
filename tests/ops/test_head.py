"""The head's logits, and which token wins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.ops import Turned, first_largest, is_broken
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


# -- the largest without logits ---------------------------------------------------------------------------------------


def drawn(rows: int, width: int, vocab: int, dtype) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Hidden states [rows, width], a head [vocab, width], and the float64 logits of what the device sees of them."""
    rng = np.random.default_rng(rows + vocab)
    hidden = jnp.asarray(rng.normal(size=(rows, width)), dtype)
    head = jnp.asarray(rng.normal(size=(vocab, width)), dtype)
    return hidden, head, np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T


def check_largest(found, logits: np.ndarray) -> None:
    """Exactly the argmax, in every row whose first two are apart; these are nearly all."""
    second, first = np.sort(logits, axis=-1)[..., -2:].T
    apart = first - second > 1e-4
    assert found.dtype == jnp.int32 and apart.mean() > 0.9
    np.testing.assert_array_equal(np.asarray(found)[apart], logits.argmax(axis=-1)[apart])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("multiplier, softcap", [(1.0, None), (1.7, 30.0), (-0.5, None)])
def test_argmax_head_of_each_shape(kernels: Kernels, model, dtype, multiplier, softcap):
    hidden, head, logits = drawn(6, model.hidden, model.vocab, dtype)
    found = kernels.argmax_head(hidden.reshape(2, 3, -1), head, multiplier, softcap)
    assert found.shape == (2, 3)
    check_largest(found.reshape(-1), logits * multiplier)


@pytest.mark.parametrize("rows, width, vocab", [(1, 16, 3), (70, 40, 300), (520, 24, 130), (15, 200, 2500)])
def test_argmax_head_in_many_tiles(kernels: Kernels, rows: int, width: int, vocab: int):
    """More rows, and more of the vocabulary, than a tile holds, and sizes that no tile divides."""
    hidden, head, logits = drawn(rows, width, vocab, jnp.bfloat16)
    check_largest(kernels.argmax_head(hidden, head), logits)


def test_argmax_head_takes_the_first_of_equals(kernels: Kernels):
    """Neighbours, far apart in a tile, and in different tiles.  Whole numbers: sums are exact in any order."""
    rng = np.random.default_rng(0)
    hidden, head = rng.integers(-8, 9, (5, 32)).astype(np.float32), rng.integers(-8, 9, (2500, 32)).astype(np.float32)
    largest = (hidden @ head.T).argmax(axis=-1)
    for also in (2499, 1300, 130, 0):
        again = head.copy()
        again[also] = head[largest[0]]
        assert int(kernels.argmax_head(jnp.asarray(hidden), jnp.asarray(again))[0]) == min(largest[0], also)
    same = jnp.broadcast_to(jnp.asarray(head[:1]), head.shape)
    np.testing.assert_array_equal(kernels.argmax_head(jnp.asarray(hidden), same), np.zeros(5))


def test_argmax_head_finds_a_nan_before_infinity(kernels: Kernels):
    hidden, head, _ = drawn(3, 16, 300, jnp.float32)
    hidden = jnp.abs(hidden)
    head = head.at[7].set(-jnp.inf).at[40].set(jnp.inf).at[250].set(jnp.inf)
    np.testing.assert_array_equal(kernels.argmax_head(hidden, head), [40, 40, 40])
    head = head.at[150].set(-jnp.nan).at[290].set(jnp.nan)
    # Which of two is found is XLA's affair on a GPU; all else finds the first.
    places = (150, 290) if (kernels.backend, jax.default_backend()) == ("xla", "gpu") else (150,)
    assert np.isin(kernels.argmax_head(hidden, head), places).all()
    np.testing.assert_array_equal(kernels.argmax_head(hidden, jnp.full_like(head, -jnp.inf)), [0, 0, 0])


def test_argmax_head_takes_a_turned_head(kernels: Kernels):
    hidden, head, logits = drawn(5, 16, 60, jnp.float32)
    check_largest(kernels.argmax_head(hidden, Turned(head)), logits)


# -- of logits ---------------------------------------------------------------------------------------------------------


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
