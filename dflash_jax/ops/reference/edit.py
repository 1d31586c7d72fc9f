"""What a request changes in the target's logits before its token is chosen, in vLLM's order.

A grammar's mask, forbidden tokens and bias, stop tokens that come too early; then penalties for tokens that are there
already, where each row of a block counts the drafts before it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EditRows:
    """What each of S requests asks for.

    active bool [S]: it asks for anything of this; bias float32 [S, V], −∞ for a token that must not come; emitted
    int32 [S, V]: how often it has emitted a token; in_prompt bool [S, V]; repetition, presence, frequency float32 [S]
    (1, 0 and 0: no penalty); stops_from int32 [S]: the first position at which a stop token may stand.
    """

    active: Array
    bias: Array
    emitted: Array
    in_prompt: Array
    repetition: Array
    presence: Array
    frequency: Array
    stops_from: Array


def edited_logits(
    logits: Array, rows: EditRows, stop_ids: Array, positions: Array, block_ids: Array | None = None
) -> Array:
    """float32 [S, B, V]: the logits as each request wants them changed; −∞ for tokens that must not come.

    positions int32 [S, B] of the tokens to be emitted; stop_ids int32 [S, K], padded with −1.  block_ids int32 [S, B] =
    [bonus, drafts]: row k counts drafts 1 … k as emitted.  A NaN stays one.
    """
    x = logits + rows.bias[:, None]
    x = jnp.where(_too_early(rows, stop_ids, positions, logits.shape[-1]), -jnp.inf, x)
    out = _penalised(x, rows.emitted[:, None], rows.in_prompt[:, None], rows)
    if block_ids is not None and block_ids.shape[1] > 1:
        out = _with_drafts_counted(out, x, rows, block_ids[:, 1:])
    return jnp.where(rows.active[:, None, None], out, logits)


def _with_drafts_counted(out: Array, x: Array, rows: EditRows, drafts: Array) -> Array:
    """`out` [S, B, V] with its values at drafts int32 [S, B − 1] made anew from x: row k counts drafts 1 … k."""
    emitted, in_prompt = (jnp.take_along_axis(a, drafts, axis=1)[:, None] for a in (rows.emitted, rows.in_prompt))
    at = jnp.broadcast_to(drafts[:, None], (*x.shape[:2], drafts.shape[1]))
    before = jnp.take_along_axis(x, at, axis=2)
    values = _penalised(before, emitted + _times_before(drafts), in_prompt, rows)
    return jnp.put_along_axis(out, at, values, axis=2, inplace=False)  # where drafts are equal, so are the values


def _too_early(rows: EditRows, stop_ids: Array, positions: Array, vocab: int) -> Array:
    """bool [S, B, V]: stop tokens at positions before the request may stop."""
    tokens = jnp.arange(vocab, dtype=jnp.int32)[None, None]
    is_stop = (stop_ids[:, :, None] == tokens).any(axis=1)
    return is_stop[:, None] & (positions < rows.stops_from[:, None])[..., None]


def _penalised(x: Array, emitted: Array, in_prompt: Array, rows: EditRows) -> Array:
    """x [S, B, N] of tokens emitted so often, or seen in the prompt; arrays broadcast against x."""
    repetition, presence, frequency = (a[:, None, None] for a in (rows.repetition, rows.presence, rows.frequency))
    there = emitted > 0
    x = jnp.where(there | in_prompt, jnp.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * emitted.astype(x.dtype) - jnp.where(there, presence, 0)


def _times_before(drafts: Array) -> Array:
    """int32 [S, B, B − 1] of drafts [S, B − 1]: how often draft j stands among drafts 1 … k, for each row k."""
    equal = (drafts[:, :, None] == drafts[:, None, :]).astype(jnp.int32)
    return jnp.pad(jnp.cumsum(equal, axis=1), ((0, 0), (1, 0), (0, 0)))


def masked_logits(logits: Array, allowed: Array | None) -> Array:
    """logits [S, B, V], −∞ where bit v of `allowed` uint32 [S, B, ⌈V / 32⌉] is 0 (None: all are allowed)."""
    if allowed is None:
        return logits
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    bits = allowed[..., tokens // 32] >> (tokens % 32)[None, None] & np.uint32(1)
    return jnp.where(bits == 1, logits, -jnp.inf)
