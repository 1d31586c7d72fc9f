"""What a round decides besides its products: where a block goes, and how much of it is kept.

A program takes a request.  Plain XLA makes several kernels of each, and every launch is longer than its work.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUNNING, STOP, LENGTH, BROKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # finish codes


@triton.jit
def place_block(
    bonus_ref, seq_len_ref, live_ref, table_ref, ids_ref, positions_ref, locations_ref,
    MASK: tl.constexpr, B: tl.constexpr, BP: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid (S).  bonus, seq_len, live [S] and table [S, W] → ids, positions, locations [S, B]; BP: B or more lanes."""
    s, row = tl.program_id(0), tl.arange(0, BP)
    inside = row < B
    position = tl.load(seq_len_ref + s) + row
    entry = position // C
    there = inside & (entry < W) & (tl.load(live_ref + s) != 0)
    page = tl.load(table_ref + s * W + entry, mask=there, other=0)
    tl.store(ids_ref + s * B + row, tl.where(row == 0, tl.load(bonus_ref + s), MASK), mask=inside)
    tl.store(positions_ref + s * B + row, position, mask=inside)
    tl.store(locations_ref + s * B + row, page * C + position % C, mask=inside)


@triton.jit
def accept_block(
    block_ref, target_ref, broken_ref, seq_len_ref, limit_ref, stops_ref, live_ref,
    commit_ref, bonus_ref, finish_ref, tokens_ref,
    B: tl.constexpr, BP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (S).  block, target, broken [S, B]; stops [S, K]; the rest [S] → commit, bonus, finish [S], tokens [S, B].

    BP and KP: B and K or more lanes.  Every sentence of the reference, in its order.
    """
    s, row, k = tl.program_id(0), tl.arange(0, BP), tl.arange(0, KP)
    inside = row < B
    target = tl.load(target_ref + s * B + row, mask=inside, other=0)
    drafted = tl.load(block_ref + s * B + 1 + row, mask=row < B - 1, other=0)
    wrong = (row == B - 1) | (inside & (drafted != target))
    accepted = tl.min(tl.where(wrong, row, B + 1), axis=0)
    stops = tl.load(stops_ref + s * K + k, mask=k < K, other=-1)
    ends = tl.max((target[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    until_stop = tl.min(tl.where(inside & ends, row, B + 1), axis=0) + 1
    broken = tl.load(broken_ref + s * B + row, mask=inside, other=0) != 0
    whole = tl.min(tl.where(broken, row, B + 1), axis=0)
    room = tl.maximum(tl.load(limit_ref + s) - 1 - tl.load(seq_len_ref + s), 0)
    live = tl.load(live_ref + s) != 0

    commit = tl.minimum(tl.minimum(accepted + 1, until_stop), tl.minimum(room, whole))
    commit = tl.where(live, commit, 0)
    finish = tl.where(commit == until_stop, STOP, tl.where(commit == room, LENGTH, RUNNING))
    finish = tl.where((whole == commit) & (whole <= accepted) & (finish == RUNNING), BROKEN, finish)
    last = tl.sum(tl.where(row == commit - 1, target, 0), axis=0)
    tl.store(commit_ref + s, commit)
    tl.store(bonus_ref + s, tl.where(commit > 0, last, tl.load(block_ref + s * B)))
    tl.store(finish_ref + s, tl.where(live, finish, RUNNING))
    tl.store(tokens_ref + s * B + row, tl.where(row < commit, target, 0), mask=inside)
