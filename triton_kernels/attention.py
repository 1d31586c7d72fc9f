"""Attention of rows over committed pages and their own block: flash attention through a page table.

One program takes a tile of a request's rows (all query heads of one key/value head together) and a share of its
committed tokens.  With several shares a request, one more program takes the block itself and `combine` merges them all;
that is what fills the chip when few requests run.  Cost follows what is committed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .writing import turned

NOTHING = tl.constexpr(-3.0e38)  # a best score before any: finite, so that no difference of infinities arises


@triton.jit
def _fold(q, keys, values, seen, best, total, mixed, scale, IEEE: tl.constexpr):
    """Keys [D, T] and values [T, D] folded into a running softmax; seen bool [M, T]."""
    if IEEE:
        scores = tl.dot(q, keys, input_precision="ieee")
    else:
        scores = tl.dot(q, keys)
    scores = tl.where(seen, scores * scale, -float("inf"))
    top = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp(scores - top[:, None])
    carry = tl.exp(best - top)
    if IEEE:
        added = tl.dot(weights, values, input_precision="ieee")
    else:
        added = tl.dot(weights.to(values.dtype), values)
    return top, total * carry + tl.sum(weights, axis=1), mixed * carry[:, None] + added


@triton.jit
def _committed(
    q, pool_ref, table_ref, s, g, row, first_row, length, share, scale,
    W: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, SHARES: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """The running softmax of queries q [M, BD] over a share of request s's committed tokens: best, total, mixed."""
    d = tl.arange(0, BD)
    inside = d < D
    best = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, BD], tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + first_row - WINDOW + 1, 0) // T * T
    each = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), T), SHARES) * T
    start = first + share * each
    for t in range(start, tl.minimum(start + each, length), T):
        at = t + tl.arange(0, T)
        there = at < length
        page = tl.load(table_ref + s * W + at // C, mask=there, other=0)
        base = page.to(tl.int64) * (2 * G * C * D) + g * (C * D) + (at % C) * D
        keys = tl.load(pool_ref + base[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        values = tl.load(
            pool_ref + (base + G * C * D)[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        seen = tl.broadcast_to(there[None, :], (M, T))
        if WINDOW > 0:
            seen = seen & (length + row[:, None] - at[None, :] < WINDOW)
        best, total, mixed = _fold(q, keys, values, seen, best, total, mixed, scale, IEEE)
    return best, total, mixed


@triton.jit
def _block(
    q, keys, values, row, j, best, total, mixed, scale,
    B: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Rows j [BT] of the block itself, keys [BD, BT] and values [BT, BD], folded into the running softmax."""
    # A NaN in a value counts through the key, for the rows that see it: for the others it must be no 0 · NaN.
    spoilt = tl.sum((values != values).to(tl.int32), axis=1) > 0
    keys = tl.where(spoilt[None, :], float("nan"), keys)
    values = tl.where(values == values, values, 0.0)
    seen = tl.broadcast_to((j < B)[None, :], (M, BT))
    if CAUSAL:
        seen = seen & (j[None, :] <= row[:, None])
    if WINDOW > 0:
        seen = seen & (row[:, None] - j[None, :] < WINDOW) & (j[None, :] - row[:, None] < WINDOW)
    return _fold(q, keys, values, seen, best, total, mixed, scale, IEEE)


@triton.jit
def _finish(
    out_ref, part_ref, stats_ref, at_q, ok, sg, tile, share, best, total, mixed,
    D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """With one share out [S, B, G·R, D] at `at_q` where `ok`; else part and stats, for `combine`."""
    d = tl.arange(0, BD)
    if SHARES == 1:
        out = mixed / total[:, None]
        tl.store(out_ref + at_q[:, None] + d[None, :], out.to(out_ref.dtype.element_ty), mask=ok)
    else:
        part = (sg * tl.num_programs(1) + tile) * tl.num_programs(2) + share
        lane = tl.arange(0, M)
        tl.store(part_ref + (part * M + lane)[:, None] * D + d[None, :], mixed, mask=(d < D)[None, :])
        tl.store(stats_ref + part * 2 * M + lane, best)
        tl.store(stats_ref + part * 2 * M + M + lane, total)


@triton.jit
def attend(
    q_ref, kv_ref, pool_ref, table_ref, lengths_ref, out_ref, part_ref, stats_ref,
    scale: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Grid (requests · G, row tiles, parts): one part with one share, else SHARES and the block.

    q [S, B, G·R, D]; kv [S, B, 2, G, D]; pool [P, 2, G, C, D]; table [S, W]; lengths [S].  Row m of a request is block
    row m // R, query head m % R.  With one share it writes out [S, B, G·R, D]; else part [S·G, tiles, parts, M, D]
    float32 and stats [S·G, tiles, parts, 2, M] = best score, weight sum.  WINDOW 0: none.
    """
    sg, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, g = sg // G, sg % G
    m = tile * M + tl.arange(0, M)
    row = m // R
    d = tl.arange(0, BD)
    inside = d < D
    at_q = ((s * B + row) * (G * R) + g * R + m % R) * D
    ok = (row < B)[:, None] & inside[None, :]
    q = tl.load(q_ref + at_q[:, None] + d[None, :], mask=ok, other=0.0)
    length = tl.load(lengths_ref + s)
    best, total, mixed = _committed(  # pyright: ignore[reportGeneralTypeIssues]
        q, pool_ref, table_ref, s, g, row, tile * M // R, length, share, scale, W, G, C, D, BD, M, T, SHARES, WINDOW,
        IEEE,
    )  # fmt: skip
    if share == tl.num_programs(2) - 1:  # the block itself; with others, it has nothing committed
        end = B
        if CAUSAL:
            end = tl.minimum((tile * M + M - 1) // R + 1, B)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(tile * M // R - WINDOW + 1, 0) // BT * BT
        for t in range(begin, end, BT):
            j = t + tl.arange(0, BT)
            there = j < B
            base = ((s * B + j) * (2 * G) + g) * D
            keys = tl.load(kv_ref + base[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            values = tl.load(
                kv_ref + (base + G * D)[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            best, total, mixed = _block(
                q, keys, values, row, j, best, total, mixed, scale, B, M, BT, CAUSAL, WINDOW, IEEE
            )
    _finish(out_ref, part_ref, stats_ref, at_q, ok, sg, tile, share, best, total, mixed, D, BD, M, SHARES)


@triton.jit
def attend_projected(
    qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, locations_ref, pool_in_ref, table_ref, lengths_ref,
    out_ref, part_ref, stats_ref, pool_ref,
    scale: tl.constexpr, eps: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """`attend` that takes the projection qkv [S, B, G, R+2, D] and norms and turns its queries and keys itself.

    cos, sin float32 [S·B, D/2].  With WRITE the block's keys and values also go to their locations [S·B] in pool, which
    is the same buffer as pool_in: rows at or past a request's length, which nobody reads.  Each tile of queries makes
    the keys that it sees anew; the last, which sees all (one tile, or no window), writes them.
    """
    sg, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, g = sg // G, sg % G
    m = tile * M + tl.arange(0, M)
    row = m // R
    d = tl.arange(0, BD)
    inside = d < D
    ok = (row < B)[:, None] & inside[None, :]
    dtype = qkv_ref.dtype.element_ty
    at = (((s * B + row) * G + g) * (R + 2) + m % R) * D
    angle = (s * B + row) * (D // 2)
    q = turned(qkv_ref, q_norm_ref, cos_ref, sin_ref, at[:, None], angle[:, None], d[None, :], ok, eps, D, NORM, 1).to(
        dtype
    )
    length = tl.load(lengths_ref + s)
    best, total, mixed = _committed(
        q, pool_in_ref, table_ref, s, g, row, tile * M // R, length, share, scale, W, G, C, D, BD, M, T, SHARES,
        WINDOW, IEEE,
    )  # fmt: skip
    if share == tl.num_programs(2) - 1:  # the block itself; with others, it has nothing committed
        end = B
        if CAUSAL:
            end = tl.minimum((tile * M + M - 1) // R + 1, B)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(tile * M // R - WINDOW + 1, 0) // BT * BT
        for t in range(begin, end, BT):
            j = t + tl.arange(0, BT)
            there = j < B
            base = (((s * B + j) * G + g) * (R + 2) + R) * D
            turn = (s * B + j) * (D // 2)
            ok_keys = there[None, :] & inside[:, None]
            ok_values = there[:, None] & inside[None, :]
            keys = turned(
                qkv_ref, k_norm_ref, cos_ref, sin_ref, base[None, :], turn[None, :], d[:, None], ok_keys, eps, D,
                NORM, 0,
            ).to(dtype)  # fmt: skip
            values = tl.load(qkv_ref + (base + D)[:, None] + d[None, :], mask=ok_values, other=0.0)
            if WRITE:
                mine = tile == tl.num_programs(1) - 1
                location = tl.load(locations_ref + s * B + j, mask=there, other=0)
                to = ((location // C).to(tl.int64) * (2 * G) + g) * (C * D) + (location % C) * D
                tl.store(pool_ref + to[None, :] + d[:, None], keys.to(pool_ref.dtype.element_ty), mask=ok_keys & mine)
                tl.store(
                    pool_ref + (to + G * C * D)[:, None] + d[None, :], values.to(pool_ref.dtype.element_ty),
                    mask=ok_values & mine,
                )  # fmt: skip
            best, total, mixed = _block(
                q, keys, values, row, j, best, total, mixed, scale, B, M, BT, CAUSAL, WINDOW, IEEE
            )
    at_q = ((s * B + row) * (G * R) + g * R + m % R) * D
    _finish(out_ref, part_ref, stats_ref, at_q, ok, sg, tile, share, best, total, mixed, D, BD, M, SHARES)


@triton.jit
def combine(
    part_ref, stats_ref, out_ref,
    B: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    PARTS: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """Grid (requests · G, B · R): all parts of a row of queries, at once, become its place in out [S, B, G·R, D]."""
    sg, m = tl.program_id(0), tl.program_id(1)
    s, g, tile, lane = sg // G, sg % G, m // M, m % M
    i, d = tl.arange(0, PP), tl.arange(0, BD)
    part = (sg * tl.cdiv(B * R, M) + tile) * PARTS + i
    there, inside = i < PARTS, d < D
    best = tl.load(stats_ref + part * 2 * M + lane, mask=there, other=NOTHING)
    total = tl.load(stats_ref + part * 2 * M + M + lane, mask=there, other=0.0)
    ok = there[:, None] & inside[None, :]
    mixed = tl.load(part_ref + (part * M + lane)[:, None] * D + d[None, :], mask=ok, other=0.0)
    weight = tl.exp(best - tl.max(best, axis=0))
    out = tl.sum(mixed * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    at = ((s * B + m // R) * (G * R) + g * R + m % R) * D
    tl.store(out_ref + at + d, out.to(out_ref.dtype.element_ty), mask=inside)
