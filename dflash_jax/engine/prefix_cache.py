"""Full pages found again by the tokens they hold.

A page is keyed by (parent page's node, its own tokens), so a chain of keys spells the whole prefix and equal keys mean
equal tokens: no hash can collide. A page carries target and draft KV under one id, hence so does a hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count

from dflash_jax.engine.pages import PagePool


class Node:
    """One cached page: `key` = (identity of the parent, tokens of the page)."""

    __slots__ = ("identity", "key", "page")

    def __init__(self, identity: int, key: tuple[Hashable, tuple[int, ...]], page: int):
        self.identity = identity
        self.key = key
        self.page = page


class PrefixCache:
    """A tree of full pages; requests hold chains from a root, pages held by nobody are evicted oldest first.

    `_idle` keeps the nodes without holders in the order in which they were let go, children before their parents.
    Whoever uses a node also uses its ancestors, so the oldest idle node never has a child: it can always be evicted.
    """

    def __init__(self, pool: PagePool, page_size: int, *, enabled: bool = True):
        self.pool = pool
        self.page_size = page_size
        self.enabled = enabled
        self._nodes: dict[tuple[Hashable, tuple[int, ...]], Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._identities = count(1)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones after eviction."""
        return self.pool.num_free + self.pool.num_cached

    def available_beside(self, chain: Sequence[Node]) -> int:
        """`available` once `chain` is held."""
        return self.available - sum(1 for node in chain if not self.pool.holders(node.page))

    def allocate(self, pages: int) -> list[int]:
        """Private pages, evicting as many cached ones as that takes."""
        for _ in range(min(pages - self.pool.num_free, len(self._idle))):
            self._evict_oldest()
        return self.pool.allocate(pages)

    def lookup(self, tokens: Sequence[int], salt: Hashable = None) -> list[Node]:
        """The longest cached chain of full pages of `tokens`, never covering the last token.

        The last token's logits give the next token, so at least that one must be computed.
        """
        chain: list[Node] = []
        for index in range((len(tokens) - 1) // self.page_size if self.enabled else 0):
            node = self._nodes.get(self._key(tokens, index, chain, salt))
            if node is None:
                break
            chain.append(node)
        return chain

    def hold(self, chain: Sequence[Node]) -> None:
        """One more holder for every page of the chain."""
        for node in chain:
            self.pool.share(node.page)
            self._idle.pop(node, None)

    def drop(self, chain: Sequence[Node]) -> None:
        """One holder less for every page of the chain, the deepest first."""
        for node in reversed(chain):
            if self.pool.release(node.page) and self._is_known(node):
                self._idle[node] = None

    def insert(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        chain: list[Node],
        committed: int,
        salt: Hashable = None,
        *,
        leaving: bool = False,
    ) -> None:
        """Make the full pages below position `committed` findable; `chain`, what the request holds, grows to them.

        pages: the request's table. Another request may have been first with the same tokens; then its page stays the
        cached one, and the request's copy private. Holding both would take more pages than the request was promised,
        so the chain ends there, unless the request is `leaving` and lets go of everything anyway.
        """
        if chain and not self._is_known(chain[-1]):
            return  # it was forgotten, so nothing after it could be found
        for index in range(len(chain), committed // self.page_size if self.enabled else 0):
            key = self._key(tokens, index, chain, salt)
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(next(self._identities), key, pages[index])
                self.pool.mark(node.page)
            elif leaving:
                self.hold([node])
            else:
                return
            chain.append(node)

    def clear(self) -> None:
        """Forget everything: what somebody holds stays theirs, but is found no more and free when they leave."""
        for node in self._nodes.values():
            self.pool.unmark(node.page)
        self._nodes.clear()
        self._idle.clear()

    def integrity(self) -> None:
        """RuntimeError unless nodes, marks and parents agree."""
        identities = {node.identity for node in self._nodes.values()}
        orphans = [n.page for n in self._nodes.values() if isinstance(n.key[0], int) and n.key[0] not in identities]
        unmarked = [n.page for n in self._nodes.values() if not self.pool.is_marked(n.page)]
        if orphans or unmarked or len(self._idle) != self.pool.num_cached:
            raise RuntimeError(
                f"prefix cache: pages without parent {orphans[:8]}, unknown to the pool {unmarked[:8]}, "
                f"{len(self._idle)} idle nodes for {self.pool.num_cached} cached pages"
            )

    def _is_known(self, node: Node) -> bool:
        return self._nodes.get(node.key) is node

    def _key(self, tokens: Sequence[int], index: int, chain: Sequence[Node], salt: Hashable):
        parent = chain[index - 1].identity if index else ("root", salt)
        start = index * self.page_size
        return parent, tuple(tokens[start : start + self.page_size])

    def _evict_oldest(self) -> None:
        node, _ = self._idle.popitem(last=False)
        del self._nodes[node.key]
        self.pool.unmark(node.page)
