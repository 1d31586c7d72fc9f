"""The page pool: states, holders, and errors that name values."""

import pytest

from dflash_jax.engine.pages import PagePool, pages_for, reserve_tokens
from dflash_jax.errors import UserError


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.integrity()
    return pool.num_free, pool.num_held, pool.num_cached


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, 16) == pages


def test_reserve_is_two_blocks_within_the_limit():
    assert reserve_tokens(100, 16, limit_tokens=1000) == 132
    assert reserve_tokens(100, 16, limit_tokens=110) == 110


def test_padding_page_is_never_handed_out():
    pool = PagePool(9)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    with pytest.raises(RuntimeError, match="1 pages wanted, 0 of 8 are free"):
        pool.allocate(1)


def test_a_page_goes_from_free_to_held_to_cached_to_free():
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    assert counts(pool) == (2, 1, 0)
    pool.share(page)
    pool.mark(page)
    assert not pool.release(page)
    assert counts(pool) == (2, 1, 0)
    assert pool.release(page)
    assert counts(pool) == (2, 0, 1)
    pool.share(page)
    assert counts(pool) == (2, 1, 0)
    pool.release(page)
    pool.unmark(page)
    assert counts(pool) == (3, 0, 0)


def test_misuse_is_refused_and_changes_nothing():
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    free = next(p for p in (1, 2, 3) if p != page)
    for wrong, message in [
        (lambda: pool.release(free), f"page {free} is released but nobody holds it"),
        (lambda: pool.share(free), f"page {free} is free"),
        (lambda: pool.mark(free), f"page {free} cannot enter the cache: 0 holders"),
        (lambda: pool.unmark(page), f"page {page} cannot leave the cache: 1 holders, unknown"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            wrong()
        assert counts(pool) == (2, 1, 0)


def test_integrity_finds_a_lost_a_doubled_and_a_stolen_page():
    lost, doubled, stolen = PagePool(6), PagePool(6), PagePool(6)
    lost._free.pop()
    with pytest.raises(RuntimeError, match=r"4 free \+ 0 held \+ 0 cached of 5"):
        lost.integrity()
    doubled._free[0] = doubled._free[1]
    with pytest.raises(RuntimeError, match="4 free"):
        doubled.integrity()
    page = stolen.allocate(1)[0]
    stolen._free[0] = page
    with pytest.raises(RuntimeError, match=rf"not free: \[{page}\]"):
        stolen.integrity()


def test_a_pool_of_padding_only_is_a_user_error():
    with pytest.raises(UserError, match="num_pages is 1"):
        PagePool(1)
