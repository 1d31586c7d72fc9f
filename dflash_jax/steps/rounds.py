"""The speculative round, as in the paper: draft a block, verify it, accept, publish, commit.

Each function can be called alone; `decode_round` is the whole round as one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from dflash_jax.drafters import Weights
from dflash_jax.models import FAMILIES, Hidden, Rows, head_weight
from dflash_jax.ops import GREEDY, GREEDY_BELOW, RUNNING, Accepted, is_broken, masked_logits
from dflash_jax.state import NOTHING, DecodeState, Live, Needs, count_emitted, gather
from dflash_jax.steps.config import StepConfig
from dflash_jax.steps.report import with_logprobs


def prepare(config: StepConfig, live: Live, block: int, mode: str = GREEDY) -> Rows:
    """The rows [bonus, MASK × (B−1)] of a block, at positions seq_len … seq_len + B − 1."""
    ids, positions, locations = config.kernels.prepare_block(
        live.bonus, live.seq_len, live.live, live.page_table,
        block=block, mask_id=config.drafter.mask_id, page_size=config.page_size,
    )  # fmt: skip
    return Rows(
        ids, positions, locations, live.page_table, live.seq_len, config.kernels,
        sampling=live.sampling, mode=mode, edits=live.edits, stop_ids=live.stop_ids,
    )  # fmt: skip


def draft(config: StepConfig, weights: Weights, state: DecodeState, rows: Rows) -> Rows:
    """The rows with the drafter's proposals int32 [S, B−1] after the bonus (none to make in a block of one row)."""
    if rows.ids.shape[1] == 1:
        return rows
    proposed = config.drafter.draft(weights, state.draft, _for_drafter(config, rows))
    return dataclasses.replace(rows, ids=jnp.concatenate([rows.ids[:, :1], proposed], axis=1))


def _for_drafter(config: StepConfig, rows: Rows) -> Rows:
    """The rows as the drafter shall see them: how it may choose is set by the configuration."""
    if rows.sampling is None or config.draft_sampling == "argmax":
        return dataclasses.replace(rows, mode=GREEDY)
    if config.draft_temperature is None:
        return rows
    asked = rows.sampling.temperature
    temperature = jnp.where(asked < GREEDY_BELOW, asked, config.draft_temperature)
    return dataclasses.replace(rows, sampling=dataclasses.replace(rows.sampling, temperature=temperature))


def verify(config: StepConfig, weights: Weights, state: DecodeState, rows: Rows) -> tuple[Array, Hidden]:
    """The target over the block, causally: float32 logits [S, B, V] of every row, and taps with KV written."""
    hidden = forward(config, weights, state, rows)
    return config.kernels.head_logits(hidden.last, head_weight(weights.target)), hidden


def forward(config: StepConfig, weights: Weights, state: DecodeState, rows: Rows) -> Hidden:
    """The target over `rows`, without the head."""
    run = FAMILIES[config.target.family].forward
    return run(weights.target, config.target, rows, state.kv, config.drafter.taps)


def accept(config: StepConfig, live: Live, rows: Rows, logits: Array, allowed: Array | None = None) -> Accepted:
    """How many rows are kept, the tokens they emit, and what ends the request.

    The target's own token after each row is its argmax, or its sample with the noise of that token's position, of the
    logits as the request wants them changed.  allowed uint32 [S, B, ⌈V / 32⌉]: a grammar's mask, a bit a token.
    """
    return _accept(config, live, rows, logits, _edited(rows, logits, allowed))


def _edited(rows: Rows, logits: Array, allowed: Array | None) -> Array:
    """Logits [S, B, V] of a block's rows, as the requests want them changed."""
    return rows.edited(masked_logits(logits, allowed), rows.positions + 1, rows.ids)


def _accept(config: StepConfig, live: Live, rows: Rows, logits: Array, edited: Array) -> Accepted:
    tokens = rows.choose(edited, rows.positions + 1)
    broken = is_broken(logits, tokens)
    return config.kernels.accept_bonus(rows.ids, tokens, broken, live.seq_len, live.limit, live.stop_ids, live.live)


def publish(state: DecodeState, live: Live, accepted: Accepted) -> tuple[DecodeState, Array]:
    """Carry lengths and tokens on, and pack what the host reads: int32 [S, B+2] = commit_len, finish, tokens."""
    slots = live.slots
    new = dataclasses.replace(
        state,
        bonus=state.bonus.at[slots].set(jnp.where(live.live, accepted.bonus, live.bonus)),
        # A row that is not live keeps its length: `live.seq_len` was zeroed for reading only.
        seq_len=state.seq_len.at[slots].add(accepted.commit_len),
        finished=state.finished.at[slots].set(~live.live | (accepted.finish != RUNNING)),
    )
    if live.edits is not None:
        kept = jnp.arange(accepted.tokens.shape[1])[None] < accepted.commit_len[:, None]
        new = count_emitted(new, slots, accepted.tokens, kept)
    return new, jnp.concatenate([accepted.commit_len[:, None], accepted.finish[:, None], accepted.tokens], axis=1)


def commit(
    config: StepConfig, weights: Weights, state: DecodeState, rows: Rows, taps: Array, commit_len: Array
) -> DecodeState:
    """Let the drafter absorb the committed rows; all others are sent to the padding page."""
    kept = jnp.arange(rows.ids.shape[1])[None] < commit_len[:, None]
    locations = jnp.where(kept, rows.locations, rows.locations % config.page_size)
    rows = dataclasses.replace(rows, locations=locations)
    return dataclasses.replace(state, draft=config.drafter.absorb(weights, state.draft, taps, rows))


def decode_round(
    config: StepConfig, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING
) -> tuple[DecodeState, Array]:
    """One whole round over the rows `slots` int32 [S] (padding slot where there are fewer requests).

    `needs` is what any of the rows asks for.  Returns the new state and the packed result of `publish`, followed by
    that of `packed_logprobs` where asked for.
    """
    live, rows = _block_rows(config, state, slots, block, needs)
    rows = draft(config, weights, state, rows)
    logits, hidden = verify(config, weights, state, rows)
    state = dataclasses.replace(state, kv=hidden.pool)
    return _finish_round(config, weights, state, live, rows, Verified(rows.ids, logits, hidden.taps), None, needs)


def _block_rows(
    config: StepConfig, state: DecodeState, slots: Array, block: int, needs: Needs = NOTHING
) -> tuple[Live, Rows]:
    live = gather(state, slots, needs.edits)
    return live, prepare(config, live, block, needs.mode)


def _finish_round(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    live: Live,
    rows: Rows,
    verified: Verified,
    allowed: Array | None,
    needs: Needs,
) -> tuple[DecodeState, Array]:
    """`accept`, `publish` and `commit`."""
    _, logits, taps = verified
    edited = _edited(rows, logits, allowed)
    accepted = _accept(config, live, rows, logits, edited)
    state, packed = publish(state, live, accepted)
    packed = with_logprobs(config, rows, logits, accepted.tokens, packed, needs.logprobs, edited)
    return commit(config, weights, state, rows, taps, accepted.commit_len), packed


# -- a round in three parts, for masks that the host makes of the drafts while they are verified -----------------------


def propose(
    config: StepConfig, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING
) -> Array:
    """int32 [S, B] = [bonus, drafts] of the next round."""
    return draft(config, weights, state, _block_rows(config, state, slots, block, needs)[1]).ids


class Verified(NamedTuple):
    """A verified block: ids int32 [S, B], logits float32 [S, B, V], taps [S, B, K·H]."""

    ids: Array
    logits: Array
    taps: Array


def verify_block(
    config: StepConfig, weights: Weights, state: DecodeState, slots: Array, ids: Array
) -> tuple[DecodeState, Array, Array]:
    """`verify` for blocks ids int32 [S, B] of `propose`: the state with KV written, logits and taps."""
    rows = dataclasses.replace(_block_rows(config, state, slots, ids.shape[1])[1], ids=ids)
    logits, hidden = verify(config, weights, state, rows)
    return dataclasses.replace(state, kv=hidden.pool), logits, hidden.taps


def accept_block(
    config: StepConfig,
    weights: Weights,
    state: DecodeState,
    slots: Array,
    verified: Verified,
    allowed: Array | None = None,
    needs: Needs = NOTHING,
) -> tuple[DecodeState, Array]:
    """`accept`, `publish` and `commit` of a verified block; returns what `decode_round` does."""
    live, rows = _block_rows(config, state, slots, verified.ids.shape[1], needs)
    rows = dataclasses.replace(rows, ids=verified.ids)
    return _finish_round(config, weights, state, live, rows, verified, allowed, needs)
