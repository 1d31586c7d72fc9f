"""kv_inject for TPU: product, norm and rotation are XLA's, the paged write is a kernel's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..norms import norm_rotate
from ..writing import write_rows


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
    *,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """As the reference op: fused [S, T, H], weight [H, L, 2, G, D], one product for the keys and values of L layers."""
    exact = jax.lax.Precision.HIGHEST if fused.dtype == jnp.float32 else None
    dims = (((2,), (0,)), ((), ()))
    y = jax.lax.dot_general(fused, weight, dims, precision=exact, preferred_element_type=fused.dtype)
    if bias is not None:
        y = y + bias[None, None].astype(y.dtype)
    written = []
    for layer, pool in enumerate(pools):
        k = norm_rotate(y[:, :, layer, 0], k_norms[layer], eps, cos, sin)
        written.append(write_rows(pool, jnp.stack([k, y[:, :, layer, 1]], axis=2), locations, interpret))
    return tuple(written)
