"""verify_attention for CUDA."""

from __future__ import annotations

from jax import Array

from ..call import cache_write, can_write_projected, paged_attention, projected_attention


def verify_attention(
    pool: Array,
    qkv: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    locations: Array,
    page_table: Array,
    lengths: Array,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[Array, Array]:
    """As the composed op: one kernel for the rows of a block, two for so many rows that it would repeat itself."""
    written = pool, qkv, q_norm, k_norm, eps, cos, sin, locations
    if can_write_projected(pool, qkv, page_table, window):
        return projected_attention(*written, page_table, lengths, causal=causal, window=window)
    q, kv, pool = cache_write(*written)
    return paged_attention(q, kv, pool, page_table, lengths, causal=causal, window=window), pool
