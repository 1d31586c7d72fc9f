"""draft_attention for CUDA."""

from __future__ import annotations

from jax import Array

from ..call import projected_attention


def draft_attention(
    pool: Array,
    qkv: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    page_table: Array,
    lengths: Array,
    *,
    causal: bool,
    window: int | None = None,
) -> Array:
    """As the composed op, in one kernel."""
    projected = pool, qkv, q_norm, k_norm, eps, cos, sin, None
    return projected_attention(*projected, page_table, lengths, causal=causal, window=window)[0]
