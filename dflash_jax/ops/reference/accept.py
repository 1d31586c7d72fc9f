"""Acceptance: how much of a block is kept, and what ends a request (DESIGN 3.4, step 5)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

RUNNING, STOP, LENGTH, BROKEN = 0, 1, 2, 3  # finish codes


class Accepted(NamedTuple):
    """commit_len, bonus, finish int32 [S]; tokens int32 [S, B] (zero past commit_len)."""

    commit_len: Array
    bonus: Array
    finish: Array
    tokens: Array


def accept_bonus(
    block_ids: Array,
    target_tokens: Array,
    broken: Array,
    seq_len: Array,
    limit: Array,
    stop_ids: Array,
    live: Array,
) -> Accepted:
    """Keep drafts while they equal the target's own token of the row before; then add the bonus.

    block_ids int32 [S, B] = [bonus, drafts]; target_tokens int32 [S, B]: the target's token after each row;
    broken bool [S, B]: that row's logits held a NaN; seq_len, limit int32 [S]; stop_ids int32 [S, K], padded
    with −1; live bool [S].

    A request may hold `limit` tokens in all (prompt and generated); the token emitted by row k is number
    seq_len + 2 + k.  The commit ends with the first stop token and never passes the limit.  Rows that are
    not live commit nothing.
    """
    rows = jnp.arange(block_ids.shape[1], dtype=jnp.int32)[None]
    differ = block_ids[:, 1:] != target_tokens[:, :-1]
    accept_len = jnp.where(differ, rows[:, :-1], rows.shape[1] - 1).min(axis=1, initial=rows.shape[1] - 1)
    stops = target_tokens[:, :, None] == stop_ids[:, None, :]
    until_stop = jnp.where(stops, rows[..., None], rows.shape[1] + 1).min(axis=(1, 2)) + 1  # of one step: one kernel
    room = jnp.maximum(limit - 1 - seq_len, 0)
    commit = jnp.minimum(jnp.minimum(accept_len + 1, until_stop), room)
    whole = _first(broken, rows)  # rows before the first NaN
    commit = jnp.where(live, jnp.minimum(commit, whole), 0)
    finish = jnp.where(commit == until_stop, STOP, jnp.where(commit == room, LENGTH, RUNNING))
    finish = jnp.where(live & (whole == commit) & (whole <= accept_len) & (finish == RUNNING), BROKEN, finish)
    kept = rows < commit[:, None]
    last = jnp.take_along_axis(target_tokens, jnp.maximum(commit - 1, 0)[:, None], axis=1)[:, 0]
    return Accepted(
        commit_len=commit,
        bonus=jnp.where(commit > 0, last, block_ids[:, 0]),
        finish=jnp.where(live, finish, RUNNING).astype(jnp.int32),
        tokens=jnp.where(kept, target_tokens, 0),
    )


def _first(flags: Array, rows: Array) -> Array:
    """Index of the first true of each row of bool [S, B]; B + 1 where there is none."""
    return jnp.where(flags, rows, rows.shape[1] + 1).min(axis=1).astype(jnp.int32)
