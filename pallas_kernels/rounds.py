"""What a round decides besides its products: where a block goes, and how much of it is kept.  One step takes all.

XLA makes about ten small programs of each, with copies into VMEM between them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .memory import check_scalars

RUNNING, STOP, LENGTH, BROKEN = 0, 1, 2, 3  # finish codes


def prepare_block(
    bonus: Array,
    seq_len: Array,
    live: Array,
    page_table: Array,
    *,
    block: int,
    mask_id: int,
    page_size: int,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """As the reference op: (ids, positions, locations), each int32 [S, B]."""
    s = page_table.shape[0]
    check_scalars(page_table.size + 3 * s, interpret)
    shape = jax.ShapeDtypeStruct((s, block), jnp.int32)
    step = functools.partial(
        _place, block=block, mask_id=mask_id, page_size=page_size, width=page_table.shape[1], requests=s
    )
    return pl.pallas_call(
        step,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * 4,
        out_shape=(shape,) * 3,
        interpret=interpret,
        name="prepare_block",
    )(bonus, seq_len, live.astype(jnp.int32), page_table.reshape(-1))


def _place(
    bonus_ref, seq_len_ref, live_ref, table_ref, ids_ref, positions_ref, locations_ref,
    *, block: int, mask_id: int, page_size: int, width: int, requests: int,
):  # fmt: skip
    """bonus, seq_len, live [S], table [S·W] in SMEM → ids, positions, locations [S, B]."""
    row = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)

    @pl.loop(0, requests)
    def _(s):
        here = pl.ds(s, 1)
        start = seq_len_ref[s]
        entry = jax.lax.div(start, jnp.int32(page_size))
        offset = start - entry * page_size + row  # in the block's first page, or past it
        location = offset
        for column in range((block + page_size - 2) // page_size + 1):
            at = entry + column
            there = (at < width) & (live_ref[s] != 0)
            page = jnp.where(there, table_ref[s * width + jnp.minimum(at, width - 1)], 0)
            location = jnp.where(offset >= column * page_size, (page - column) * page_size + offset, location)
        ids_ref[here] = jnp.where(row == 0, bonus_ref[s], mask_id)
        positions_ref[here] = start + row
        locations_ref[here] = location


def accept_bonus(
    block_ids: Array,
    target_tokens: Array,
    broken: Array,
    seq_len: Array,
    limit: Array,
    stop_ids: Array,
    live: Array,
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array]:
    """As the reference op: (commit_len, bonus, finish int32 [S], tokens int32 [S, B])."""
    s, b = block_ids.shape
    scalars, rows = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
    one, many = jax.ShapeDtypeStruct((s,), jnp.int32), jax.ShapeDtypeStruct((s, b), jnp.int32)
    return pl.pallas_call(
        functools.partial(_accept, requests=s),
        in_specs=[rows, rows, rows, scalars, scalars, rows, scalars],
        out_specs=(scalars, scalars, scalars, rows),
        out_shape=(one, one, one, many),
        interpret=interpret,
        name="accept_bonus",
    )(block_ids, target_tokens, broken.astype(jnp.int32), seq_len, limit, stop_ids, live.astype(jnp.int32))


def _accept(
    block_ref, target_ref, broken_ref, seq_len_ref, limit_ref, stops_ref, live_ref,
    commit_ref, bonus_ref, finish_ref, tokens_ref, *, requests: int,
):  # fmt: skip
    """block, target, broken, tokens [S, B] and stops [S, K] in VMEM; the rest [S] in SMEM.

    Every sentence of the reference, in its order.
    """
    b, k = target_ref.shape[1], stops_ref.shape[1]
    row = jax.lax.broadcasted_iota(jnp.int32, (1, b), 1)

    def first(flags: Array) -> Array:
        return jnp.min(jnp.where(flags, row, b + 1))

    @pl.loop(0, requests)
    def _(s):
        here = pl.ds(s, 1)
        block, target, stops = block_ref[here], target_ref[here], stops_ref[here]
        drafted = jnp.concatenate([block[:, 1:], block[:, :1]], axis=1)
        accepted = first((row == b - 1) | (drafted != target))
        ends = target == stops[:, :1]
        for i in range(1, k):
            ends |= target == stops[:, i : i + 1]
        until_stop = first(ends) + 1
        whole = first(broken_ref[here] != 0)
        room = jnp.maximum(limit_ref[s] - 1 - seq_len_ref[s], 0)
        commit = jnp.minimum(jnp.minimum(accepted + 1, until_stop), jnp.minimum(room, whole))
        commit = jnp.where(live_ref[s] != 0, commit, 0)
        finish = jnp.where(commit == until_stop, STOP, jnp.where(commit == room, LENGTH, RUNNING))
        finish = jnp.where((whole == commit) & (whole <= accepted) & (finish == RUNNING), BROKEN, finish)
        last = jnp.sum(jnp.where(row == jnp.maximum(commit - 1, 0), jnp.where(commit > 0, target, block), 0))
        commit_ref[s] = commit
        bonus_ref[s] = last
        finish_ref[s] = jnp.where(live_ref[s] != 0, finish, RUNNING)
        tokens_ref[here] = jnp.where(row < commit, target, 0)
