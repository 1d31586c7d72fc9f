"""How work is cut: sizes of tiles and shares by shape, for chips of compute capability 9.0 (measured) and others.

Plain numbers, no triton: tests read them without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = 264  # to keep 132 multiprocessors busy, two programs on each


@dataclass(frozen=True)
class Tiles:
    """rows: rows · query heads of a program; tokens, own_tokens: keys of a step over pages and over the block; shares:
    programs that divide a request's committed tokens."""

    rows: int
    tokens: int
    own_tokens: int
    shares: int
    warps: int
    stages: int


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least n and `least`."""
    size = least
    while size < n:
        size *= 2
    return size


def attention_tiles(requests: int, rows: int, kv_heads: int, group: int, width: int, float32: bool) -> Tiles:
    """For `rows` rows of `group` query heads on each of `kv_heads`, over tables of `width` committed tokens at most."""
    lanes = min(power_of_two(rows * group), 32 if float32 else 64)
    tiles = -(-rows * group // lanes)
    tokens = 32 if float32 else 64
    wanted = PROGRAMS // (requests * kv_heads * tiles)
    shares = max(1, min(wanted, -(-width // (2 * tokens)), 32))
    return Tiles(lanes, tokens, 16 if rows <= 16 else tokens, shares, warps=4, stages=2 if float32 else 3)


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
