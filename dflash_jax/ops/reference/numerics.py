"""Arithmetic that every op shares: where float32 is kept and how products are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Float32 products keep all their bits; on GPU and TPU the default would round the inputs."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(x: Array, w: Array, contract: Sequence[int] = (0,), out: Any = None) -> Array:
    """x [..., H] · w over x's last axis and w's `contract` axis; the result has type `out` (default x.dtype)."""
    dims = (((x.ndim - 1,), tuple(contract)), ((), ()))
    dtype = x.dtype if out is None else out
    return jax.lax.dot_general(x, w, dims, precision=precision(x.dtype), preferred_element_type=dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis: float32 inside, rounded to x.dtype before the weight."""
    f = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
    return (f * scale).astype(x.dtype) * align(weight, x)


def align(w: Array | np.ndarray, x: Array) -> Any:
    """w [trailing axes of x] with leading axes of size 1: broadcasting over x on purpose (JAX can refuse the rest)."""
    return w.reshape((1,) * (x.ndim - w.ndim) + w.shape)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the two halves of the last axis of x [..., heads, D] by float32 tables [..., D/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
