"""add_norm: a sum as it is stored, and the norm of just that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from models import goldens

from dflash_jax.models import FAMILIES, embed
from dflash_jax.models.dflash import draft_rows
from dflash_jax.ops import dispatch
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.shapes import TINY, Shape
from dflash_jax.sharding import make_mesh
from ops.triton_host import hosted, interpreting

EPS = 1e-5
RELATIVE = {jnp.float32: 1e-5, jnp.bfloat16: 2 * 2.0**-8}  # of normed numbers: of bfloat16 two are rounded
each_dtype = pytest.mark.parametrize("dtype", RELATIVE, ids=["float32", "bfloat16"])


def drawn(*shape: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, delta and a weight."""
    rng = np.random.default_rng(sum(shape))
    x, delta, weight = (rng.normal(size=size) for size in (shape, shape, shape[-1:]))
    return jnp.asarray(x * 30, dtype), jnp.asarray(delta, dtype), jnp.asarray(weight, dtype)


def check(found: Any, x: jax.Array, delta: jax.Array, weight: jax.Array) -> None:
    """The sum exactly, and its norm as near as its type allows."""
    total, normed = found
    assert total.shape == normed.shape == x.shape and total.dtype == normed.dtype == x.dtype
    np.testing.assert_array_equal(total, np.asarray(x) + np.asarray(delta))
    f, w = np.asarray(total, np.float64), np.asarray(weight, np.float64)
    expected = f / np.sqrt(np.square(f).mean(axis=-1, keepdims=True) + EPS) * w
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=RELATIVE[x.dtype.type], atol=1e-30)


@each_dtype
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_rows_of_each_shape(kernels: Kernels, shape: Shape, dtype: Any):
    arrays = drawn(shape.requests, shape.rows, shape.model.hidden, dtype=dtype)
    check(kernels.add_norm(*arrays, EPS), *arrays)


@each_dtype
@pytest.mark.parametrize("width", [1, 7, 100, 576, 2560, 4096, 8192, 9000])
def test_any_width(kernels: Kernels, width: int, dtype: Any):
    arrays = drawn(3, width, dtype=dtype)
    check(kernels.add_norm(*arrays, EPS), *arrays)


def test_the_sum_is_rounded_before_it_is_normed(kernels: Kernels):
    """1 + 2⁻⁸ is 1 in bfloat16: all of the row is 1, and so is its norm.  Of unrounded sums the tenth would be less."""
    x, tenth = jnp.ones((1, 100), jnp.bfloat16), np.arange(100) % 10 == 0
    delta = jnp.asarray(np.where(tenth, 0, 2.0**-8)[None], jnp.bfloat16)
    for found in kernels.add_norm(x, delta, x[0], 1e-6):
        np.testing.assert_array_equal(found, np.ones((1, 100), ml_dtypes.bfloat16))


def test_small_sums_and_zeros(kernels: Kernels):
    """eps is what keeps a row of nothing from 0 / 0."""
    x = jnp.asarray([[0.0] * 8, [3e-4] * 8], jnp.float32)
    total, normed = kernels.add_norm(x, -x / 2, jnp.full(8, 2.0), 1e-6)
    np.testing.assert_array_equal(total, x / 2)
    np.testing.assert_allclose(normed, [[0.0] * 8, [2 * 1.5e-4 / np.sqrt(1.5e-4**2 + 1e-6)] * 8], rtol=1e-5)


def test_a_nan_stays_in_its_row(kernels: Kernels):
    x, delta, weight = drawn(4, 33, dtype=jnp.float32)
    broken = kernels.add_norm(x.at[1, 5].set(jnp.nan), delta.at[2, 32].set(-jnp.nan), weight, EPS)
    whole = kernels.add_norm(x, delta, weight, EPS)
    for mine, theirs in zip(broken, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[[0, 3]], np.asarray(theirs)[[0, 3]])
    np.testing.assert_array_equal(np.isnan(broken[0]).sum(axis=1), [0, 1, 1, 0])
    assert np.isnan(np.asarray(broken[1])[[1, 2]]).all()


def test_every_device_of_a_mesh_norms_alike(kernels: Kernels):
    """The sum over devices that made `delta` is finished before; weights of the norm lie whole on each."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = make_mesh(jax.devices()[:2])
    split = Kernels(kernels.backend, interpret=kernels.interpret, mesh=mesh)
    x, delta, weight = drawn(2, 3, 40, dtype=jnp.float32)
    check(jax.jit(split.add_norm, static_argnums=3)(x, delta, weight, EPS), x, delta, weight)


# -- in the models -----------------------------------------------------------------------------------------------------


def target_states(kernels: Kernels) -> list[np.ndarray]:
    """Last hidden states, taps and pages of a target over its recorded prompts."""
    case = goldens.model("qwen3-dim80")
    rows = dataclasses.replace(goldens.rows(case.golden["input_ids"]), kernels=kernels)
    forward, taps = FAMILIES[case.config.family].forward, tuple(range(case.config.num_layers))
    run = goldens.jit(lambda params, pool: forward(params, case.config, rows, pool, taps))
    return jax.tree.map(np.asarray, jax.tree.leaves(run(case.params, goldens.poisoned_pool(case.config, 2))))


def draft_states(kernels: Kernels) -> list[np.ndarray]:
    """Hidden states of a DFlash 2 draft, with its convolutions, over an empty context."""
    pair = goldens.pair("qwen3-v2")
    rows = dataclasses.replace(goldens.rows(pair.golden["block_ids"][None]), kernels=kernels)

    def run(params, target, pool):
        return draft_rows(params, pair.draft, embed(target, rows.ids), rows, pool)

    return [np.asarray(goldens.jit(run)(pair.draft_params, pair.target_params, goldens.poisoned_pool(pair.draft, 1)))]


@hosted
@pytest.mark.parametrize("states", [target_states, draft_states])
def test_models_with_the_kernel_compute_what_they_do_with_xla(states: Callable[[Kernels], list[np.ndarray]]):
    """Taps are the sums, and the last norm is the last layer's second."""
    alone = Kernels("triton", spared=tuple(op for op in dispatch.OPS if op != "add_norm"))
    with interpreting():
        assert alone.own_ops == ("add_norm",)
        found = states(alone)
    for mine, theirs in zip(found, states(Kernels()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
