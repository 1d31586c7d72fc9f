"""Norm and rotation of keys and queries, left to XLA, which fuses them with the product before and the write after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def _along(weight: Array, x: Array) -> Array:
    """weight [trailing axes of x], given leading axes."""
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis: float32 inside, rounded to x.dtype before the weight, as the reference does."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * _along(weight, x)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """The halves of the last axis of x [..., heads, D] turned by float32 tables [..., D/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def norm_rotate(x: Array, weight: Array | None, eps: float, cos: Array, sin: Array) -> Array:
    """`rms_norm` where there is a weight, then `rotate`."""
    return rotate(x if weight is None else rms_norm(x, weight, eps), cos, sin)
