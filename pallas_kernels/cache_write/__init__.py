"""cache_write for TPU: norm and rotation are XLA's, the paged write is a kernel's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..norms import norm_rotate
from ..writing import write_rows


def cache_write(
    pool: Array,
    qkv: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    locations: Array,
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """As the reference op, in place: (q [S, B, N, D], kv [S, B, 2, G, D], pool) of qkv [S, B, G, R + 2, D]."""
    s, b, g, r2, d = qkv.shape
    q = norm_rotate(qkv[..., : r2 - 2, :].reshape(s, b, g * (r2 - 2), d), q_norm, eps, cos, sin)
    k = norm_rotate(qkv[..., r2 - 2, :], k_norm, eps, cos, sin)
    kv = jnp.stack([k, qkv[..., r2 - 1, :]], axis=2)
    return q, kv, write_rows(pool, kv, locations, interpret)
