"""Ids, positions and cache locations of a block (DESIGN 3.4, step 1)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def token_locations(page_table: Array, positions: Array, valid: Array, page_size: int) -> Array:
    """Where the KV of each row goes: page · page_size + offset, int32 [S, B].

    page_table int32 [S, W], positions int32 [S, B], valid bool [S, B].  Rows that are not valid, or whose
    position lies past the end of the table, go to page 0, the padding page.
    """
    index = positions // page_size
    width = page_table.shape[1]
    page = jnp.take_along_axis(page_table, jnp.clip(index, 0, width - 1), axis=1)
    page = jnp.where(valid & (index < width), page, 0)
    return page * page_size + positions % page_size


def prepare_block(
    bonus: Array, seq_len: Array, live: Array, page_table: Array, *, block: int, mask_id: int, page_size: int
) -> tuple[Array, Array, Array]:
    """(ids, positions, locations), each int32 [S, B], of the block that starts at position seq_len.

    bonus, seq_len int32 [S]; live bool [S]; page_table int32 [S, W].  ids are [bonus, MASK × (B−1)].
    """
    rows = jnp.arange(block, dtype=jnp.int32)[None]
    ids = jnp.where(rows == 0, bonus[:, None], jnp.int32(mask_id))
    positions = seq_len[:, None] + rows
    valid = jnp.broadcast_to(live[:, None], positions.shape)
    return ids, positions, token_locations(page_table, positions, valid, page_size)
