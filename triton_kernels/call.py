"""Calling triton kernels from JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from .attention import attend, attend_projected, combine
from .heads import best_of_tiles, first_best
from .largest import group_maxima, largest_of_groups
from .launch import launch
from .norms import add_norm_row, add_shares_norm
from .products import gated_tile, share_of_product
from .rounds import accept_block, place_block
from .tiles import (
    ProductCut,
    Tiles,
    attention_tiles,
    gated_cut,
    head_tiles,
    power_of_two,
    product_cut,
    programs_that_ask,
    row_warps,
    rows_to_combine,
    whole_cut,
)
from .writing import inject_write, norm_rope_write

GROUP, SORTED_GROUP = 64, 32  # neighbouring tokens: where a warp looks through the groups, and where XLA sorts them
TOKENS_OF_A_PROGRAM = 1024  # that one program finds its groups' largest of
LANES_OF_A_WARP = 2048  # numbers that a warp of `combine` holds: more would not fit its registers
MOST_ONE_BY_ONE = 16  # of a row's candidates that a warp finds in turn: 64 of 8 rows take it 196 µs on an H200
MOST_TILES = 4  # of a request's rows: each norms and turns the block's keys anew


def paged_attention(
    q: Array, kv: Array, pool: Array, page_table: Array, lengths: Array, *, causal: bool, window: int | None = None
) -> Array:
    """As the reference op: B query rows per request over `lengths` committed tokens and the block itself.

    q [S, B, N, D]; kv [S, B, 2, G, D]; pool [P, 2, G, C, D]; page_table int32 [S, W]; lengths int32 [S]; [S, B, N, D].
    """
    s, b, n, d = q.shape
    call = _Attention.of(pool, page_table, (s, b, n, d), q.dtype, causal, window)
    out, part, stats = call.launch(attend, q, kv, pool, page_table, lengths, out=call.outputs)
    return call.combined(out, part, stats)


def projected_attention(
    pool: Array,
    qkv: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    locations: Array | None,
    page_table: Array,
    lengths: Array,
    *,
    causal: bool,
    window: int | None,
) -> tuple[Array, Array]:
    """`cache_write` and `paged_attention` in one: [S, B, N, D] of qkv [S, B, G, R + 2, D], and the pool in place.

    locations None: the pool is only read.
    """
    call = _Attention.of_projection(pool, page_table, qkv, causal, window)
    norms = (qkv, qkv) if q_norm is None or k_norm is None else (q_norm, k_norm)  # a pointer must be given
    write = locations is not None
    written = ShapeDtypeStruct(pool.shape if write else (1,), pool.dtype)
    out, part, stats, new = call.launch(
        attend_projected, qkv, *norms, cos, sin, locations if write else lengths, pool, page_table, lengths,
        out=(*call.outputs, written), input_output_aliases={6: 3} if write else {},
        eps=eps, NORM=q_norm is not None, WRITE=write,
    )  # fmt: skip
    return call.combined(out, part, stats), new if write else pool


def can_write_projected(pool: Array, qkv: Array, page_table: Array, window: int | None) -> bool:
    """Can `projected_attention` write these rows, and is it worth it?  One tile of them must see all of the block."""
    tiles = _Attention.of_projection(pool, page_table, qkv, True, window).row_tiles
    return tiles == 1 or (tiles <= MOST_TILES and window is None)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """How attention of q [S, B, N, D] is cut and launched."""

    shape: tuple[int, ...]
    dtype: Any
    tiles: Tiles
    kv_heads: int
    constants: dict[str, Any]

    @classmethod
    def of(
        cls, pool: Array, page_table: Array, shape: tuple[int, ...], dtype: Any, causal: bool, window: int | None
    ) -> _Attention:
        s, b, n, d = shape
        g, size, width, exact = pool.shape[2], pool.shape[3], page_table.shape[1], dtype == jnp.float32
        tiles = attention_tiles(s, b, g, n // g, d, width * size, exact)
        constants = {
            "scale": d**-0.5 / math.log(2), "B": b, "W": width, "G": g, "R": n // g, "C": size, "D": d,
            "BD": power_of_two(d), "M": tiles.rows, "T": tiles.tokens, "BT": tiles.own_tokens,
            "SHARES": tiles.shares, "AHEAD": tiles.ahead, "CAUSAL": causal, "WINDOW": window or 0, "IEEE": exact,
        }  # fmt: skip
        return cls(shape, dtype, tiles, g, constants)

    @classmethod
    def of_projection(cls, pool: Array, page_table: Array, qkv: Array, causal: bool, window: int | None) -> _Attention:
        s, b, g, r2, d = qkv.shape
        return cls.of(pool, page_table, (s, b, g * (r2 - 2), d), qkv.dtype, causal, window)

    @property
    def row_tiles(self) -> int:
        return -(-self.shape[1] * self.constants["R"] // self.tiles.rows)

    @property
    def outputs(self) -> Any:
        """out, and parts and stats where there are several shares."""
        d, tiles = self.shape[3], self.tiles
        parts = (self.shape[0] * self.kv_heads, self.row_tiles, tiles.parts)
        part, stats = ((*parts, tiles.rows, d), (*parts, 2, tiles.rows)) if tiles.shares > 1 else ((1,), (1,))
        return (
            ShapeDtypeStruct(self.shape, self.dtype), ShapeDtypeStruct(part, self.dtype),
            ShapeDtypeStruct(stats, jnp.float32),
        )  # fmt: skip

    def launch(self, kernel: Any, *arrays: Array, out: Any, **options: Any) -> Any:
        grid = (self.shape[0] * self.kv_heads, self.row_tiles, self.tiles.parts)
        return launch(
            kernel, *arrays, out=out, grid=grid, num_warps=self.tiles.warps, num_stages=self.tiles.stages,
            **self.constants, **options,
        )  # fmt: skip

    def combined(self, out: Array, part: Array, stats: Array) -> Array:
        if self.tiles.shares == 1:
            return out
        c, padded = self.constants, power_of_two(self.tiles.parts, 2)
        streams, lanes = self.shape[0] * self.kv_heads, c["B"] * c["R"]
        rows = rows_to_combine(streams, lanes)
        return launch(
            combine, part, stats, out=self.outputs[0], grid=(streams, -(-lanes // rows)),
            num_warps=max(1, padded * rows * c["BD"] // LANES_OF_A_WARP), PARTS=self.tiles.parts, PP=padded, ROWS=rows,
            **{name: c[name] for name in ("B", "G", "R", "D", "BD", "M")},
        )  # fmt: skip


def cache_write(
    pool: Array,
    qkv: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    locations: Array,
) -> tuple[Array, Array, Array]:
    """As the reference op, in place: (q [S, B, N, D], kv [S, B, 2, G, D], pool) of qkv [S, B, G, R + 2, D]."""
    s, b, g, r2, d = qkv.shape
    r = r2 - 2
    out: Any = (
        ShapeDtypeStruct((s, b, g * r, d), qkv.dtype),
        ShapeDtypeStruct((s, b, 2, g, d), qkv.dtype),
        ShapeDtypeStruct(pool.shape, pool.dtype),
    )
    norms = (qkv, qkv) if q_norm is None or k_norm is None else (q_norm, k_norm)  # a pointer must be given
    return launch(
        norm_rope_write, pool, qkv, *norms, cos, sin, locations, out=out, grid=(s * b, g), num_warps=1,
        input_output_aliases={0: 2}, eps=eps, G=g, R=r, RP=power_of_two(r2, 2), C=pool.shape[3], D=d,
        BH=power_of_two(d // 2), NORM=q_norm is not None,
    )  # fmt: skip


def inject(
    pool: Array, y: Array, layer: int, k_norms: Array, eps: float, cos: Array, sin: Array, locations: Array
) -> Array:
    """The pool [P, 2, G, C, D] with layer `layer` of y [S, T, L, 2, G, D] written in place, keys normed and rotated."""
    s, t, layers, _, g, d = y.shape
    return launch(
        inject_write, pool, y, k_norms, cos, sin, locations, out=ShapeDtypeStruct(pool.shape, pool.dtype),
        grid=(s * t, g), num_warps=1, input_output_aliases={0: 0}, eps=eps, layer=layer, L=layers, G=g,
        C=pool.shape[3], D=d, BH=power_of_two(d // 2),
    )  # fmt: skip


def add_norm(x: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """As the reference op: x + delta and its norm, each [..., H]."""
    shape, lanes = ShapeDtypeStruct(x.shape, x.dtype), power_of_two(x.shape[-1])
    return launch(
        add_norm_row, x, delta, weight, out=(shape, shape), grid=(math.prod(x.shape[:-1]),),
        num_warps=row_warps(lanes), eps=eps, H=x.shape[-1], BH=lanes,
    )  # fmt: skip


def project_add_norm(
    x: Array, y: Array, w: Array, norm: Array, eps: float, ahead: Array | None = None
) -> tuple[Array, Array]:
    """As the reference op: x + y·w and its norm, each [..., H], of y [..., K] and w [K, H].

    With few rows the product stays in shares [shares, rows, H], which the norm's kernel adds up.  While it does, a
    small weight `ahead` is asked for.
    """
    (k, h), rows = w.shape, math.prod(x.shape[:-1])
    cut = product_cut(rows, k, h, x.dtype.itemsize)
    if cut is None:
        return add_norm(x, _product(y, w), norm, eps)
    steps = -(-k // (cut.depth * cut.shares))
    shares = -(-k // (cut.depth * steps))  # none without work
    part = _streamed(
        share_of_product, y, w, cut, ShapeDtypeStruct((shares, rows, h), jnp.float32), (-(-h // cut.columns), shares),
        N=h, STEPS=steps,
    )  # fmt: skip
    shape, lanes = ShapeDtypeStruct(x.shape, x.dtype), power_of_two(h)
    asking = 0 if ahead is None else programs_that_ask(ahead.nbytes)
    early = ahead if ahead is not None and asking else norm  # a pointer must be given
    return launch(
        add_shares_norm, x, part, norm, early, out=(shape, shape), grid=(rows + asking,), num_warps=row_warps(lanes),
        eps=eps, SHARES=shares, H=h, BH=lanes, ASKING=asking, AHEAD=early.size, LANES=32 * row_warps(lanes),
    )  # fmt: skip


def project(y: Array, w: Array) -> Array:
    """As the reference op: y·w, [..., N…] of y [..., K] and w [K, N…]."""
    k, n = w.shape[0], math.prod(w.shape[1:])
    cut = whole_cut(math.prod(y.shape[:-1]), k, n, y.dtype.itemsize)
    if cut is None:
        return _product(y, w)
    out = ShapeDtypeStruct((*y.shape[:-1], *w.shape[1:]), y.dtype)
    grid, steps = (-(-n // cut.columns), 1), -(-k // cut.depth)
    return _streamed(share_of_product, y, w, cut, out, grid, N=n, STEPS=steps)


def gated_product(y: Array, gate_up: Array) -> Array:
    """As the reference op: silu(gate·y) ⊙ (up·y), [..., F] of y [..., K] and gate_up [K, 2, F]."""
    k, _, f = gate_up.shape
    cut = gated_cut(math.prod(y.shape[:-1]), k, f, y.dtype.itemsize)
    if cut is None:
        both = _product(y, gate_up)
        return jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
    out = ShapeDtypeStruct((*y.shape[:-1], f), y.dtype)
    return _streamed(gated_tile, y, gate_up, cut, out, (-(-f // cut.columns),), N=f)


def _product(y: Array, w: Array) -> Array:
    """y [..., K] · w [K, ...] by XLA, as the reference takes it."""
    precision = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    dims = (((y.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(y, w, dims, precision=precision, preferred_element_type=y.dtype)


def _streamed(
    kernel: Any, y: Array, w: Array, cut: ProductCut, out: ShapeDtypeStruct, grid: tuple[int, ...], **sizes: int
) -> Array:
    """A kernel of `products.py`."""
    rows, k = math.prod(y.shape[:-1]), y.shape[-1]
    return launch(
        kernel, y, w, out=out, grid=grid, num_warps=cut.warps, num_stages=cut.stages, ROWS=rows, K=k,
        M=power_of_two(rows), BN=cut.columns, BK=cut.depth, LEFT=cut.left, **sizes,
    )  # fmt: skip


def prepare_block(
    bonus: Array, seq_len: Array, live: Array, page_table: Array, *, block: int, mask_id: int, page_size: int
) -> tuple[Array, Array, Array]:
    """As the reference op: (ids, positions, locations), each int32 [S, B]."""
    s, width = page_table.shape
    shape = ShapeDtypeStruct((s, block), jnp.int32)
    return launch(
        place_block, bonus, seq_len, live, page_table, out=(shape,) * 3, grid=(s,), num_warps=1,
        MASK=mask_id, B=block, BP=power_of_two(block), W=width, C=page_size,
    )  # fmt: skip


def accept_bonus(
    block_ids: Array,
    target_tokens: Array,
    broken: Array,
    seq_len: Array,
    limit: Array,
    stop_ids: Array,
    live: Array,
) -> tuple[Array, Array, Array, Array]:
    """As the reference op: (commit_len, bonus, finish int32 [S], tokens int32 [S, B])."""
    (s, b), k = block_ids.shape, stop_ids.shape[1]
    one, many = ShapeDtypeStruct((s,), jnp.int32), ShapeDtypeStruct((s, b), jnp.int32)
    return launch(
        accept_block, block_ids, target_tokens, broken, seq_len, limit, stop_ids, live,
        out=(one, one, one, many), grid=(s,), num_warps=1, B=b, BP=power_of_two(b), K=k, KP=power_of_two(k),
    )  # fmt: skip


def argmax_head(hidden: Array, head: Array, multiplier: float = 1.0, softcap: float | None = None) -> Array:
    """As the reference op: int32 [...] of hidden [..., H] and head [V, H].

    A softcap keeps the order, and so is left out: only logits that it would make equal can be told apart here.
    """
    del softcap
    v, h = head.shape
    x = hidden.reshape(-1, h)
    exact = x.dtype == jnp.float32
    tiles = head_tiles(x.shape[0], exact)
    count = -(-v // tiles.vocab)
    shape = ShapeDtypeStruct((x.shape[0], count), jnp.int32)
    keys, ids = launch(
        best_of_tiles, x, head, out=(shape, shape), grid=(-(-x.shape[0] // tiles.rows), count),
        num_warps=tiles.warps, num_stages=tiles.stages, multiplier=float(multiplier), ROWS=x.shape[0], V=v, H=h,
        TILES=count, M=tiles.rows, BV=tiles.vocab, BK=tiles.width, IEEE=exact,
    )  # fmt: skip
    best = launch(
        first_best, keys, ids, out=ShapeDtypeStruct(x.shape[:1], jnp.int32), grid=x.shape[:1], num_warps=4,
        TILES=count, TP=power_of_two(count),
    )  # fmt: skip
    return best.reshape(hidden.shape[:-1])


def top_tokens(x: Array, k: int) -> tuple[Array, Array]:
    """As the reference op: the k largest of float32 x [..., V], descending, and their ids int32 [..., k]."""
    rows, v = math.prod(x.shape[:-1]), x.shape[-1]
    one_by_one = k <= MOST_ONE_BY_ONE
    size = GROUP if one_by_one else SORTED_GROUP
    flat, groups, together = x.reshape(rows, v), -(-v // size), TOKENS_OF_A_PROGRAM // size
    keys = launch(
        group_maxima, flat, out=ShapeDtypeStruct((rows, groups), jnp.int32),
        grid=(rows, -(-groups // together)), num_warps=4, T=together, V=v, GROUPS=groups, GROUP=size,
    )  # fmt: skip
    values, ids = (_largest_one_by_one if one_by_one else _largest_by_xla)(flat, keys, k)
    return values.reshape(*x.shape[:-1], k), ids.reshape(*x.shape[:-1], k)


def _largest_one_by_one(x: Array, keys: Array, k: int) -> tuple[Array, Array]:
    """As `_largest_by_xla`, by a warp for each row."""
    (rows, v), groups = x.shape, keys.shape[-1]
    return launch(
        largest_of_groups, x, keys,
        out=(ShapeDtypeStruct((rows, k), x.dtype), ShapeDtypeStruct((rows, k), jnp.int32)),
        grid=(rows,), num_warps=1, K=k, KP=power_of_two(k, 2), GP=power_of_two(groups),
        V=v, GROUPS=groups, GROUP=GROUP,
    )  # fmt: skip


def _largest_by_xla(x: Array, keys: Array, k: int) -> tuple[Array, Array]:
    """The k largest of x [rows, V] and their ids int32, out of the k groups with the largest of `keys` [rows, groups].

    Groups are taken in their order, so that of equals the first comes first.  For SmolLM2's 7 rows the two sorts
    take an H200 13 and 16 µs with groups of 32 tokens, 8 and 32 with groups of 64.
    """
    v = x.shape[-1]
    if k >= keys.shape[-1]:
        return jax.lax.top_k(x, k)
    groups = jnp.sort(jax.lax.top_k(keys, k)[1], axis=-1)
    members = jnp.arange(SORTED_GROUP, dtype=jnp.int32)[None, None]
    token = (groups[..., None] * SORTED_GROUP + members).reshape(len(x), -1)
    among = jnp.where(token < v, jnp.take_along_axis(x, jnp.minimum(token, v - 1), axis=-1), -jnp.inf)
    values, at = jax.lax.top_k(among, k)
    return values, jnp.take_along_axis(token, at, axis=-1)
