"""The paged write of rows, in place: whole pages are read, rows are put into them, and they are written back.

A row of a page is less than the smallest piece of memory that a copy can name, so the unit is the page.  A step
takes some requests; while it puts its rows in, the pages of the next step are being read and those of the last one
written.  Pages that get no row are left alone, the padding page always.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .memory import check, in_hbm, vmem_limit_bytes
from .tiles import LANES, WriteTiles, write_tiles

BITS = 32  # rows that one word of a plan speaks of


@dataclass(frozen=True)
class Launch:
    """What is static in a launch: B rows of each request, in pages of C tokens."""

    tiles: WriteTiles
    rows: int
    kv_heads: int
    page_size: int
    head_dim: int
    steps: int  # of each lane

    @property
    def lane_blocks(self) -> list[slice]:
        """The head dimension in pieces of one register: only there may rows be stored at any offset."""
        return [slice(at, min(at + LANES, self.head_dim)) for at in range(0, self.head_dim, LANES)]

    @property
    def head_groups(self) -> int:
        return self.kv_heads // self.tiles.heads

    @property
    def words(self) -> int:
        """Words of a page's plan."""
        return -(-self.page_size // BITS)

    def place(self, step: Any) -> tuple[Any, Any]:
        """(first request, group of heads) of a step, counted over all lanes."""
        batch = jax.lax.div(step, jnp.int32(self.head_groups))
        return batch * self.tiles.requests, step - batch * self.head_groups


def plan(locations: Array, columns: int, page_size: int) -> tuple[Array, Array, Array]:
    """(offset of row 0 [S], page of each column [S · K], which of its rows are written [S · K · words]), all int32.

    locations [S, B] = page · C + offset of consecutive positions; rows in page 0 are not written, so a column's page
    is the largest that any of its rows names.
    """
    s, b = locations.shape
    offset = locations[:, :1] % page_size
    page = locations // page_size
    at = offset + jnp.arange(b, dtype=jnp.int32)[None]
    column = jnp.arange(columns, dtype=jnp.int32)[None, :, None]
    inside = (at // page_size)[:, None] == column  # [S, K, B]
    pages = jnp.where(inside, page[:, None], 0).max(axis=2)
    row = at % page_size
    words = []
    for word in range(-(-page_size // BITS)):
        bit = jnp.where(row // BITS == word, jnp.uint32(1) << (row % BITS).astype(jnp.uint32), jnp.uint32(0))
        chosen = jnp.where(inside & (page > 0)[:, None], bit[:, None], jnp.uint32(0))
        words.append(jax.lax.bitcast_convert_type(chosen.sum(axis=2, dtype=jnp.uint32), jnp.int32))
    return offset[:, 0], pages.reshape(-1), jnp.stack(words, axis=2).reshape(-1)


def _step(
    offset_ref, page_ref, bits_ref, rows_ref, pool_in_ref, pool_ref, shifted_ref, pages_ref, arrived, left,
    *, launch: Launch,
):  # fmt: skip
    """One step of the grid (lanes, steps): rows [requests, 2, heads, B, D] into pool [P, 2, G, C, D].

    pool_in is the same buffer as pool; pages [2, requests · K, 2, heads, C, D] is the double buffer; shifted
    [D / 128, 2, heads, K · C, 128] holds a request's rows where its pages want them.
    """
    del pool_in_ref
    i = pl.program_id(1)
    step, half = pl.program_id(0) * launch.steps + i, jax.lax.rem(i, 2)
    copies = functools.partial(_copies, launch, page_ref, pool_ref, pages_ref)

    @pl.when(i == 0)
    def _():
        copies(step, half, arrived, lambda copy: copy.start(), read=True)

    @pl.when(i > 0)
    def _():
        copies(step - 1, 1 - half, left, lambda copy: copy.wait(), read=False)

    @pl.when(i + 1 < launch.steps)
    def _():
        copies(step + 1, 1 - half, arrived, lambda copy: copy.start(), read=True)

    copies(step, half, arrived, lambda copy: copy.wait(), read=True)
    _put_rows(launch, step, offset_ref, page_ref, bits_ref, rows_ref, shifted_ref, pages_ref.at[half])
    copies(step, half, left, lambda copy: copy.start(), read=False)

    @pl.when(i + 1 == launch.steps)
    def _():
        copies(step, half, left, lambda copy: copy.wait(), read=False)


def _copies(launch: Launch, page_ref, pool_ref, pages_ref, step, half, semaphores, act, *, read: bool) -> None:
    """`act` on the copy of each page that a step writes to: from the pool (read) or back."""
    tiles = launch.tiles
    first, group = launch.place(step)

    @pl.loop(0, tiles.requests * tiles.columns)
    def _(i):
        page = page_ref[first * tiles.columns + i]

        @pl.when(page > 0)
        def _():
            there = pool_ref.at[page]
            if launch.head_groups > 1:
                there = there.at[:, pl.ds(group * tiles.heads, tiles.heads)]
            here, arrived = pages_ref.at[half, i], semaphores.at[half]
            act(pltpu.make_async_copy(there, here, arrived) if read else pltpu.make_async_copy(here, there, arrived))


def _put_rows(launch: Launch, step, offset_ref, page_ref, bits_ref, rows_ref, shifted_ref, half_ref) -> None:
    """Rows into the pages of one half of the buffer."""
    size, columns = launch.page_size, launch.tiles.columns
    first, _ = launch.place(step)

    @pl.loop(0, launch.tiles.requests)
    def _(r):
        for block, lanes in enumerate(launch.lane_blocks):
            rows = rows_ref[r, :, :, :, lanes].astype(jnp.float32)
            shifted_ref[block, :, :, pl.ds(offset_ref[first + r], launch.rows), : rows.shape[3]] = rows

        @pl.loop(0, columns)
        def _(k):
            entry = (first + r) * columns + k

            @pl.when(page_ref[entry] > 0)
            def _():
                at = pl.ds(pl.multiple_of(k * size, 8) if size % 8 == 0 else k * size, size)
                for block, lanes in enumerate(launch.lane_blocks):
                    old = half_ref[r * columns + k, :, :, :, lanes]
                    new = shifted_ref[block, :, :, at, : old.shape[3]]
                    chosen = _chosen(launch, bits_ref, entry, new.shape)
                    merged = jnp.where(chosen, new, old.astype(jnp.float32))
                    half_ref[r * columns + k, :, :, :, lanes] = merged.astype(half_ref.dtype)


def _chosen(launch: Launch, bits_ref, entry, shape) -> Array:
    """bool [2, heads, C, D]: the rows of a page that are written."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    word = jnp.full(shape, bits_ref[entry * launch.words])
    for w in range(1, launch.words):
        word = jnp.where(row >= w * BITS, bits_ref[entry * launch.words + w], word)
    return jnp.bitwise_and(jax.lax.shift_right_logical(word, jnp.bitwise_and(row, BITS - 1)), 1) == 1


def write_rows(pool: Array, kv: Array, locations: Array, interpret: Any = False) -> Array:
    """`pool` [P, 2, G, C, D] with kv [S, B, 2, G, D] written in place at `locations` int32 [S, B] (page · C + offset).

    Rows of a request are at consecutive positions, and no two requests write to the same page; what names page 0 is
    not written.
    """
    s, b, _, g, d = kv.shape
    size = pool.shape[3]
    tiles = write_tiles(s, b, g, d, size, pool.dtype.itemsize)
    steps = s // tiles.requests * (g // tiles.heads) // tiles.lanes
    launch = Launch(tiles, b, g, size, d, steps)
    check(pool, s * (1 + tiles.columns * (1 + launch.words)), interpret)
    rows = jnp.moveaxis(kv, 1, 3).astype(pool.dtype)

    def rows_at(lane, step, *_):
        first, group = launch.place(lane * launch.steps + step)
        return jax.lax.div(first, jnp.int32(tiles.requests)), 0, group, 0, 0

    buffers = [
        pltpu.VMEM((-(-d // LANES), 2, tiles.heads, tiles.columns * size, min(d, LANES)), jnp.float32),
        pltpu.VMEM((2, tiles.requests * tiles.columns, 2, tiles.heads, size, d), pool.dtype),
    ]
    blocks = [(tiles.requests, 2, tiles.heads, b, d)]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(tiles.lanes, steps),
        in_specs=[
            pl.BlockSpec((tiles.requests, 2, tiles.heads, b, d), rows_at),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[*buffers, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))],
    )
    moved = 2 * s * tiles.columns * (pool.nbytes // pool.shape[0]) + rows.nbytes
    return pl.pallas_call(
        functools.partial(_step, launch=launch),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(buffers, blocks, pool.dtype),
        ),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name="paged_write",
    )(*plan(locations, tiles.columns, size), rows, in_hbm(pool, interpret))
