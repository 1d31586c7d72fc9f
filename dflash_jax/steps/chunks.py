"""Prefill: chunks of prompts, and the first token after the last of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.drafters import Weights
from dflash_jax.models import Rows, head_weight
from dflash_jax.ops import BROKEN, LENGTH, RUNNING, STOP, is_broken, masked_logits, token_locations
from dflash_jax.state import NOTHING, DecodeState, Needs, count_emitted
from dflash_jax.steps.config import StepConfig
from dflash_jax.steps.report import with_logprobs, with_prompt_logprobs
from dflash_jax.steps.rounds import forward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts, one a row, padded to a bucket of T tokens.

    tokens int32 [S, T]; slots, start, length int32 [S]: tokens[:length] go to positions start …; last bool
    [S]: the chunk ends its prompt, so the row yields the first token.  allowed uint32 [S, ⌈V / 32⌉]: a grammar's mask
    for that token; after int32 [S]: the prompt's next token, read for the prompt's log-probabilities alone.
    """

    tokens: Array
    slots: Array
    start: Array
    length: Array
    last: Array
    allowed: Array | None = None
    after: Array | None = None


def prefill(
    config: StepConfig, weights: Weights, state: DecodeState, batch: PrefillBatch, needs: Needs = NOTHING
) -> tuple[DecodeState, Array]:
    """Verify and commit a chunk of each prompt, target and draft KV alike.

    Returns the state and int32 [S, 3] = (1 if a token was emitted, finish, token), followed by `packed_logprobs` of
    that token and of each token after a row of the chunk, as `needs` says.
    """
    rows = _chunk_rows(config, state, batch, needs)
    hidden = forward(config, weights, state, rows)
    absorbed = config.drafter.absorb(weights, state.draft, hidden.taps, rows)
    state = dataclasses.replace(state, kv=hidden.pool, draft=absorbed)
    end = batch.start + batch.length
    final = jnp.take_along_axis(hidden.last, jnp.maximum(batch.length - 1, 0)[:, None, None], axis=1)  # [S, 1, H]
    logits = config.kernels.head_logits(final, head_weight(weights.target))
    allowed = None if batch.allowed is None else batch.allowed[:, None]
    edited = rows.edited(masked_logits(logits, allowed), end[:, None])
    token = rows.choose(edited, end[:, None])
    state, packed = _first_token(state, batch, token[:, 0], is_broken(logits, token)[:, 0], needs.edits)
    packed = with_logprobs(config, rows, logits, token, packed, needs.logprobs, edited)
    if needs.prompt_logprobs is not None:
        packed = with_prompt_logprobs(config, weights, hidden.last, _following(batch), packed, needs.prompt_logprobs)
    return state, packed


def _chunk_rows(config: StepConfig, state: DecodeState, batch: PrefillBatch, needs: Needs) -> Rows:
    offsets = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    positions = batch.start[:, None] + offsets
    table = state.page_table[batch.slots]
    locations = token_locations(table, positions, offsets < batch.length[:, None], config.page_size)
    sampling = jax.tree.map(lambda x: x[batch.slots], state.sampling)
    edits = jax.tree.map(lambda x: x[batch.slots], state.edits) if needs.edits else None
    return Rows(
        batch.tokens, positions, locations, table, batch.start, config.kernels, prefill=True,
        sampling=sampling, mode=needs.mode, edits=edits, stop_ids=state.stop_ids[batch.slots],
    )  # fmt: skip


def _following(batch: PrefillBatch) -> Array:
    """int32 [S, T]: the prompt's token after each of the chunk's."""
    if batch.after is None:
        raise ValueError("a batch whose log-probabilities are asked for must name the tokens `after` its chunks")
    at = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    shifted = jnp.roll(batch.tokens, -1, axis=1)
    return jnp.where(at == batch.length[:, None] - 1, batch.after[:, None], shifted)


def _first_token(
    state: DecodeState, batch: PrefillBatch, token: Array, broken: Array, edits: bool
) -> tuple[DecodeState, Array]:
    """Carry on from the chunk: lengths advance; a last chunk sets the bonus and may finish the request.

    token int32 [S], broken bool [S] of the last row; edits: the token counts as emitted.
    """
    slots, end = batch.slots, batch.start + batch.length
    stop = (token[:, None] == state.stop_ids[slots]).any(axis=1)
    finish = jnp.where(stop, STOP, jnp.where(end + 1 >= state.limit[slots], LENGTH, RUNNING))
    finish = jnp.where(batch.last, jnp.where(broken, BROKEN, finish), RUNNING).astype(jnp.int32)
    emitted = batch.last & ~broken
    done = jnp.where(batch.last, finish != RUNNING, state.finished[slots])
    new = dataclasses.replace(
        state,
        bonus=state.bonus.at[slots].set(jnp.where(emitted, token, state.bonus[slots])),
        seq_len=state.seq_len.at[slots].set(jnp.where(batch.length > 0, end, state.seq_len[slots])),
        finished=state.finished.at[slots].set(done),
    )
    if edits:
        new = count_emitted(new, slots, token[:, None], emitted[:, None])
    packed = jnp.stack([emitted.astype(jnp.int32), finish, jnp.where(emitted, token, 0)], axis=1)
    return new, packed
