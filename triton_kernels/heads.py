"""The head's product and its largest token of each row, without logits in memory.

A program takes a tile of the vocabulary and of the rows and keeps (largest, where) of each row; `first_best` picks
among the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # below the key of every number
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(x):
    """int32 in the order of the floats x; both zeros alike, NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & HIGHEST), HIGHEST)


@triton.jit
def best_of_tiles(
    hidden_ref, head_ref, keys_ref, ids_ref,
    multiplier: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr, H: tl.constexpr, TILES: tl.constexpr,
    M: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, TILES).  hidden [ROWS, H], head [V, H] → keys, ids int32 [ROWS, TILES].

    Tiles of rows come first, so that those of one tile of the head find it in the cache.  Rows and tokens past the end
    are read again from the last one and not kept.
    """
    tile = tl.program_id(1)
    row = tl.program_id(0) * M + tl.arange(0, M)
    token = tile * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    x_ref = hidden_ref + tl.minimum(row, ROWS - 1)[None, :] * H + k[:, None]
    w_ref = head_ref + tl.minimum(token, V - 1).to(tl.int64)[:, None] * H + k[None, :]
    logits = tl.zeros([BV, M], tl.float32)
    for at in range(0, H, BK):
        if H % BK == 0:
            w = tl.load(w_ref + at)
            x = tl.load(x_ref + at)
        else:
            w = tl.load(w_ref + at, mask=(k < H - at)[None, :], other=0.0)
            x = tl.load(x_ref + at, mask=(k < H - at)[:, None], other=0.0)
        if IEEE:
            logits = tl.dot(w, x, logits, input_precision="ieee")
        else:
            logits = tl.dot(w, x, logits)
    if multiplier != 1.0:
        logits = logits * multiplier
    keys = tl.where((token < V)[:, None], ordered(logits), LOWEST)
    best, where = tl.max(keys, axis=0, return_indices=True)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(keys_ref + row * TILES + tile, best, mask=row < ROWS)
    tl.store(ids_ref + row * TILES + tile, tile * BV + where, mask=row < ROWS)


@triton.jit
def first_best(keys_ref, ids_ref, out_ref, TILES: tl.constexpr, TP: tl.constexpr):
    """Grid (ROWS).  keys, ids [ROWS, TILES] → out [ROWS], of equals the first; TP: TILES or more lanes."""
    row, tile = tl.program_id(0), tl.arange(0, TP)
    keys = tl.load(keys_ref + row * TILES + tile, mask=tile < TILES, other=LOWEST)
    _, where = tl.max(keys, axis=0, return_indices=True)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(out_ref + row, tl.load(ids_ref + row * TILES + where))
