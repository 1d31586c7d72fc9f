"""Norm, rotation and paged writes of keys and values."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.reference.numerics import align, apply_rope, dot, rms_norm


def write_rows(pool: Array, kv: Array, locations: Array) -> Array:
    """`pool` [P, 2, G, C, D] with kv [S, B, 2, G, D] written at `locations` int32 [S, B] (page · C + offset).

    Several rows may name the padding page; which of them stays there does not matter.
    """
    size = pool.shape[3]
    flat = locations.reshape(-1)
    rows = kv.reshape(-1, *kv.shape[2:]).astype(pool.dtype)
    return pool.at[flat // size, :, :, flat % size].set(rows, mode="promise_in_bounds")


def norm_rope(
    qkv: Array, q_norm: Array | None, k_norm: Array | None, eps: float, cos: Array, sin: Array
) -> tuple[Array, Array]:
    """Split, norm and rotate a fused projection.

    qkv [S, B, G, R+2, D] (per key/value head: R queries, key, value); norms [D] or None; cos, sin float32
    [S, B, D/2].  Returns q [S, B, G·R, D] and kv [S, B, 2, G, D].
    """
    s, b, g, r2, d = qkv.shape
    q = qkv[..., : r2 - 2, :].reshape(s, b, g * (r2 - 2), d)
    k, v = qkv[..., r2 - 2, :], qkv[..., r2 - 1, :]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return apply_rope(q, cos, sin), jnp.stack([apply_rope(k, cos, sin), v], axis=2)


def cache_write(
    pool: Array,
    qkv: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    locations: Array,
) -> tuple[Array, Array, Array]:
    """`norm_rope`, then the paged write: (q [S, B, N, D], kv [S, B, 2, G, D], pool)."""
    q, kv = norm_rope(qkv, q_norm, k_norm, eps, cos, sin)
    return q, kv, write_rows(pool, kv, locations)


def kv_inject(
    pools: tuple[Array, ...],
    fused: Array,
    weight: Array,
    bias: Array | None,
    k_norms: Array,
    eps: float,
    cos: Array,
    sin: Array,
    locations: Array,
) -> tuple[Array, ...]:
    """Fused context → keys and values of all L draft layers, written to their pools (DESIGN 3.4, step 7).

    fused [S, T, H]; weight [H, L, 2, G, D], bias [L, 2, G, D] or None: one product for every layer;
    k_norms [L, D]; locations int32 [S, T].
    """
    y = dot(fused, weight)  # [S, T, L, 2, G, D]
    if bias is not None:
        y = y + align(bias, y)
    written = []
    for layer, pool in enumerate(pools):
        k = apply_rope(rms_norm(y[:, :, layer, 0], k_norms[layer], eps), cos, sin)
        written.append(write_rows(pool, jnp.stack([k, y[:, :, layer, 1]], axis=2), locations))
    return tuple(written)
