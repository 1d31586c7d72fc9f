"""The output head: logits, and the greedy token of each row."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.reference.numerics import dot


def head_logits(hidden: Array, head: Array, multiplier: float = 1.0, softcap: float | None = None) -> Array:
    """float32 logits [..., V] of hidden [..., H] by head [V, H], × multiplier, then softly capped at ±softcap."""
    logits = dot(hidden, head, contract=(1,), out=jnp.float32)
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


def greedy_tokens(logits: Array) -> tuple[Array, Array]:
    """(token int32 [...], broken bool [...]) of logits [..., V]; ties go to the lowest id.

    A row with a NaN is `broken`: argmax then points at the NaN, and the caller must not emit it.
    """
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return token, jnp.isnan(best)
