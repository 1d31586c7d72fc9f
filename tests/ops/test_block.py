"""prepare_block and token_locations: every location is the row's own, or on the padding page."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import token_locations
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.shapes import TINY, Shape
from ops.dense import Pages


def int32(*values) -> Any:
    return np.asarray(values, np.int32)


def test_a_block_by_hand(kernels: Kernels):
    """Two requests, pages of 4: one in the middle of its table, one that crosses the end of it; one not live."""
    table = int32([5, 2, 7], [1, 3, 6], [8, 9, 4])
    ids, positions, locations = kernels.prepare_block(
        int32(10, 20, 30), int32(6, 10, 2), np.array([True, True, False]), table, block=4, mask_id=99, page_size=4
    )
    np.testing.assert_array_equal(ids, [[10, 99, 99, 99], [20, 99, 99, 99], [30, 99, 99, 99]])
    np.testing.assert_array_equal(positions, [[6, 7, 8, 9], [10, 11, 12, 13], [2, 3, 4, 5]])
    # 6, 7 in page 2; 8, 9 in page 7.  10, 11 in page 6; 12, 13 are past the table: page 0.  Not live: page 0.
    np.testing.assert_array_equal(locations, [[10, 11, 28, 29], [26, 27, 0, 1], [2, 3, 0, 1]])
    assert {x.dtype for x in (ids, positions, locations)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_a_block_of_each_shape(kernels: Kernels, shape: Shape):
    rng = np.random.default_rng(0)
    pages = Pages.deal(rng, shape.requests, shape.pages_per_slot, shape.page_size)
    lengths, live = int32(*shape.lengths()), rng.random(shape.requests) < 0.7
    bonus = int32(*rng.integers(0, shape.model.vocab, shape.requests))
    ids, positions, locations = kernels.prepare_block(
        bonus, lengths, live, pages.table, block=shape.rows, mask_id=3, page_size=shape.page_size
    )
    ids, positions, locations = map(np.asarray, (ids, positions, locations))
    np.testing.assert_array_equal(ids[:, 0], bonus)
    assert (ids[:, 1:] == 3).all()
    for s in range(shape.requests):
        for i in range(shape.rows):
            assert positions[s, i] == lengths[s] + i
            if live[s]:
                assert locations[s, i] == pages.location(s, positions[s, i])
            else:
                assert locations[s, i] < shape.page_size


def test_entries_of_a_table_that_no_row_needs_do_not_matter(kernels: Kernels):
    """Poison in all of the table but the pages of the block's own rows, and in all of a table that is not live."""
    rng = np.random.default_rng(0)
    starts, size, block, poison = int32(0, 3, 7, 15, 16), 4, 6, 0x7BAD0BAD
    table = np.full((5, 5), poison, np.int32)
    owned = 1 + rng.permutation(25).reshape(5, 5)
    expected = np.zeros((5, block), np.int32)
    for s, start in enumerate(starts):
        for i, position in enumerate(range(start, start + block)):
            page = 0
            if s != 1 and position // size < 5:
                page = table[s, position // size] = owned[s, position // size]
            expected[s, i] = page * size + position % size
    live = np.arange(5) != 1
    found = kernels.prepare_block(int32(1, 2, 3, 4, 5), starts, live, table, block=block, mask_id=0, page_size=size)
    np.testing.assert_array_equal(found[2], expected)


@pytest.mark.parametrize("start", range(0, 14))
def test_rows_past_the_table_or_not_valid_go_to_the_padding_page(start: int):
    """CASE 20: a table of 3 pages of 4 tokens; the last page never takes a row that is past it."""
    table, size = int32([7, 2, 5]), 4
    positions = int32(start + np.arange(6))
    valid: Any = np.array([[True, True, True, True, False, True]])
    found = np.asarray(token_locations(table, positions, valid, size))[0]
    for i, position in enumerate(positions[0]):
        inside = valid[0, i] and position < 12
        assert found[i] // size == (table[0, position // size] if inside else 0)
        assert found[i] % size == position % size


def test_a_page_that_is_not_reserved_is_the_padding_page():
    """Tables are filled with page 0 behind what a request owns."""
    found = token_locations(int32([3, 0, 0]), int32([3, 4, 8]), jnp.ones((1, 3), bool), 4)
    np.testing.assert_array_equal(found, [[15, 0, 0]])
