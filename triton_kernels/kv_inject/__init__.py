"""kv_inject for CUDA: the product is XLA's, norm, rotation and write are a kernel's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ..call import inject


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
    """As the reference op: fused [S, T, H], weight [H, L, 2, G, D], one product for the keys and values of L layers."""
    exact = jax.lax.Precision.HIGHEST if fused.dtype == jnp.float32 else None
    dims = (((2,), (0,)), ((), ()))
    y = jax.lax.dot_general(fused, weight, dims, precision=exact, preferred_element_type=fused.dtype)
    if bias is not None:
        y = y + bias[None, None].astype(y.dtype)
    return tuple(inject(pool, y, i, k_norms, eps, cos, sin, locations) for i, pool in enumerate(pools))
