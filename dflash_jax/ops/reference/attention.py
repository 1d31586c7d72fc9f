"""Attention of a block (or a prefill chunk) over its committed pages and itself."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.ops.reference.numerics import precision

CHUNK_TOKENS = 128  # committed tokens read per step of the loop; cost follows what is committed, in these steps


class _Running(NamedTuple):
    """Softmax in progress: best score and weight sum float32 [S, G, R, B], weighted values [S, G, R, B, D]."""

    best: Array
    total: Array
    values: Array


def block_mask(block: int, causal: bool, window: int | None) -> Array:
    """bool [B, B]: may query row i see block row j?"""
    i, j = jnp.arange(block)[:, None], jnp.arange(block)[None, :]
    seen = jnp.ones((block, block), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= jnp.abs(i - j) < window
    return seen


def paged_attention(
    q: Array,
    kv: Array,
    pool: Array,
    page_table: Array,
    lengths: Array,
    *,
    causal: bool,
    window: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Array:
    """B query rows per request over `lengths` committed tokens and the block itself; [S, B, N, D].

    q [S, B, N, D]; kv [S, B, 2, G, D] of the block; pool [P, 2, G, C, D]; page_table int32 [S, W]; lengths
    int32 [S].  Block row i sits at position lengths + i.  Everything committed is visible to every row, within
    `window` if given (|query − key| < window); inside the block `causal` rows see only rows up to their own.
    Pool rows at or past `lengths` are never used, whatever they hold.  Scores and sums are float32.
    """
    s, b, n, d = q.shape
    g, size = pool.shape[2], pool.shape[3]
    grouped = q.reshape(s, b, g, n // g, d)
    state = _block_part(grouped, kv, block_mask(b, causal, window)[None, None, None])
    pages = max(1, min(chunk_tokens // size, page_table.shape[1]))
    first, last = _chunk_range(lengths, pages * size, b, window)

    def step(i: Array, state: _Running) -> _Running:
        keys, values, at = _read_chunk(pool, page_table, i, pages)
        seen = (at < lengths[:, None])[:, None, None, None, :]  # [S, 1, 1, 1, T]
        values = jnp.where((at < lengths[:, None])[:, None, :, None], values, 0)  # 0 · NaN would be NaN
        if window is not None:
            position = lengths[:, None] + jnp.arange(b)[None]
            seen &= (position[:, :, None] - at[:, None, :] < window)[:, None, None]
        return _absorb(state, grouped, keys, values, seen)

    state = jax.lax.fori_loop(first, last, step, state)
    out = state.values / state.total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(s, b, n, d).astype(q.dtype)


def _chunk_range(lengths: Array, tokens: int, block: int, window: int | None) -> tuple[Array, Array]:
    """First and past-the-last chunk that any request of the batch needs."""
    last = (jnp.max(lengths) + tokens - 1) // tokens
    if window is None:
        return jnp.int32(0), last
    # Row 0 reaches furthest back: position lengths − window + 1. Requests with nothing committed need nothing.
    oldest = jnp.where(lengths > 0, jnp.maximum(lengths - window + 1, 0), jnp.iinfo(jnp.int32).max)
    return jnp.min(oldest) // tokens, last


def _read_chunk(pool: Array, page_table: Array, i: Array, pages: int) -> tuple[Array, Array, Array]:
    """Keys and values [S, G, T, D] of chunk i, and the positions int32 [S, T] they belong to."""
    _, _, g, size, d = pool.shape
    s, width = page_table.shape
    column = i * pages + jnp.arange(pages)
    page = jnp.take(page_table, jnp.minimum(column, width - 1), axis=1)  # [S, pages]
    heads = jnp.arange(g)[None, :, None]
    keys = pool[page[:, None, :], 0, heads].reshape(s, g, pages * size, d)
    values = pool[page[:, None, :], 1, heads].reshape(s, g, pages * size, d)
    # A column past the table repeats the last page; its positions lie past every length, so it is masked.
    at = column[:, None] * size + jnp.arange(size)[None]
    return keys, values, jnp.broadcast_to(at.reshape(1, -1), (s, pages * size))


def _block_part(q: Array, kv: Array, seen: Array) -> _Running:
    """The block's own keys and values start the softmax: every row sees itself, so `best` is finite.

    A NaN in a row's key or value spoils the rows that see it, and no others: so it counts through the key, and the
    value must not reach the others as 0 · NaN.
    """
    s, b, g, r, d = q.shape
    empty = _Running(
        jnp.full((s, g, r, b), -jnp.inf, jnp.float32),
        jnp.zeros((s, g, r, b), jnp.float32),
        jnp.zeros((s, g, r, b, d), jnp.float32),
    )
    keys, values = kv[:, :, 0].swapaxes(1, 2), kv[:, :, 1].swapaxes(1, 2)
    nan = jnp.isnan(values)
    keys = jnp.where(nan.any(axis=-1, keepdims=True), jnp.nan, keys)
    return _absorb(empty, q, keys, jnp.where(nan, 0, values), seen)


def _absorb(state: _Running, q: Array, keys: Array, values: Array, seen: Array) -> _Running:
    """Fold keys and values [S, G, T, D] into the running softmax; `seen` broadcasts to [S, G, R, B, T]."""
    exact = precision(q.dtype)
    scores = jnp.einsum("sbgrd,sgtd->sgrbt", q, keys, precision=exact, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
    best = jnp.maximum(state.best, scores.max(axis=-1))
    weights = jnp.exp(scores - best[..., None])
    carry = jnp.exp(state.best - best)
    mixed = jnp.einsum(
        "sgrbt,sgtd->sgrbd", weights.astype(values.dtype), values, precision=exact, preferred_element_type=jnp.float32
    )
    return _Running(best, state.total * carry + weights.sum(axis=-1), state.values * carry[..., None] + mixed)
