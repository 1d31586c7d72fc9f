"""Log-probabilities of what was chosen and of the likeliest alternatives."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.reference.head import top_tokens


class Logprobs(NamedTuple):
    """Of each row: the chosen token's value float32 [S, B] and rank int32 [S, B] (1: the likeliest); the n likeliest
    tokens int32 [S, B, n] and their values float32 [S, B, n], from the largest on."""

    chosen: Array
    rank: Array
    tokens: Array
    values: Array


def token_logprobs(logits: Array, chosen: Array, n: int, normalise: bool = True) -> Logprobs:
    """Of logits float32 [S, B, V] and chosen int32 [S, B]; without `normalise` the logits themselves.

    Several tokens with the chosen one's value share the last of their ranks, as in vLLM.  Where there are fewer tokens
    than n, the rest are token −1 with −∞.
    """
    values = jax.nn.log_softmax(logits, axis=-1) if normalise else logits
    own = jnp.take_along_axis(values, chosen[..., None], axis=-1)
    rank = (values >= own).sum(axis=-1, dtype=jnp.int32)
    top, tokens = top_tokens(values, min(n, values.shape[-1]))
    spare = [(0, 0)] * (top.ndim - 1) + [(0, n - top.shape[-1])]
    top = jnp.pad(top, spare, constant_values=-jnp.inf)
    return Logprobs(own[..., 0], rank, jnp.pad(tokens.astype(jnp.int32), spare, constant_values=-1), top)


def packed_logprobs(logprobs: Logprobs) -> Array:
    """int32 [S, B · (2 + 2n)], floats as their bits, so that one array carries a round's results to the host."""
    floats = [jax.lax.bitcast_convert_type(a, jnp.int32) for a in (logprobs.chosen[..., None], logprobs.values)]
    rows = jnp.concatenate([floats[0], logprobs.rank[..., None], logprobs.tokens, floats[1]], axis=-1)
    return rows.reshape(rows.shape[0], -1)
