"""How work is cut to fit VMEM.  Plain numbers, no Pallas: tests read them without a TPU."""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128  # of a vector register: float32 registers are 8 × 128
CHUNK_BYTES = 2 << 20  # of pages in one half of the double buffer: at 1.6 TB/s more than the latency of a copy
OWN_BYTES = 4 << 20  # of a request's own keys and values
WRITE_BYTES = 2 << 20  # of pages that are written together
HEAD_BYTES = 4 << 20  # of the head in one step, and of the rows that it is multiplied by
HEAD_ROWS = 512  # rows of logits in a tile: more of them make the head's product limited by arithmetic
TILE_ROWS = 1024  # query rows × heads of one key/value head in a tile


@dataclass(frozen=True)
class Tiles:
    """One step's work: a tile of rows of a request, for some of its key/value heads.

    heads: key/value heads; rows: query rows · R; row_tiles: tiles of a request; pages: pages of a chunk;
    own: rows of the block itself that are taken together; lanes: independent sequences of steps (cores).
    """

    heads: int
    rows: int
    row_tiles: int
    pages: int
    own: int
    lanes: int


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def sublanes(item_bytes: int) -> int:
    """Rows of one tile in VMEM: narrow types are packed."""
    return 8 * max(1, 4 // item_bytes)


def attention_tiles(
    requests: int, rows: int, kv_heads: int, group: int, head_dim: int, width: int, page_size: int, item_bytes: int
) -> Tiles:
    """For `rows` rows of `group` query heads on each of `kv_heads`, over tables of `width` pages of `page_size`."""
    packed = sublanes(item_bytes)
    dim = round_up(head_dim, LANES)
    tile = min(rows, round_up(max(packed, TILE_ROWS // group), packed))
    row_tiles = -(-rows // tile)
    own = round_up(rows, packed) if rows <= LANES else LANES
    own_row_bytes = 2 * dim * item_bytes * round_up(rows, own)
    heads = _largest_divisor(kv_heads, OWN_BYTES // own_row_bytes)
    if requests * row_tiles == 1 and heads > 1:
        heads = _largest_divisor(kv_heads, kv_heads // 2)  # something for the second core of chips that have two
    steps = requests * (kv_heads // heads) * row_tiles
    pages = _chunk_pages(width, page_size, 2 * heads * dim * item_bytes)
    return Tiles(heads, round_up(tile * group, packed), row_tiles, pages, own, 2 if steps % 2 == 0 else 1)


def _largest_divisor(n: int, limit: int) -> int:
    return max(divisor for divisor in range(1, n + 1) if n % divisor == 0 and divisor <= max(limit, 1))


def _chunk_pages(width: int, page_size: int, token_bytes: int) -> int:
    """Pages of a chunk: as many as the buffer holds, whole registers of tokens, no more than there are."""
    tokens = max(LANES, min(CHUNK_BYTES // token_bytes, 1024) // LANES * LANES)
    tokens = min(tokens, round_up(width * page_size, LANES))
    return max(1, tokens // page_size)


@dataclass(frozen=True)
class WriteTiles:
    """One step's work of a paged write: all rows of `requests` requests, for `heads` key/value heads.

    columns: pages that a request's rows may touch; lanes: independent sequences of steps (cores).
    """

    requests: int
    heads: int
    columns: int
    lanes: int


def write_tiles(requests: int, rows: int, kv_heads: int, head_dim: int, page_size: int, item_bytes: int) -> WriteTiles:
    """For `rows` consecutive rows of each request, into pages of `page_size` rows of `kv_heads` keys and values."""
    columns = (rows + page_size - 2) // page_size + 1
    head_bytes = 2 * columns * page_size * round_up(head_dim, LANES) * item_bytes
    heads = _largest_divisor(kv_heads, WRITE_BYTES // head_bytes)
    together = _largest_divisor(requests, WRITE_BYTES // (head_bytes * heads))
    steps = requests // together * (kv_heads // heads)
    return WriteTiles(together, heads, columns, 2 if steps % 2 == 0 else 1)


@dataclass(frozen=True)
class HeadTiles:
    """One step's work: `vocab` tokens for `rows` rows.

    steps: of each lane and tile of rows; lanes: independent sequences of steps (cores).
    """

    rows: int
    row_tiles: int
    vocab: int
    steps: int
    lanes: int


def head_tiles(rows: int, vocab: int, width: int, item_bytes: int) -> HeadTiles:
    """For the largest of `rows` rows of logits over a head [vocab, width]."""
    fit = max(HEAD_BYTES // (round_up(width, LANES) * item_bytes) // LANES, 1) * LANES
    tile = min(round_up(rows, sublanes(item_bytes)), HEAD_ROWS, fit)
    tokens = min(fit, 1024, round_up(vocab, LANES))
    count = -(-vocab // tokens)
    lanes = 2 if count > 1 else 1
    return HeadTiles(tile, -(-rows // tile), tokens, -(-count // lanes), lanes)
