"""The output head: logits, and the largest of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.reference.numerics import dot


def head_logits(hidden: Array, head: Array, multiplier: float = 1.0, softcap: float | None = None) -> Array:
    """float32 logits [..., V] of hidden [..., H] by head [V, H], × multiplier, then softly capped at ±softcap."""
    logits = dot(hidden, head, contract=(1,), out=jnp.float32)
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


def first_largest(x: Array) -> Array:
    """int32 [...]: where the largest of x [..., V] stands, of equals the first; where a NaN stands, if one does."""
    return jax.lax.platform_dependent(x, cpu=_by_reductions, default=_argmax)


def _argmax(x: Array) -> Array:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _by_reductions(x: Array) -> Array:
    """On CPU a reduction over pairs is not vectorised, nor is what x is computed from, which takes eight times as long.

    The maximum may overlook a NaN there, so a NaN's place is counted from the end of the row: negative, it comes first.
    """
    size = x.shape[-1]
    at = jnp.arange(size, dtype=jnp.int32).reshape(*(1 for _ in x.shape[1:]), -1)
    largest = x == x.max(axis=-1, keepdims=True)
    found = jnp.where(jnp.isnan(x), at - size, jnp.where(largest, at, size)).min(axis=-1)
    return jnp.where(found < 0, found + size, found)


def is_broken(logits: Array, chosen: Array) -> Array:
    """bool [...]: does a row of logits [..., V] hold a NaN?  `chosen` int32 [...] is its `first_largest`, with noise or
    without, which then points at the NaN; so one look at the chosen logit is enough."""
    return jnp.isnan(jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0])
