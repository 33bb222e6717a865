"""Pages of the KV cache, and the prefix tree that shares them: plain Python, no JAX.

Every usable page is in one of three states: free; used, by one or more sequences; or cached, which
is to say kept by the prefix tree alone, until its memory is wanted.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence

#: Tokens per page (Z).
PAGE_TOKENS = 16
#: Where a root has no page.
NO_PAGE = 0
#: Tokens of one full page.
PageTokens = tuple[int, ...]


def pages_for(n_tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Pages that hold `n_tokens`."""
    return -(-n_tokens // page_tokens)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A full page of the prefix tree; its ancestors hold the tokens before it.

    Attributes:
      parent: the page before, or a root.
      tokens: of this page: compared, not hashed alone, so that no collision can mix prompts up.
      page: its number.
      children: the pages that follow, by their tokens.
      step: the engine step that fills it; sequences may read it in later ones.
      attached: still part of the tree.
      namespace: of a root.
    """

    parent: Node | None
    tokens: PageTokens
    page: int
    step: int
    children: dict[PageTokens, Node] = dataclasses.field(default_factory=dict)
    attached: bool = True
    namespace: Hashable = None


class Pages:
    """Hands out the pages of one cache, and keeps what may be used again.

    Sequences hold a page once for each time they took or matched it, and give each back with
    `release`. A sequence that holds a node's page holds all its ancestors' too.

    Args:
      total: usable pages, numbered from 1: page 0 is where padding writes.
      page_tokens: tokens of a page (Z).
      share: keep a prefix tree; without one nothing is ever matched.
    """

    def __init__(self, total: int, page_tokens: int, *, share: bool = True) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self.evictions = 0
        self._share = share
        self._free = list(range(total, 0, -1))
        self._holders = [0] * (1 + total)
        self._nodes: dict[int, Node] = {}
        self._roots: dict[Hashable, Node] = {}
        self._cached = 0
        # Cached pages by the time they were last held; entries may be out of date.
        self._idle: list[tuple[int, int]] = []
        self._idle_since: dict[int, int] = {}
        self._clock = itertools.count()

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the prefix tree keeps."""
        return self._cached

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that `take` could hand out: free ones, and cached ones that it would evict."""
        return self.free + self.cached

    def take(self) -> int:
        """A page of one's own, evicting the cached page that was held the longest ago if need be.

        Raises:
          IndexError: if `available` is 0.
        """
        if not self._free:
            self._evict()
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def count_cached(self, nodes: Sequence[Node]) -> int:
        """How many of these nodes' pages only the prefix tree keeps."""
        return sum(self._holders[node.page] == 0 for node in nodes)

    def hold(self, node: Node) -> int:
        """Holds the page of a node that `following` gave; returns its number."""
        if self._holders[node.page] == 0:
            self._cached -= 1
            del self._idle_since[node.page]
        self._holders[node.page] += 1
        return node.page

    def release(self, pages: Sequence[int]) -> None:
        """Gives back pages of one sequence, in their order in it."""
        # From the last to the first: a page must not be evicted before those that follow it.
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._nodes:
                    self._cached += 1
                    self._idle_since[page] = next(self._clock)
                    heapq.heappush(self._idle, (self._idle_since[page], page))
                    if len(self._idle) > 2 * self.total + 64:
                        self._idle = [(since, idle) for idle, since in self._idle_since.items()]
                        heapq.heapify(self._idle)
                else:
                    self._free.append(page)

    def root(self, namespace: Hashable) -> Node:
        """Where prompts of one namespace begin; those of another never share a page with it."""
        known = self._roots.get(namespace)
        return known or Node(None, (), NO_PAGE, step=-1, namespace=namespace)

    def following(self, node: Node, tokens: Sequence[int], start: int) -> Node | None:
        """The page after `node` that holds tokens[start : start + Z], if the tree has it."""
        return node.children.get(tuple(tokens[start : start + self.page_tokens]))

    def publish(self, node: Node, tokens: PageTokens, page: int, step: int) -> Node:
        """Adds a full page after `node` for others to use; returns its node, or the one there is.

        Where the tree has a page of these tokens already, that one stays, and `page` remains its
        holder's own.
        """
        if node.parent is None and self._share:
            node = self._roots.setdefault(node.namespace, node)
        known = node.children.get(tokens)
        if known is not None or not self._share or not node.attached:
            return known or Node(node, tokens, page, step, attached=False)
        child = Node(node, tokens, page, step)
        node.children[tokens] = self._nodes[page] = child
        return child

    def withdraw(self, node: Node) -> None:
        """Takes a page and all that follow it out of the tree: what they hold is not to be used."""
        if not node.attached:
            return
        if node.parent is not None:
            del node.parent.children[node.tokens]
            if node.parent.parent is None and not node.parent.children:
                self._roots.pop(node.parent.namespace, None)
        for gone in _subtree(node):
            gone.attached = False
            gone.children = {}
            if self._nodes.pop(gone.page, None) and self._holders[gone.page] == 0:
                self._cached -= 1
                del self._idle_since[gone.page]
                self._free.append(gone.page)

    def clear(self) -> None:
        """Empties the prefix tree; pages that sequences hold stay theirs."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.withdraw(child)
        self._idle.clear()

    def _evict(self) -> None:
        while True:
            since, page = heapq.heappop(self._idle)
            if self._idle_since.get(page) == since:
                break
        self.withdraw(self._nodes[page])
        self.evictions += 1

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the books agree with the page tables of live sequences.

        For tests: free, cached and used pages are disjoint and make up the pool, every page is
        held as often as the tables name it, and the tree's pages are the tree's alone.
        """
        held = [0] * len(self._holders)
        for table in tables:
            for page in table:
                held[page] += 1
            assert len(set(table)) == len(table), f"a page is twice in one table: {table}"
        assert held == self._holders, "holders differ from the page tables"
        free, cached = set(self._free), {p for p in self._nodes if not held[p]}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & set(self._nodes), "a page is free and in the tree"
        assert len(cached) == self._cached and self._idle_since.keys() == cached
        used = {page for page, count in enumerate(held) if count}
        assert not used & free and len(free) + len(cached) + len(used) == self.total
        for page, node in self._nodes.items():
            assert node.page == page and node.attached and node.parent is not None
            assert node.parent.children[node.tokens] is node
            above = node.parent.page
            assert node.parent.parent is None or held[above] >= (held[page] > 0)


def _subtree(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        children = list(node.children.values())
        yield node
        waiting.extend(children)
