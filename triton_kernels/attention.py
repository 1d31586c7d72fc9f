"""Attention of rows over committed pages and their own block: flash attention through a page table.

One program takes a tile of a request's rows (all query heads of one key/value head together) and a share of its
committed tokens.  The last share's program takes the block itself, or one more does where there is room for it, and
`combine` merges several; that is what fills the chip when few requests run.  Cost follows what is committed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .early import LINE_BITS, ask
from .writing import halves, joined, turned, unturned

NOTHING = tl.constexpr(-3.0e38)  # a best score before any: finite, so that no difference of infinities arises


@triton.jit
def _vectors(x_ref, base, D: tl.constexpr, BD: tl.constexpr):
    """D numbers from each of base [N] on: [N, BD], see `_lanes`."""
    d, inside = _lanes(D, BD)  # pyright: ignore[reportGeneralTypeIssues]
    at = x_ref + base[:, None] + d[None, :]
    if D == BD:
        return tl.load(at)
    return tl.load(at, mask=inside[None, :], other=0.0)


@triton.jit
def _lanes(D: tl.constexpr, BD: tl.constexpr):
    """Which of D numbers each of BD lanes has, and whether any: each half of a vector is padded for itself."""
    lane = tl.arange(0, BD)
    within = lane % (BD // 2)
    return lane // (BD // 2) * (D // 2) + within, within < D // 2


@triton.jit
def _fold(q, keys, values, seen, best, total, mixed, scale, IEEE: tl.constexpr):
    """Keys and values [T, BD] folded into a running softmax; seen bool [M, T].  Scores · scale are exponents of two."""
    if IEEE:
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(keys))
    scores = tl.where(seen, scores, -float("inf"))
    top = tl.maximum(best, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - top[:, None])
    carry = tl.exp2(best - top)
    if IEEE:
        added = tl.dot(weights, values, input_precision="ieee")
    else:
        added = tl.dot(weights.to(values.dtype), values)
    return top, total * carry + tl.sum(weights, axis=1), mixed * carry[:, None] + added


@triton.jit
def _range(length, first_row, share, T: tl.constexpr, SHARES: tl.constexpr, WINDOW: tl.constexpr):
    """The first of a share of `length` committed tokens, and its end.  Empty where start >= end."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + first_row - WINDOW + 1, 0) // T * T
    each = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), T), SHARES) * T
    start = first + share * each
    return start, tl.minimum(start + each, length)


@triton.jit
def _beginnings(table_ref, s, g, at, W: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Where in the pool the keys of committed tokens `at` begin; their values are G · C · D on."""
    page = tl.load(table_ref + s * W + at // C)
    return page.to(tl.int64) * (2 * G * C * D) + (g * (C * D) + at % C * D)


@triton.jit
def _hurry(
    pool_ref, table_ref, s, g, start, end,
    W: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Asks for the first AHEAD tokens' pages: they come to the chip's cache while the queries are prepared."""
    if AHEAD > 0:
        LINE: tl.constexpr = LINE_BITS // pool_ref.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(D, LINE))
        at = tl.maximum(tl.minimum(start + tl.arange(0, AHEAD), end - 1), 0)
        line = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
        keys = pool_ref + _beginnings(table_ref, s, g, at, W, G, C, D)[:, None] + line[None, :]
        for side in tl.static_range(2):
            ask(keys + side * (G * C * D))


@triton.jit
def _committed(
    q, pool_ref, table_ref, s, g, row, length, start, end, scale,
    W: tl.constexpr, G: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """The running softmax of queries q [M, BD] over committed tokens start … end: best, total, mixed."""
    best = tl.full([M], NOTHING, tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, BD], tl.float32)
    for t in range(start, end, T):
        at = t + tl.arange(0, T)
        # Past the end the last token again: no load needs a mask.
        base = _beginnings(table_ref, s, g, tl.minimum(at, length - 1), W, G, C, D)
        keys = _vectors(pool_ref, base, D, BD)
        values = _vectors(pool_ref, base + G * C * D, D, BD)
        seen = tl.broadcast_to((at < length)[None, :], (M, T))
        if WINDOW > 0:
            seen = seen & (length + row[:, None] - at[None, :] < WINDOW)
        best, total, mixed = _fold(q, keys, values, seen, best, total, mixed, scale, IEEE)
    return best, total, mixed


@triton.jit
def _own(
    tile, B: tl.constexpr, R: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Which rows of the block a tile of its queries may see: the first, and the end."""
    begin, end = 0, B
    if B > BT:  # else one step: no loop
        if CAUSAL:
            end = tl.minimum((tile * M + M - 1) // R + 1, B)
        if WINDOW > 0:
            begin = tl.maximum(tile * M // R - WINDOW + 1, 0) // BT * BT
    return begin, end


@triton.jit
def _block(
    q, keys, values, row, j, best, total, mixed, scale,
    B: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Rows j [BT] of the block itself, keys and values [BT, BD], folded into the running softmax."""
    # A NaN in a value counts through the key, for the rows that see it: for the others it must be no 0 · NaN.
    spoilt = tl.sum((values != values).to(tl.int32), axis=1) > 0
    keys = tl.where(spoilt[:, None], float("nan"), keys)
    values = tl.where(values == values, values, 0.0)
    seen = tl.broadcast_to((j < B)[None, :], (M, BT))
    if CAUSAL:
        seen = seen & (j[None, :] <= row[:, None])
    if WINDOW > 0:
        seen = seen & (row[:, None] - j[None, :] < WINDOW) & (j[None, :] - row[:, None] < WINDOW)
    return _fold(q, keys, values, seen, best, total, mixed, scale, IEEE)


@triton.jit
def _finish(
    out_ref, part_ref, stats_ref, at_q, row, sg, tile, share, best, total, mixed,
    B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """With one share out [S, B, G·R, D] at `at_q` of rows of the block; else part and stats, for `combine`."""
    d, inside = _lanes(D, BD)  # pyright: ignore[reportGeneralTypeIssues]
    if SHARES == 1:
        out = mixed * (1.0 / total)[:, None]
        ok = (row < B)[:, None] & inside[None, :]
        tl.store(out_ref + at_q[:, None] + d[None, :], out.to(out_ref.dtype.element_ty), mask=ok)
    else:
        part = (sg * tl.num_programs(1) + tile) * tl.num_programs(2) + share
        lane = tl.arange(0, M)
        at = (part * M + lane)[:, None] * D + d[None, :]
        tl.store(part_ref + at, mixed.to(part_ref.dtype.element_ty), mask=inside[None, :])
        tl.store(stats_ref + part * 2 * M + lane, best)
        tl.store(stats_ref + part * 2 * M + M + lane, total)


@triton.jit
def attend(
    q_ref, kv_ref, pool_ref, table_ref, lengths_ref, out_ref, part_ref, stats_ref,
    scale: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Grid (requests · G, row tiles, parts): one part with one share, else SHARES, and one more if the block is apart.

    q [S, B, G·R, D]; kv [S, B, 2, G, D]; pool [P, 2, G, C, D]; table [S, W]; lengths [S].  Row m of a request is block
    row m // R, query head m % R.  With one share it writes out [S, B, G·R, D]; else part [S·G, tiles, parts, M, D] and
    float32 stats [S·G, tiles, parts, 2, M] = best score as an exponent of two, weight sum.  WINDOW 0: none.
    """
    sg, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, g = sg // G, sg % G
    length = tl.load(lengths_ref + s)
    start, end = _range(length, tile * M // R, share, T, SHARES, WINDOW)  # pyright: ignore[reportGeneralTypeIssues]
    m = tile * M + tl.arange(0, M)
    row = m // R
    at_q = ((s * B + tl.minimum(row, B - 1)) * (G * R) + g * R + m % R) * D
    q = _vectors(q_ref, at_q, D, BD)
    _hurry(pool_ref, table_ref, s, g, start, end, W, G, C, D, AHEAD)
    best, total, mixed = _committed(
        q, pool_ref, table_ref, s, g, row, length, start, end, scale, W, G, C, D, BD, M, T, WINDOW, IEEE,
    )  # fmt: skip
    if share == tl.num_programs(2) - 1:  # the block itself
        begin, beyond = _own(tile, B, R, M, BT, CAUSAL, WINDOW)
        for t in range(begin, beyond, BT):
            j = t + tl.arange(0, BT)
            base = ((s * B + tl.minimum(j, B - 1)) * (2 * G) + g) * D
            keys = _vectors(kv_ref, base, D, BD)
            values = _vectors(kv_ref, base + G * D, D, BD)
            best, total, mixed = _block(
                q, keys, values, row, j, best, total, mixed, scale, B, M, BT, CAUSAL, WINDOW, IEEE
            )
    _finish(out_ref, part_ref, stats_ref, at_q, row, sg, tile, share, best, total, mixed, B, D, BD, M, SHARES)


@triton.jit
def attend_projected(
    qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, locations_ref, pool_in_ref, table_ref, lengths_ref,
    out_ref, part_ref, stats_ref, pool_ref,
    scale: tl.constexpr, eps: tl.constexpr, B: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, BT: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """`attend` that takes the projection qkv [S, B, G, R+2, D] and norms and turns its queries and keys itself.

    cos, sin float32 [S·B, D/2].  With WRITE the block's keys and values also go to their locations [S·B] in pool, which
    is the same buffer as pool_in: rows at or past a request's length, which nobody reads.  Each tile of queries makes
    the keys that it sees anew; the last, which sees all (one tile, or no window), writes them.
    """
    sg, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, g = sg // G, sg % G
    length = tl.load(lengths_ref + s)
    start, end = _range(length, tile * M // R, share, T, SHARES, WINDOW)  # pyright: ignore[reportGeneralTypeIssues]
    m = tile * M + tl.arange(0, M)
    row = m // R
    place = s * B + tl.minimum(row, B - 1)
    at = ((place * G + g) * (R + 2) + m % R) * D
    q1, q2, cos, sin = unturned(qkv_ref, cos_ref, sin_ref, at, place * (D // 2), D, BD // 2)
    _hurry(pool_in_ref, table_ref, s, g, start, end, W, G, C, D, AHEAD)
    q1, q2 = turned(q1, q2, cos, sin, q_norm_ref, eps, D, NORM)
    q = joined(q1, q2)
    best, total, mixed = _committed(
        q, pool_in_ref, table_ref, s, g, row, length, start, end, scale, W, G, C, D, BD, M, T, WINDOW, IEEE,
    )  # fmt: skip
    if share == tl.num_programs(2) - 1:  # the block itself
        begin, beyond = _own(tile, B, R, M, BT, CAUSAL, WINDOW)
        for t in range(begin, beyond, BT):
            j = t + tl.arange(0, BT)
            own = s * B + tl.minimum(j, B - 1)
            base = ((own * G + g) * (R + 2) + R) * D
            k1, k2, cos_k, sin_k = unturned(qkv_ref, cos_ref, sin_ref, base, own * (D // 2), D, BD // 2)
            v1 = halves(qkv_ref, base + D, D, BD // 2)
            v2 = halves(qkv_ref, base + D + D // 2, D, BD // 2)
            k1, k2 = turned(k1, k2, cos_k, sin_k, k_norm_ref, eps, D, NORM)
            if WRITE:
                mine = (j < B) & (tile == tl.num_programs(1) - 1)
                location = tl.load(locations_ref + own)
                to = ((location // C).to(tl.int64) * (2 * G) + g) * (C * D) + location % C * D
                _keep(pool_ref, to, k1, k2, mine, D, BD // 2)
                _keep(pool_ref, to + G * C * D, v1, v2, mine, D, BD // 2)
            best, total, mixed = _block(
                q, joined(k1, k2), joined(v1, v2), row, j, best, total, mixed, scale, B, M, BT, CAUSAL, WINDOW, IEEE
            )
    at_q = ((s * B + row) * (G * R) + g * R + m % R) * D
    _finish(out_ref, part_ref, stats_ref, at_q, row, sg, tile, share, best, total, mixed, B, D, BD, M, SHARES)


@triton.jit
def _keep(pool_ref, to, first, second, mine, D: tl.constexpr, BH: tl.constexpr):
    """Halves [N, BH] of vectors, to where they begin in the pool [N] where `mine` [N]."""
    half = tl.arange(0, BH)
    ok = mine[:, None] & (half < D // 2)[None, :]
    at = pool_ref + to[:, None] + half[None, :]
    tl.store(at, first.to(pool_ref.dtype.element_ty), mask=ok)
    tl.store(at + D // 2, second.to(pool_ref.dtype.element_ty), mask=ok)


@triton.jit
def combine(
    part_ref, stats_ref, out_ref,
    B: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    PARTS: tl.constexpr, PP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (requests · G, tiles of ROWS query rows): adds the parts of a row up, into out [S, B, G·R, D]."""
    sg, m = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    s, g, tile, lane = sg // G, sg % G, m // M, m % M
    i, d = tl.arange(0, PP), tl.arange(0, BD)
    part = (sg * tl.cdiv(B * R, M) + tile)[None, :] * PARTS + i[:, None]  # [PP, ROWS]
    asked, inside = m < B * R, d < D
    there = (i < PARTS)[:, None] & asked[None, :]
    at = part * 2 * M + lane[None, :]
    best = tl.load(stats_ref + at, mask=there, other=NOTHING)
    total = tl.load(stats_ref + at + M, mask=there, other=0.0)
    ok = there[:, :, None] & inside[None, None, :]
    at = (part * M + lane[None, :])[:, :, None] * D + d[None, None, :]
    mixed = tl.load(part_ref + at, mask=ok, other=0.0).to(tl.float32)
    weight = tl.exp2(best - tl.max(best, axis=0)[None, :])
    out = tl.sum(mixed * weight[:, :, None], axis=0) / tl.sum(total * weight, axis=0)[:, None]
    at = ((s * B + m // R) * (G * R) + g * R + m % R)[:, None] * D + d[None, :]
    tl.store(out_ref + at, out.to(out_ref.dtype.element_ty), mask=asked[:, None] & inside[None, :])
