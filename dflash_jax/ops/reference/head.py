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
    """(token int32 [...], broken bool [...]) of logits [..., V]; ties go to the lowest id."""
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return token, is_broken(logits, token)


def is_broken(logits: Array, chosen: Array) -> Array:
    """bool [...]: does a row of logits [..., V] hold a NaN?  `chosen` int32 [...] is its argmax, with noise or without,
    which then points at the NaN; so one look at the chosen logit is enough."""
    return jnp.isnan(jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0])
