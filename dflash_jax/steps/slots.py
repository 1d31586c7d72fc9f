"""What the host changes in slots between launches: who has them, which pages, who is done."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array

from dflash_jax.ops import EditRows, SamplingRows
from dflash_jax.state import DecodeState, greedy_rows


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
