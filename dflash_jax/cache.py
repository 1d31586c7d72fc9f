"""Paged key/value pools: one array [P, 2, G, C, D] a layer, target and draft under one page table.

Page 0 is padding: rows that must not write anything write there.  A row's location is page · C + offset.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dflash_jax import axes
from dflash_jax.config import AttentionShape
from dflash_jax.sharding import sharding

Pool = tuple[jax.Array, ...]
POOL_AXES = (None, None, axes.KV_HEADS, None, axes.HEAD_DIM)


def pool_shape(config: AttentionShape, num_pages: int, page_size: int) -> tuple[int, ...]:
    return (num_pages, 2, config.num_kv_heads, page_size, config.head_dim)


def page_bytes(config: AttentionShape, page_size: int, dtype: Any) -> int:
    """Bytes of one page over all layers."""
    per_layer = 2 * config.num_kv_heads * page_size * config.head_dim
    return config.num_layers * per_layer * jnp.dtype(dtype).itemsize


def make_pool(config: AttentionShape, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> Pool:
    """A zeroed pool of all layers, each array made in place on its devices."""
    shape = pool_shape(config, num_pages, page_size)
    where = sharding(mesh, POOL_AXES, shape)
    return tuple(jnp.zeros(shape, dtype, device=where) for _ in range(config.num_layers))
