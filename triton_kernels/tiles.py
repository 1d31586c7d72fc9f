"""How work is cut: sizes of tiles and shares by shape.

Rules of thumb serve any chip; `tuned.json` says what a chip did better with, as
`python -m dflash_jax.benchmark tune` measured it.  Plain numbers, no triton: tests read them without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax

MULTIPROCESSORS = 132  # of an H200
PROGRAMS = 2 * MULTIPROCESSORS  # to keep them busy
MOST_SHARES = 32
FEW_ROWS = 16  # of a product that is as fast as its weight is read
MORE_ROWS = {"9.0": 128}  # the same by compute capability, where more were measured; their tiles take up to 192 KB
ASKED_EARLY = 4 << 20  # bytes, at most, of a weight that is asked for while a norm is computed
MANY = 8 * MULTIPROCESSORS  # programs of a warp that it takes longer to start than to run
WIDE = 2048  # columns of a weight that fill a chip without being cut small
TUNED = Path(__file__).with_name("tuned.json")
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Tiles:
    """rows: rows · query heads of a program; tokens, own_tokens: keys of a step over pages and over the block; shares:
    programs that divide a request's committed tokens; parts: those, and one more where the block has one of its own;
    ahead: committed tokens of each that are asked for at once, before anything else is done."""

    rows: int
    tokens: int
    own_tokens: int
    shares: int
    parts: int
    ahead: int
    warps: int
    stages: int


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least n and `least`."""
    size = least
    while size < n:
        size *= 2
    return size


class Load(NamedTuple):
    """What a launch of attention has to do: requests · key/value heads, rows · query heads of each, head_dim D, and the
    committed tokens that a request has room for (how many it has is not known when kernels are compiled)."""

    streams: int
    lanes: int
    head_dim: int
    float32: bool
    width: int

    @classmethod
    def of(
        cls, requests: int, rows: int, kv_heads: int, group: int, head_dim: int, width: int, float32: bool
    ) -> Load:
        """Of `rows` rows of `group` query heads on each of `kv_heads`, over tables of `width` committed tokens."""
        return cls(requests * kv_heads, rows * group, head_dim, float32, width)


class Cut(NamedTuple):
    """A way to do it: as in `Tiles`, but for `programs`, how many of them the shares should make in all."""

    lanes: int
    tokens: int
    warps: int
    stages: int
    programs: int
    ahead: int = 0


def attention_tiles(
    requests: int, rows: int, kv_heads: int, group: int, head_dim: int, width: int, float32: bool
) -> Tiles:
    """For `rows` rows of `group` query heads on each of `kv_heads`, over tables of `width` committed tokens at most."""
    load = Load.of(requests, rows, kv_heads, group, head_dim, width, float32)
    cut = _forced(Cut) or tuned(load, _chip()) or rule_of_thumb(load)
    wanted = cut.programs // (load.streams * -(-load.lanes // cut.lanes))
    shares = max(1, min(wanted, -(-width // (2 * cut.tokens)), MOST_SHARES))
    parts = shares + (1 < shares < wanted)
    own_tokens = 16 if rows <= 16 else cut.tokens
    return Tiles(cut.lanes, cut.tokens, own_tokens, shares, parts, cut.ahead, cut.warps, cut.stages)


def rule_of_thumb(load: Load) -> Cut:
    if load.float32:
        return Cut(min(power_of_two(load.lanes), 32), 32, warps=4, stages=2, programs=PROGRAMS)
    tokens = 64 if load.head_dim <= 128 else 32  # an A100 has not the memory for three steps of 64 that wide
    return Cut(min(power_of_two(load.lanes), 64), tokens, warps=4, stages=3, programs=PROGRAMS)


def tuned(load: Load, chip: str | None) -> Cut | None:
    """What was best on `chip` (a compute capability) for such rows at the nearest number of streams, and of those for
    pages of the nearest width; None: unknown."""
    alike = {
        one: cut for of, one, cut in _table()
        if of == chip and one._replace(streams=load.streams, width=load.width) == load
    }  # fmt: skip
    if not alike:
        return None

    def distance(one: Load) -> tuple[float, float]:
        return abs(math.log2(one.streams / load.streams)), abs(math.log2(one.width / load.width))

    return alike[min(alike, key=distance)]


def rows_to_combine(streams: int, lanes: int) -> int:
    """Rows of queries of a program of `combine`: one, or as few as keep the programs from becoming MANY."""
    rows = 1
    while rows < 8 and streams * lanes >= MANY * rows:
        rows *= 2
    return rows


def programs_that_ask(weight_bytes: int) -> int:
    """How many programs of a norm's kernel ask for the weight after it: one a multiprocessor, or none for a large one.

    Qwen3-8B's (200 MB) only take the memory's time from others; SmolLM2's make its round 4 % shorter.
    """
    return MULTIPROCESSORS if weight_bytes <= ASKED_EARLY else 0


@contextlib.contextmanager
def forced(cut: Cut | ProductCut) -> Iterator[None]:
    """Every launch of its kind traced within is cut so: to try it."""
    token = _FORCED.set(cut)
    try:
        yield
    finally:
        _FORCED.reset(token)


_FORCED: ContextVar[Cut | ProductCut | None] = ContextVar("cut", default=None)


def _forced(kind: type[Kind]) -> Kind | None:
    cut = _FORCED.get()
    return cut if isinstance(cut, kind) else None


@functools.cache
def _table() -> list[tuple[str, Load, Cut]]:
    if not TUNED.is_file():
        return []
    rows = json.loads(TUNED.read_text(encoding="utf-8"))
    return [(row["chip"], Load(**row["load"]), Cut(**row["cut"])) for row in rows]


def _chip() -> str | None:
    """The compute capability of the device; None where there is no CUDA."""
    return getattr(jax.devices()[0], "compute_capability", None)


def row_warps(lanes: int) -> int:
    """For a program that holds a row of `lanes` numbers: eight of them a thread, 16 bytes of bfloat16."""
    return max(1, min(lanes // (8 * 32), 16))


@dataclass(frozen=True)
class HeadTiles:
    """rows, vocab: of a program's tile of logits; width: of H in a step."""

    rows: int
    vocab: int
    width: int
    warps: int
    stages: int


def head_tiles(rows: int, float32: bool) -> HeadTiles:
    """For the largest of `rows` rows of logits: two programs a multiprocessor where reading the head is all."""
    if float32:
        return HeadTiles(min(power_of_two(rows), 32), 64, 32, warps=4, stages=3)
    if rows <= 64:
        return HeadTiles(power_of_two(rows), 128, 64, warps=4, stages=4)
    return HeadTiles(128, 128, 64, warps=8, stages=4)


class ProductCut(NamedTuple):
    """How a product of few rows with a weight [K, N] is cut.

    columns, depth: of the weight in a step; shares: programs that divide K; left: the weight is the left operand, whose
    tiles are 64 columns or more on a Hopper (the rows then need no filling up to 64).
    """

    columns: int
    depth: int
    shares: int
    warps: int
    stages: int
    left: bool


MORE_ROWS_CUT = ProductCut(64, 128, 1, warps=4, stages=4, left=True)


def product_cut(rows: int, k: int, n: int, itemsize: int) -> ProductCut | None:
    """For the product of y [rows, k] and w [k, n], in shares; None: XLA's product serves.

    A row's sums do not depend on how many others there are, within FEW_ROWS and within MORE_ROWS.
    """
    if cut := _forced(ProductCut):
        return cut
    wide = n >= WIDE
    if wide and _more_rows(rows, itemsize):
        return MORE_ROWS_CUT._replace(shares=min(2, -(-k // MORE_ROWS_CUT.depth)))
    if not _few_rows(rows, itemsize):
        return None
    columns, depth, most = (64, 64, 4) if wide else (32, 128, 6)
    shares = max(1, min(PROGRAMS // -(-n // columns), most, -(-k // depth)))
    return ProductCut(columns, depth, shares, warps=4, stages=5 if wide else 3, left=wide)


def whole_cut(rows: int, k: int, n: int, itemsize: int) -> ProductCut | None:
    """The same in one share.  XLA's is as fast for few rows of a wide weight."""
    if cut := _forced(ProductCut):
        return cut._replace(shares=1)
    wide = n >= WIDE
    if wide and _more_rows(rows, itemsize):
        return MORE_ROWS_CUT
    if wide or not _few_rows(rows, itemsize):
        return None
    return ProductCut(16, 64, 1, warps=4, stages=5, left=False)


def _few_rows(rows: int, itemsize: int) -> bool:
    return itemsize == 2 and rows <= FEW_ROWS


def _more_rows(rows: int, itemsize: int) -> bool:
    """Whether there are more, but no more than were measured on this chip."""
    return itemsize == 2 and FEW_ROWS < rows <= MORE_ROWS.get(_chip() or "", FEW_ROWS)


def gated_cut(rows: int, k: int, n: int, itemsize: int) -> ProductCut | None:
    """The same for w [k, 2, n]: two weights at once, and no shares, since what follows is not linear."""
    if cut := _forced(ProductCut):
        return cut
    wide = n >= 64 * 128
    if wide and _more_rows(rows, itemsize):
        return ProductCut(128, 64, 1, warps=8, stages=4, left=True)
    if not _few_rows(rows, itemsize):
        return None
    if wide:
        return ProductCut(64, 32, 1, warps=4, stages=6, left=True)
    return ProductCut(16, 64, 1, warps=2, stages=5, left=False)
