"""The one page allocator, shared by the target's and the draft's KV pools.

A page is *free*, *held* (by one request, or by several that share it) or *cached* (kept by the prefix cache, held by
nobody); free + held + cached = total at all times. Page 0 is padding and is never handed out.
"""

from __future__ import annotations

from dflash_jax.errors import UserError

PADDING_PAGE = 0


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def reserve_tokens(committed: int, block_size: int, limit_tokens: int) -> int:
    """Tokens of KV space a running request must own before a round is launched.

    One block for the round in flight, whose result is unknown, and one for the round about to start. Nothing at or
    past the limit is ever emitted, so rows there may fall on the padding page.
    """
    return min(committed + 2 * block_size, limit_tokens)


class PagePool:
    """Pages 1 … num_pages−1: a free stack, a holder count for each page, and the prefix cache's mark."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise UserError(f"num_pages is {num_pages}, but the pool needs the padding page and at least one more")
        self.total = num_pages - 1
        self.releases = 0  # grows whenever a page loses its last holder: tells a blocked request to look again
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._marked = bytearray(num_pages)
        self._cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that the prefix cache keeps and no request holds."""
        return self._cached

    @property
    def num_held(self) -> int:
        return self.total - len(self._free) - self._cached

    def holders(self, page: int) -> int:
        return self._holders[page]

    def is_marked(self, page: int) -> bool:
        """Whether the prefix cache knows this page; a marked page must never be written."""
        return bool(self._marked[page])

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one holder."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} of {self.total} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder for a page that is held or cached."""
        if not self._holders[page]:
            if not self._marked[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._cached -= 1
        self._holders[page] += 1

    def release(self, page: int) -> bool:
        """One holder less; True when it was the last. An unmarked page without holders is free."""
        if not self._holders[page]:
            raise RuntimeError(f"page {page} is released but nobody holds it")
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        self.releases += 1
        if self._marked[page]:
            self._cached += 1
        else:
            self._free.append(page)
        return True

    def mark(self, page: int) -> None:
        """The prefix cache keeps this page from now on, also when its holders leave."""
        if self._marked[page] or not self._holders[page]:
            raise RuntimeError(f"page {page} cannot enter the cache: {self._describe(page)}")
        self._marked[page] = 1

    def unmark(self, page: int) -> None:
        """The prefix cache gives up a page, which becomes free now or when its last holder leaves."""
        if not self._marked[page]:
            raise RuntimeError(f"page {page} cannot leave the cache: {self._describe(page)}")
        self._marked[page] = 0
        if not self._holders[page]:
            self._cached -= 1
            self._free.append(page)

    def integrity(self) -> None:
        """Recount everything; RuntimeError names what does not add up."""
        held = len(self._holders) - self._holders.count(0)
        cached = sum(1 for page, marked in enumerate(self._marked) if marked and not self._holders[page])
        free = set(self._free)
        if len(free) + held + cached != self.total or (held, cached) != (self.num_held, self.num_cached):
            raise RuntimeError(
                f"pages do not add up: {len(free)} free + {held} held + {cached} cached of {self.total}, "
                f"counters say {self.num_free}, {self.num_held}, {self.num_cached}"
            )
        wrong = [page for page in free if page == PADDING_PAGE or self._holders[page] or self._marked[page]]
        if wrong or len(free) != len(self._free):
            raise RuntimeError(f"free list of {len(self._free)} entries, {len(free)} distinct, not free: {wrong[:8]}")

    def _describe(self, page: int) -> str:
        return f"{self._holders[page]} holders, {'known' if self._marked[page] else 'unknown'} to the cache"
