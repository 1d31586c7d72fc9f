"""Attention of rows over committed pages and their own block: flash attention through a page table.

A step takes a tile of a request's rows, all query heads of some key/value heads together.  It folds in the block
itself, which waits in VMEM, then the committed pages chunk by chunk: while one chunk is computed the next is copied,
and the last one of a step is accompanied by the first one of the step after it.  Cost follows what is committed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .memory import check, in_hbm, vmem_limit_bytes
from .tiles import LANES, Tiles, attention_tiles, round_up

NOTHING = -3.0e38  # a best score before any: finite, so that no difference of infinities arises


def quotient(n: Any, divisor: int) -> Any:
    """n // divisor of what is not negative: without the correction of signs, which asks what chip it is for."""
    return n if divisor == 1 else jax.lax.div(n, jnp.int32(divisor))


UNROLLED_ROWS = 256  # more rows keep the chip busy within one head, and take long to compile


@dataclass(frozen=True)
class Launch:
    """What is static in a launch.  B rows of `group` query heads a key/value head; W pages of C tokens a request."""

    tiles: Tiles
    rows: int
    group: int
    kv_heads: int
    width: int
    page_size: int
    scale: float
    causal: bool
    window: int | None
    exact: bool
    unroll: bool
    steps: int  # of each lane

    @property
    def tokens(self) -> int:
        """T: tokens of a chunk."""
        return self.tiles.pages * self.page_size

    @property
    def head_groups(self) -> int:
        return self.kv_heads // self.tiles.heads

    def each_head(self, body: Callable[[Any], None]) -> None:
        """`body(g)` for every head of a step; unrolled, so that products and softmax of two heads overlap."""
        if self.unroll:
            for g in range(self.tiles.heads):
                body(g)
        else:
            pl.loop(0, self.tiles.heads)(body)

    def place(self, step: Any) -> tuple[Any, Any, Any]:
        """(request, group of key/value heads, tile of rows) of a step, counted over all lanes."""
        item = quotient(step, self.tiles.row_tiles)
        request = quotient(item, self.head_groups)
        return request, item - request * self.head_groups, step - item * self.tiles.row_tiles

    def chunks(self, length: Any, tile: Any) -> tuple[Any, Any]:
        """First and past-the-last chunk of a step: one at least, which may hold nothing to see."""
        first = 0
        if self.window is not None:
            first = quotient(jnp.maximum(length + tile * self.tile_rows - self.window + 1, 0), self.tokens)
        return first, jnp.maximum(quotient(length + self.tokens - 1, self.tokens), first + 1)

    @property
    def tile_rows(self) -> int:
        """Block rows that each tile but the last covers."""
        return self.tiles.rows // self.group


def _step(
    table_ref, lengths_ref, q_ref, own_ref, pool_ref, out_ref, best_ref, total_ref, mixed_ref, pages_ref, arrived, turn,
    *, launch: Launch,
):  # fmt: skip
    """One step of the grid (lanes, steps).

    table [S·W], lengths [S] in SMEM; q, out [1, heads, M, D]; own [1, 2, heads, B, D]; pool [P, 2, G, C, D] in HBM.
    best, total [heads, M, 128] and mixed [heads, M, D] are the running softmax; pages [2, pages, 2, heads, C, D] is
    the double buffer, `turn` [1] its next half.
    """
    step = pl.program_id(1)
    own_step = pl.program_id(0) * launch.steps + step
    last_step = launch.steps * launch.tiles.lanes - 1
    request, group, tile = launch.place(own_step)
    length = lengths_ref[request]
    first, last = launch.chunks(length, tile)
    copies = functools.partial(_copies, launch, table_ref, lengths_ref, pool_ref, pages_ref, arrived)

    @pl.when(step == 0)
    def _():
        turn[0] = 0
        copies(request, group, first, 0, lambda copy: copy.start())

    row = _rows(launch, tile)
    _start(best_ref, total_ref, mixed_ref)
    _fold_block(launch, q_ref, own_ref, best_ref, total_ref, mixed_ref, row, tile)

    def fold_chunk(chunk: Any, half: Any) -> Any:
        more = chunk + 1 < last
        after, after_group, after_tile = launch.place(jnp.minimum(own_step + 1, last_step))
        after_first, _ = launch.chunks(lengths_ref[after], after_tile)
        target, target_group = jnp.where(more, request, after), jnp.where(more, group, after_group)
        target_chunk = jnp.where(more, chunk + 1, after_first)

        @pl.when(more | (step + 1 < launch.steps))
        def _():
            copies(target, target_group, target_chunk, 1 - half, lambda copy: copy.start())

        copies(request, group, chunk, half, lambda copy: copy.wait())
        _fold_pages(launch, q_ref, pages_ref.at[half], best_ref, total_ref, mixed_ref, row, length, chunk)
        return 1 - half

    turn[0] = jax.lax.fori_loop(first, last, fold_chunk, turn[0])

    @launch.each_head
    def _(g):
        out_ref[0, g] = (mixed_ref[g] / total_ref[g, :, :1]).astype(out_ref.dtype)


def _copies(launch: Launch, table_ref, lengths_ref, pool_ref, pages_ref, arrived, request, group, chunk, half, act):
    """`act` on the copy of each page of a chunk that holds something committed."""
    heads, pages = launch.tiles.heads, launch.tiles.pages
    left = quotient(lengths_ref[request] + launch.page_size - 1, launch.page_size) - chunk * pages

    @pl.loop(0, jnp.clip(left, 0, pages))
    def _(i):
        page = table_ref[request * launch.width + chunk * pages + i]
        source = pool_ref.at[page]
        if launch.head_groups > 1:
            source = source.at[:, pl.ds(group * heads, heads)]
        act(pltpu.make_async_copy(source, pages_ref.at[half, i], arrived.at[half]))


def _rows(launch: Launch, tile) -> Array:
    """int32 [M, 1]: the block row of each query row of a tile; row m belongs to block row m // R."""
    m = jax.lax.broadcasted_iota(jnp.int32, (launch.tiles.rows, 1), 0)
    own = jnp.floor((m.astype(jnp.float32) + 0.5) / launch.group).astype(jnp.int32)
    return own + tile * launch.tile_rows


def _start(best_ref, total_ref, mixed_ref) -> None:
    best_ref[...] = jnp.full(best_ref.shape, NOTHING, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)


def _fold_block(launch: Launch, q_ref, own_ref, best_ref, total_ref, mixed_ref, row, tile) -> None:
    """The block's own rows, as far as any row of the tile sees them."""
    size, count = launch.tiles.own, own_ref.shape[3] // launch.tiles.own
    oldest, newest = tile * launch.tile_rows, tile * launch.tile_rows + launch.tile_rows - 1
    begin = 0 if launch.window is None else quotient(jnp.maximum(oldest - launch.window + 1, 0), size)
    end = jnp.minimum(quotient(newest, size) + 1, count) if launch.causal else count

    def fold(t):
        j = jax.lax.broadcasted_iota(jnp.int32, (launch.tiles.rows, size), 1) + t * size
        seen = j < launch.rows
        if launch.causal:
            seen &= j <= row
        if launch.window is not None:
            seen &= (row - j < launch.window) & (j - row < launch.window)
        at = slice(None) if count == 1 else pl.ds(pl.multiple_of(t * size, size), size)

        @launch.each_head
        def _(g):
            keys, values = own_ref[0, 0, g, at], own_ref[0, 1, g, at]
            _fold(launch, g, q_ref, keys, values, seen, best_ref, total_ref, mixed_ref)

    if count == 1:
        fold(0)
    else:
        pl.loop(begin, end)(fold)


def _fold_pages(launch: Launch, q_ref, half_ref, best_ref, total_ref, mixed_ref, row, length, chunk) -> None:
    """A chunk of committed tokens."""
    left = length - chunk * launch.tokens
    _blank(launch, half_ref, left)
    j = jax.lax.broadcasted_iota(jnp.int32, (launch.tiles.rows, launch.tokens), 1)
    seen = j < left
    if launch.window is not None:
        seen &= left + row - j < launch.window

    @launch.each_head
    def _(g):
        keys, values = (half_ref[:, side, g].reshape(launch.tokens, -1) for side in (0, 1))
        _fold(launch, g, q_ref, keys, values, seen, best_ref, total_ref, mixed_ref)


def _blank(launch: Launch, half_ref, left) -> None:
    """Zero the values past the committed tokens, where anything may lie: 0 · NaN would be NaN."""

    @pl.when(left < launch.tokens)
    def _():
        shape = half_ref.shape[:1] + half_ref.shape[3:]
        at = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * launch.page_size
        there = at + jax.lax.broadcasted_iota(jnp.int32, shape, 1) < left

        @launch.each_head
        def _(g):
            values = half_ref[:, 1, g].astype(jnp.float32)
            half_ref[:, 1, g] = jnp.where(there, values, 0.0).astype(half_ref.dtype)


def _fold(launch: Launch, g, q_ref, keys, values, seen, best_ref, total_ref, mixed_ref) -> None:
    """Keys and values [T, D] folded into the running softmax of head g; seen bool [M, T]."""
    exact = jax.lax.Precision.HIGHEST if launch.exact else None
    product = functools.partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)
    scores = product(q_ref[0, g], keys, (((1,), (1,)), ((), ())))
    scores = jnp.where(seen, scores * launch.scale, -jnp.inf)
    best = best_ref[g, :, :1]
    top = jnp.maximum(best, scores.max(axis=1, keepdims=True))
    weights = jnp.exp(scores - top)
    carry = jnp.exp(best - top)
    total = total_ref[g, :, :1] * carry + weights.sum(axis=1, keepdims=True)
    best_ref[g] = jnp.broadcast_to(top, best_ref.shape[1:])
    total_ref[g] = jnp.broadcast_to(total, total_ref.shape[1:])
    mixed_ref[g] = mixed_ref[g] * carry + product(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))


def paged_attention(
    q: Array,
    kv: Array,
    pool: Array,
    page_table: Array,
    lengths: Array,
    *,
    causal: bool,
    window: int | None = None,
    interpret: Any = False,
) -> Array:
    """As the reference op: B query rows per request over `lengths` committed tokens and the block itself.

    q [S, B, N, D]; kv [S, B, 2, G, D]; pool [P, 2, G, C, D]; page_table int32 [S, W]; lengths int32 [S]; [S, B, N, D].
    """
    s, b, n, d = q.shape
    g, size, width = pool.shape[2], pool.shape[3], page_table.shape[1]
    check(pool, page_table.size + s, interpret)
    tiles = attention_tiles(s, b, g, n // g, d, width, size, q.dtype.itemsize)
    steps = s * (g // tiles.heads) * tiles.row_tiles // tiles.lanes
    unroll = tiles.rows <= UNROLLED_ROWS and not interpret
    launch = Launch(tiles, b, n // g, g, width, size, d**-0.5, causal, window, q.dtype == jnp.float32, unroll, steps)
    grouped = q.reshape(s, b, g, n // g, d).swapaxes(1, 2).reshape(s, g, -1, d)
    padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, tiles.rows * tiles.row_tiles - grouped.shape[2]), (0, 0)))
    out = _call(launch, padded, _own(kv, tiles.own), pool, page_table, lengths, interpret)
    return out[:, :, : b * (n // g)].reshape(s, g, b, n // g, d).swapaxes(1, 2).reshape(s, b, n, d)


def _own(kv: Array, size: int) -> Array:
    """The block's keys and values [S, 2, G, B', D], B' a multiple of `size`.

    A NaN in a value counts through the key, for the rows that see it: for the others it must be no 0 · NaN.
    """
    keys, values = (kv[:, :, side].swapaxes(1, 2) for side in (0, 1))
    nan = jnp.isnan(values)
    keys = jnp.where(nan.any(axis=-1, keepdims=True), jnp.nan, keys)
    own = jnp.stack([keys, jnp.where(nan, 0, values)], axis=1)
    return jnp.pad(own, ((0, 0), (0, 0), (0, 0), (0, round_up(kv.shape[1], size) - kv.shape[1]), (0, 0)))


def _call(launch: Launch, q: Array, own: Array, pool: Array, table: Array, lengths: Array, interpret: Any) -> Array:
    tiles, d = launch.tiles, q.shape[3]

    def at(lane, step, *_):
        return launch.place(lane * launch.steps + step)

    def q_at(*where):
        request, group, tile = at(*where)
        return request, group, tile, 0

    def own_at(*where):
        request, group, _ = at(*where)
        return request, 0, group, 0, 0

    rows = pl.BlockSpec((1, tiles.heads, tiles.rows, d), q_at)
    state = pltpu.VMEM((tiles.heads, tiles.rows, LANES), jnp.float32)
    buffers = [
        state, state, pltpu.VMEM((tiles.heads, tiles.rows, d), jnp.float32),
        pltpu.VMEM((2, tiles.pages, 2, tiles.heads, launch.page_size, d), pool.dtype),
    ]  # fmt: skip
    blocks = [(tiles.heads, tiles.rows, d), (tiles.heads, tiles.rows, d), (2, tiles.heads, own.shape[3], d)]
    scores = 4 * tiles.rows * launch.tokens * 4
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(tiles.lanes, launch.steps),
        in_specs=[
            rows,
            pl.BlockSpec((1, 2, tiles.heads, own.shape[3], d), own_at),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=rows,
        scratch_shapes=[*buffers, pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32)],
    )
    return pl.pallas_call(
        functools.partial(_step, launch=launch),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(buffers, blocks, q.dtype, scores),
        ),
        cost_estimate=_cost(launch, q, own, pool),
        interpret=interpret,
        name="paged_attention",
    )(table.reshape(-1), lengths, q, own, in_hbm(pool, interpret))


def _cost(launch: Launch, q: Array, own: Array, pool: Array) -> pl.CostEstimate:
    """Of full tables: what a launch costs at most, and each tile of rows copies the pages anew."""
    tokens = launch.width * launch.page_size
    scores = math.prod(q.shape[:3]) * (tokens + own.shape[3])
    pages = q.shape[0] * launch.tiles.row_tiles * launch.width * (pool.nbytes // pool.shape[0])
    return pl.CostEstimate(
        flops=4 * scores * q.shape[3], transcendentals=scores, bytes_accessed=2 * q.nbytes + own.nbytes + pages
    )
