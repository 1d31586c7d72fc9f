"""The prefix cache: chains of full pages, holders, eviction order."""

import random

import pytest

from dflash_jax.engine.pages import PagePool
from dflash_jax.engine.prefix_cache import PrefixCache

PAGE = 4


def make(num_pages: int = 17, **options) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), PAGE, **options)


def serve(cache: PrefixCache, tokens: list[int], salt=None) -> tuple[list[int], list]:
    """What a request does from admission to the end of its prefill: pages of its table, chain it holds."""
    chain = cache.lookup(tokens, salt)
    cache.hold(chain)
    pages = [node.page for node in chain] + cache.allocate(-(-len(tokens) // PAGE) - len(chain))
    cache.insert(tokens, pages, chain, len(tokens), salt)
    return pages, chain


def leave(cache: PrefixCache, pages: list[int], chain: list) -> None:
    for index, page in enumerate(pages):
        if index >= len(chain) or chain[index].page != page:
            cache.pool.release(page)
    cache.drop(chain)
    check(cache)


def check(cache: PrefixCache) -> None:
    cache.pool.integrity()
    cache.integrity()


def test_full_pages_are_found_again_and_shared():
    cache = make()
    first, chain = serve(cache, list(range(10)))
    assert len(cache) == 2 and len(chain) == 2
    second, _ = serve(cache, [*range(8), 50, 51])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert [cache.pool.holders(page) for page in first] == [2, 2, 1]
    check(cache)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_hit_never_covers_the_last_token(length):
    cache = make()
    tokens = list(range(length))
    serve(cache, tokens)
    assert len(cache) == length // PAGE
    assert len(cache.lookup(tokens)) == (length - 1) // PAGE


def test_equal_pages_after_different_prefixes_are_different():
    cache = make()
    serve(cache, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    serve(cache, [2, 2, 2, 2, 7, 7, 7, 7, 0])
    assert len(cache) == 4
    assert cache.lookup([7, 7, 7, 7, 0]) == []


def test_salts_do_not_mix_whatever_their_type():
    cache = make()
    tokens = list(range(9))
    pages = [serve(cache, tokens, salt)[0][0] for salt in (None, "adapter", 1, ("a", 1))]
    assert len(set(pages)) == 4
    assert [cache.lookup(tokens, salt)[0].page for salt in (None, "adapter", 1, ("a", 1))] == pages


def test_only_committed_tokens_enter():
    cache = make()
    pages = cache.allocate(3)
    chain = []
    cache.insert(list(range(12)), pages, chain, committed=7)
    assert [node.page for node in chain] == pages[:1]
    cache.insert(list(range(12)), pages, chain, committed=8)
    assert [node.page for node in chain] == pages[:2]


def test_the_first_of_two_equal_pages_stays_and_nobody_holds_both_while_it_runs():
    cache = make()
    tokens = list(range(12))
    first, second = cache.allocate(3), cache.allocate(3)
    one, two = [], []
    cache.insert(tokens, first, one, committed=8)
    cache.insert(tokens, second, two, committed=12)
    assert two == [] and [cache.pool.holders(page) for page in first] == [1, 1, 1]
    leave(cache, first, one)
    assert (cache.pool.num_held, cache.pool.num_cached) == (3, 2)
    leave(cache, second, two)
    assert (cache.pool.num_held, cache.pool.num_cached) == (0, 2)


def test_who_leaves_extends_the_chain_of_others_without_a_gap():
    cache = make()
    tokens = list(range(12))
    first, second = cache.allocate(3), cache.allocate(3)
    one, two = [], []
    cache.insert(tokens, first, one, committed=8)
    cache.insert(tokens, second, two, committed=12, leaving=True)
    assert [node.page for node in two] == [first[0], first[1], second[2]]
    leave(cache, second, two)
    assert (cache.pool.num_held, cache.pool.num_cached) == (3, 1)
    leave(cache, first, one)
    assert (cache.pool.num_held, cache.pool.num_cached) == (0, 3)


def test_the_least_recently_used_leaf_goes_first():
    cache = make(num_pages=7)
    old, new = [1] * 9, [2] * 9
    for tokens in (old, new, old):  # `old` is used last
        leave(cache, *serve(cache, tokens))
    assert cache.pool.num_cached == 4
    cache.allocate(3)
    assert (len(cache.lookup(old)), len(cache.lookup(new))) == (2, 1)
    cache.allocate(1)
    assert (len(cache.lookup(old)), len(cache.lookup(new))) == (2, 0)
    cache.allocate(1)
    assert len(cache.lookup(old)) == 1, "the deepest page of a chain goes before its parent"


def test_held_pages_are_not_evicted():
    cache = make(num_pages=5)
    _, chain = serve(cache, list(range(8)))
    assert cache.available == 2
    with pytest.raises(RuntimeError, match="3 pages wanted, 2 of 4 are free"):
        cache.allocate(3)
    cache.drop(chain)
    assert cache.available_beside(chain) == 2 and cache.available == 4
    assert len(cache.allocate(4)) == 4 and len(cache) == 0


def test_what_is_forgotten_is_found_no_more_and_free_when_its_holders_leave():
    cache = make()
    shared, others = list(range(10)), [9] * 9
    first, second, third = serve(cache, shared), serve(cache, shared), serve(cache, others)
    leave(cache, *third)
    assert cache.pool.num_cached == 2
    cache.clear()
    check(cache)
    assert cache.lookup(shared) == cache.lookup(others) == [] and len(cache) == cache.pool.num_cached == 0
    cache.insert(list(range(12)), *first, committed=12)  # it goes on, but nothing after a forgotten page can be found
    assert len(cache) == 0 and len(first[1]) == 2
    fresh = serve(cache, shared)
    assert not {*fresh[0]} & {*first[0], *second[0]} and [node.page for node in cache.lookup(shared)] == fresh[0][:2]
    for pages, chain in (first, second):
        leave(cache, pages, chain)
    assert cache.pool.num_held == 3 and cache.pool.num_cached == 0
    leave(cache, *fresh)
    assert cache.pool.num_cached == 2


def test_off_switch():
    cache = make(enabled=False)
    pages, chain = serve(cache, list(range(9)))
    assert chain == [] and len(cache) == 0 and cache.lookup(list(range(9))) == []
    leave(cache, pages, chain)
    assert cache.pool.num_free == 16


def test_integrity_finds_an_orphan():
    cache = make()
    _, chain = serve(cache, list(range(9)))
    del cache._nodes[chain[0].key]
    with pytest.raises(RuntimeError, match=rf"pages without parent \[{chain[1].page}\]"):
        cache.integrity()


def test_random_use_against_a_plain_model():
    """A hit is always the page last stored for exactly those tokens from the start; nothing leaks."""
    rng = random.Random(5)
    cache = make(num_pages=24)
    serving: list[tuple[list[int], list]] = []
    stored: dict[tuple[int, ...], int] = {}
    for _ in range(3000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 17))]
        need = -(-len(tokens) // PAGE)
        if serving and (rng.random() < 0.5 or cache.available < need):
            leave(cache, *serving.pop(rng.randrange(len(serving))))
            continue
        chain = cache.lookup(tokens)
        assert all(stored[tuple(tokens[: (i + 1) * PAGE])] == node.page for i, node in enumerate(chain))
        if need - len(chain) > cache.available_beside(chain):
            continue
        pages, chain = serve(cache, tokens)
        stored.update({tuple(tokens[: (i + 1) * PAGE]): node.page for i, node in enumerate(chain)})
        serving.append((pages, chain))
    for pages, chain in serving:
        leave(cache, pages, chain)
    cache.clear()
    assert cache.pool.num_free == 23 and len(cache) == 0
