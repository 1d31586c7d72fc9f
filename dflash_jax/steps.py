"""The speculative step, as in the paper: draft a block, verify it, accept, publish, commit.

Pure functions over `Weights` and `DecodeState`; `compiled` jits them with the state donated.  Each can be
called alone; `decode_round` is the whole round as one function.  Axis letters as in `axes`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.config import TargetConfig
from dflash_jax.drafters import Drafter, Weights
from dflash_jax.models import FAMILIES, Hidden, Rows, head_weight
from dflash_jax.ops import (
    BROKEN,
    FILTER,
    GREEDY,
    LENGTH,
    RUNNING,
    STOP,
    XLA,
    Accepted,
    EditRows,
    Kernels,
    SamplingRows,
    is_broken,
    masked_logits,
    packed_logprobs,
    processed_logits,
    token_locations,
    token_logprobs,
)
from dflash_jax.state import DecodeState, Live, Needs, gather, greedy_rows

NOTHING = Needs()
PROMPT_LOGPROB_ROWS = 16  # at most, of a chunk at a time, so that only so many rows of logits exist at once


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """All that is static in a step: one compilation for each value and each shape of its arguments.

    Where a request samples, its drafts are chosen with the target's noise (`coupled`), at `draft_temperature` if given,
    or are the likeliest tokens (`argmax`).  The output is the same; acceptance is not.
    logprobs_mode: log-probabilities are of the target's own distribution (`raw_logprobs`) or of the one that tokens are
    drawn from (`processed_logprobs`), or the logits of either (`raw_logits`, `processed_logits`).
    """

    target: TargetConfig
    drafter: Drafter
    page_size: int
    kernels: Kernels = XLA
    draft_sampling: str = "coupled"
    draft_temperature: float | None = None
    logprobs_mode: str = "raw_logprobs"


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
    sampling = dataclasses.replace(rows.sampling, temperature=jnp.where(asked > 0, config.draft_temperature, asked))
    return dataclasses.replace(rows, sampling=sampling)


def verify(config: StepConfig, weights: Weights, state: DecodeState, rows: Rows) -> tuple[Array, Hidden]:
    """The target over the block, causally: float32 logits [S, B, V] of every row, and taps with KV written."""
    forward = FAMILIES[config.target.family].forward
    hidden = forward(weights.target, config.target, rows, state.kv, config.drafter.taps)
    return config.kernels.head_logits(hidden.last, head_weight(weights.target)), hidden


def accept(config: StepConfig, live: Live, rows: Rows, logits: Array, allowed: Array | None = None) -> Accepted:
    """How many rows are kept, the tokens they emit, and what ends the request.

    The target's own token after each row is its argmax, or its sample with the noise of that token's position, of the
    logits as the request wants them changed.  allowed uint32 [S, B, ⌈V / 32⌉]: a grammar's mask, a bit a token.
    """
    tokens = rows.choose(_edited(rows, logits, allowed), rows.positions + 1)
    broken = is_broken(logits, tokens)
    return config.kernels.accept_bonus(
        rows.ids, tokens, broken, live.seq_len, live.limit, live.stop_ids, live.live
    )


def _edited(rows: Rows, logits: Array, allowed: Array | None) -> Array:
    """Logits [S, B, V] of a block's rows, changed."""
    return rows.edited(masked_logits(logits, allowed), rows.positions + 1, rows.ids)


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
        new = _count_emitted(new, slots, accepted.tokens, kept)
    return new, jnp.concatenate([accepted.commit_len[:, None], accepted.finish[:, None], accepted.tokens], axis=1)


def _count_emitted(state: DecodeState, slots: Array, tokens: Array, kept: Array) -> DecodeState:
    """Count tokens int32 [S, K], those `kept` bool [S, K]."""
    assert state.edits is not None
    emitted = state.edits.emitted.at[slots[:, None], tokens].add(kept.astype(jnp.int32))
    return dataclasses.replace(state, edits=dataclasses.replace(state.edits, emitted=emitted))


def with_logprobs(
    config: StepConfig, rows: Rows, logits: Array, tokens: Array, packed: Array, n: int | None, edited: Array
) -> Array:
    """`packed` int32 [S, K] with what `packed_logprobs` makes of tokens int32 [S, B] after it (n None: as it is).

    logits float32 [S, B, V] are the target's own, `edited` those changed by requests.
    """
    if n is None:
        return packed
    of, kind = config.logprobs_mode.split("_")
    if of == "processed":
        logits = edited
        if rows.sampling is not None and rows.mode != GREEDY:
            logits = processed_logits(edited, rows.sampling, rows.mode == FILTER)
    found = token_logprobs(logits, tokens, n, normalise=kind == "logprobs")
    return jnp.concatenate([packed, packed_logprobs(found)], axis=1)


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
    ids = propose(config, block, weights, state, slots, needs)
    state, logits, taps = verify_block(config, weights, state, slots, ids)
    return accept_block(config, weights, state, slots, Verified(ids, logits, taps), needs=needs)


# -- a round in three parts, for masks that the host makes of the drafts while they are verified -----------------------


def propose(
    config: StepConfig, block: int, weights: Weights, state: DecodeState, slots: Array, needs: Needs = NOTHING
) -> Array:
    """int32 [S, B] = [bonus, drafts] of the next round."""
    return draft(config, weights, state, prepare(config, gather(state, slots, needs.edits), block, needs.mode)).ids


class Verified(NamedTuple):
    """A verified block: ids int32 [S, B], logits float32 [S, B, V], taps [S, B, K·H]."""

    ids: Array
    logits: Array
    taps: Array


def verify_block(
    config: StepConfig, weights: Weights, state: DecodeState, slots: Array, ids: Array
) -> tuple[DecodeState, Array, Array]:
    """`verify` for blocks ids int32 [S, B] of `propose`: the state with KV written, logits and taps."""
    rows = dataclasses.replace(prepare(config, gather(state, slots), ids.shape[1]), ids=ids)
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
    ids, logits, taps = verified
    live = gather(state, slots, needs.edits)
    rows = dataclasses.replace(prepare(config, live, ids.shape[1], needs.mode), ids=ids)
    accepted = accept(config, live, rows, logits, allowed)
    state, packed = publish(state, live, accepted)
    edited = _edited(rows, logits, allowed)
    packed = with_logprobs(config, rows, logits, accepted.tokens, packed, needs.logprobs, edited)
    return commit(config, weights, state, rows, taps, accepted.commit_len), packed


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
    forward = FAMILIES[config.target.family].forward
    hidden = forward(weights.target, config.target, rows, state.kv, config.drafter.taps)
    at = jnp.maximum(batch.length - 1, 0)[:, None, None]
    final = jnp.take_along_axis(hidden.last, at, axis=1)  # [S, 1, H]
    logits = config.kernels.head_logits(final, head_weight(weights.target))
    state = dataclasses.replace(state, kv=hidden.pool)
    state = dataclasses.replace(state, draft=config.drafter.absorb(weights, state.draft, hidden.taps, rows))
    position = (batch.start + batch.length)[:, None]
    allowed = None if batch.allowed is None else batch.allowed[:, None]
    edited = rows.edited(masked_logits(logits, allowed), position)
    token = rows.choose(edited, position)
    broken = is_broken(logits, token)[:, 0]
    state, packed = _first_token(state, batch, token[:, 0], broken)
    if needs.edits:
        emitted = (batch.last & ~broken)[:, None]
        state = _count_emitted(state, batch.slots, token, emitted)
    packed = with_logprobs(config, rows, logits, token, packed, needs.logprobs, edited)
    return state, _with_prompt_logprobs(config, weights, batch, hidden.last, packed, needs.prompt_logprobs)


def _with_prompt_logprobs(
    config: StepConfig, weights: Weights, batch: PrefillBatch, last: Array, packed: Array, n: int | None
) -> Array:
    """`packed` with raw log-probabilities of the token after each row; last [S, T, H], some rows at a time."""
    if n is None or batch.after is None:
        return packed
    rows, width = batch.tokens.shape
    at = jnp.arange(width, dtype=jnp.int32)[None]
    following = jnp.where(at == batch.length[:, None] - 1, batch.after[:, None], jnp.roll(batch.tokens, -1, axis=1))
    size = math.gcd(width, PROMPT_LOGPROB_ROWS)

    def part(inputs: tuple[Array, Array]) -> Array:
        logits = config.kernels.head_logits(inputs[0], head_weight(weights.target))
        return packed_logprobs(token_logprobs(logits, inputs[1], n))

    split = [jnp.moveaxis(a.reshape(rows, width // size, size, *a.shape[2:]), 1, 0) for a in (last, following)]
    found = jax.lax.map(part, tuple(split))  # [parts, S, …]
    return jnp.concatenate([packed, jnp.moveaxis(found, 0, 1).reshape(rows, -1)], axis=1)


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


def _first_token(
    state: DecodeState, batch: PrefillBatch, token: Array, broken: Array
) -> tuple[DecodeState, Array]:
    """Carry on from the chunk: lengths advance; a last chunk sets the bonus and may finish the request."""
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
    packed = jnp.stack([emitted.astype(jnp.int32), finish, jnp.where(emitted, token, 0)], axis=1)
    return new, packed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Slots given to new requests: slots, limit int32 [S]; stop_ids [S, MAX_STOP_IDS]; page_table [S, W]; how they
    sample (None: greedily)."""

    slots: Array
    limit: Array
    stop_ids: Array
    page_table: Array
    sampling: SamplingRows | None = None


def admit(state: DecodeState, new: Admission) -> DecodeState:
    """(Re)initialise slots.  They stay finished, so that no round touches them, until their prefill ends."""
    slots = new.slots
    sampling = greedy_rows(slots.shape[0]) if new.sampling is None else new.sampling
    return dataclasses.replace(
        state,
        sampling=jax.tree.map(lambda old, value: old.at[slots].set(value), state.sampling, sampling),
        bonus=state.bonus.at[slots].set(0),
        seq_len=state.seq_len.at[slots].set(0),
        limit=state.limit.at[slots].set(new.limit),
        finished=state.finished.at[slots].set(True),
        stop_ids=state.stop_ids.at[slots].set(new.stop_ids),
        page_table=state.page_table.at[slots].set(new.page_table),
        edits=_inactive(state.edits, slots),
    )


def _inactive(edits: EditRows | None, slots: Array) -> EditRows | None:
    """What the slot's last request asked for stays there, unread."""
    return edits and dataclasses.replace(edits, active=edits.active.at[slots].set(False))


def edit(state: DecodeState, slots: Array, new: EditRows) -> DecodeState:
    """After `admit`: what the requests of `slots` int32 [S] change in their logits, `new` with a row for each.

    `emitted` counts what a resumed request has emitted already.
    """
    edits = jax.tree.map(lambda old, value: old.at[slots].set(value), state.edits, new)
    return dataclasses.replace(state, edits=edits)


def extend(state: DecodeState, updates: Array) -> DecodeState:
    """Enter pages in tables: updates int32 [U, 3] = (slot, index, page); spare rows name the padding slot."""
    table = state.page_table.at[updates[:, 0], updates[:, 1]].set(updates[:, 2])
    return dataclasses.replace(state, page_table=table)


def finish(state: DecodeState, slots: Array) -> DecodeState:
    """Host stop: these slots commit nothing from the next round on."""
    return dataclasses.replace(state, finished=state.finished.at[slots].set(True))


class Steps:
    """The steps compiled for one `StepConfig`: the state is donated, so its buffers are updated in place.

    `decode_round(block, weights, state, slots, needs=…)`, `prefill(weights, state, batch, needs=…)`,
    `admit(state, new)`, `edit(state, slots, new)`, `extend(state, updates)`, `finish(state, slots)`.  A round in three
    parts is `propose(block, weights, state, slots, needs=…)`, which donates nothing, `verify_block(weights, state,
    slots, ids)` and `accept_block(weights, state, slots, verified, allowed, needs=…)`.  Each is traced once for each
    shape of its arguments; `traces` counts by name.
    """

    def __init__(self, config: StepConfig):
        self.config = config
        self.traces: dict[str, int] = {}
        self.decode_round = self._jit(functools.partial(decode_round, config), "decode_round", static=(0,), donate=2)
        self.propose = self._jit(functools.partial(propose, config), "propose", static=(0,))
        self.verify_block = self._jit(functools.partial(verify_block, config), "verify_block", donate=1)
        self.accept_block = self._jit(functools.partial(accept_block, config), "accept_block", donate=1)
        self.prefill = self._jit(functools.partial(prefill, config), "prefill", donate=1)
        self.admit = self._jit(admit, "admit", donate=0)
        self.edit = self._jit(edit, "edit", donate=0)
        self.extend = self._jit(extend, "extend", donate=0)
        self.finish = self._jit(finish, "finish", donate=0)

    def _jit(self, function: Any, name: str, *, donate: int | None = None, static: tuple[int, ...] = ()) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args, **options)

        counted.__name__ = name  # the name that profiles and compiled text show
        donated = () if donate is None else (donate,)
        return jax.jit(counted, static_argnums=static, static_argnames="needs", donate_argnums=donated)
