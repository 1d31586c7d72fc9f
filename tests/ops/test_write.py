"""norm_rope, cache_write and kv_inject: what is written, and that nothing else is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import norm_rope
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.shapes import TINY, Shape
from ops import dense
from ops.dense import QUICKLY, Pages

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}  # bfloat16: three roundings of values up to about 4
EPS = 1e-5
each_shape = pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])


@dataclasses.dataclass
class Launch:
    """Random inputs of one launch, float64 copies of what the device sees, and where its rows go."""

    shape: Shape
    dtype: type
    rng: np.random.Generator
    pages: Pages
    positions: np.ndarray
    cos: np.ndarray
    sin: np.ndarray

    @classmethod
    def of(cls, shape: Shape, dtype: type) -> Launch:
        rng = np.random.default_rng(1)
        pages = Pages.deal(rng, shape.requests, shape.pages_per_slot, shape.page_size)
        positions = np.asarray(shape.lengths())[:, None] + np.arange(shape.rows)
        angle = positions[..., None] * 10000.0 ** -(np.arange(shape.model.head_dim // 2) / shape.model.head_dim)
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        return cls(shape, dtype, rng, pages, positions, cos, sin)

    def random(self, *size: int, near: float = 0.0):
        """(device array, its exact values)."""
        array = jnp.asarray(near + self.rng.normal(size=size) * (0.2 if near else 1.0), self.dtype)
        return array, np.asarray(array, np.float64)

    def locations(self, skip: np.ndarray) -> np.ndarray:
        """Each row's location; rows of `skip` go to the padding page."""
        at = [[self.pages.location(s, p) for p in row] for s, row in enumerate(self.positions)]
        return np.where(skip, self.positions % self.shape.page_size, at).astype(np.int32)

    def pool(self):
        """Every row of the pool NaN."""
        model, shape = self.shape.model, self.shape
        return jnp.full((self.pages.num_pages, 2, model.kv_heads, shape.page_size, model.head_dim), jnp.nan, self.dtype)

    def skips(self) -> np.ndarray:
        """Rows that must not be written: none of the first request, all of the last of several, some between."""
        skip = self.rng.random(self.positions.shape) < 0.3
        skip[0] = False
        if len(skip) > 1:
            skip[-1] = True
        return skip


def split(qkv: np.ndarray, heads: int):
    """The fused projection [S, B, G, R+2, D] taken apart by its definition: q [S, B, N, D], k and v [S, B, G, D]."""
    s, b, kv, per, d = qkv.shape
    q = np.stack([qkv[:, :, n // (per - 2), n % (per - 2)] for n in range(heads)], axis=2)
    return q, qkv[:, :, :, per - 2], qkv[:, :, :, per - 1]


def normed(x, norm, launch: Launch):
    return dense.rope(x if norm is None else dense.rms_norm(x, norm, EPS), launch.cos, launch.sin)


def check_pool(pool, launch: Launch, locations: np.ndarray, skip: np.ndarray, keys, values, tolerance: float) -> None:
    """Rows not skipped hold their keys and values [S, B, G, D]; every row of every page but 0 is otherwise NaN."""
    pool, size = np.asarray(pool, np.float64), launch.shape.page_size
    written = np.zeros((pool.shape[0], size), bool)
    for s, i in np.argwhere(~skip):
        page, offset = divmod(int(locations[s, i]), size)
        written[page, offset] = True
        np.testing.assert_allclose(pool[page, 0, :, offset], keys[s, i], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(pool[page, 1, :, offset], values[s, i], rtol=tolerance, atol=tolerance)
    untouched = np.isnan(pool).all(axis=(1, 2, 4)) == ~written
    assert untouched[1:].all()


@each_dtype
@each_shape
def test_norm_rope_and_cache_write(kernels: Kernels, shape: Shape, dtype):
    launch, model = Launch.of(shape, dtype), shape.model
    norms = model.qk_norm
    qkv, exact = launch.random(shape.requests, shape.rows, model.kv_heads, model.group + 2, model.head_dim)
    q_norm, q_exact = launch.random(model.head_dim, near=1.0) if norms else (None, None)
    k_norm, k_exact = launch.random(model.head_dim, near=1.0) if norms else (None, None)
    skip = launch.skips()
    locations = launch.locations(skip)
    q, kv, pool = jax.jit(kernels.cache_write, static_argnums=4, compiler_options=QUICKLY)(
        launch.pool(), qkv, q_norm, k_norm, EPS, launch.cos, launch.sin, jnp.asarray(locations)
    )
    queries, keys, values = split(exact, model.heads)
    queries, keys = normed(queries, q_exact, launch), normed(keys, k_exact, launch)
    tolerance = TOLERANCE[dtype]
    assert q.dtype == kv.dtype == dtype
    for mine, theirs in ((q, queries), (kv[:, :, 0], keys), (kv[:, :, 1], values)):
        np.testing.assert_allclose(np.asarray(mine, np.float64), theirs, rtol=tolerance, atol=tolerance)
    check_pool(pool, launch, locations, skip, keys, values, tolerance)


@each_dtype
@each_shape
def test_kv_inject(kernels: Kernels, shape: Shape, dtype):
    """Every layer gets its own keys (normed, rotated) and values of the one fused context."""
    launch, model = Launch.of(shape, dtype), shape.model
    layers, biased = model.draft_layers, shape.page_size == 16
    fused, fused_exact = launch.random(shape.requests, shape.rows, model.hidden)
    weight, w_exact = launch.random(model.hidden, layers, 2, model.kv_heads, model.head_dim)
    bias, b_exact = launch.random(layers, 2, model.kv_heads, model.head_dim) if biased else (None, 0.0)
    k_norms, n_exact = launch.random(layers, model.head_dim, near=1.0)
    skip = launch.skips()
    locations = launch.locations(skip)
    pools = jax.jit(kernels.kv_inject, static_argnums=5, compiler_options=QUICKLY)(
        tuple(launch.pool() for _ in range(layers)), fused, weight, bias, k_norms, EPS, launch.cos, launch.sin,
        jnp.asarray(locations),
    )  # fmt: skip
    y = np.einsum("sth,hlkgd->stlkgd", fused_exact, w_exact) + b_exact
    assert len(pools) == layers
    tolerance = TOLERANCE[dtype] * (1 if dtype == jnp.float32 else np.sqrt(model.hidden))
    for layer, pool in enumerate(pools):
        assert pool.dtype == dtype
        keys = normed(y[:, :, layer, 0], n_exact[layer], launch)
        check_pool(pool, launch, locations, skip, keys, y[:, :, layer, 1], tolerance)


def test_the_norm_counts_per_head_and_comes_before_the_rotation():
    """Two heads, one ten times the other: a norm over both would shrink one of them."""
    qkv = jnp.ones((1, 1, 2, 3, 4)) * jnp.asarray([1.0, 10.0]).reshape(1, 1, 2, 1, 1)
    weight = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    cos, sin = jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))  # a quarter turn
    q, kv = norm_rope(qkv, weight, weight, 0.0, cos, sin)
    np.testing.assert_allclose(q[0, 0], [[-3, -4, 1, 2]] * 2, rtol=1e-6)
    np.testing.assert_allclose(kv[0, 0, 0], [[-3, -4, 1, 2]] * 2, rtol=1e-6)
    np.testing.assert_allclose(kv[0, 0, 1], [[1] * 4, [10] * 4])
