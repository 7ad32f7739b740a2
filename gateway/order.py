"""The order of a prompt's passages, along what earlier prompts left in the cache.

An exact prefix is found only where the same passages stood in the same order, and retrieval seldom gives them in the
same order twice. This keeps a tree of the orders that were sent lately, as large as the engine's cache, and walks it:
the next passage is the one that most of them had there. A bound says how many places a passage may move from its rank.
The tree only guesses what the engine still holds: a wrong guess costs nothing but the disturbed order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count


class _Node:
    """A passage behind others. `size` is its tokens."""

    __slots__ = ("children", "hits", "key", "last", "parent", "size")

    def __init__(self, key: Hashable, parent: _Node | None, size: int) -> None:
        self.key, self.parent, self.size = key, parent, size
        self.children: dict[Hashable, _Node] = {}
        self.hits = self.last = 0


class PassageOrder:
    """Remembers orders and proposes them.

    Args: max_tokens, of the passages that the tree holds; the least recently used are forgotten first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._root = _Node(None, None, 0)
        self._clock = count(1)
        self.num_tokens = 0

    def propose(self, head: Hashable, passages: Sequence[Hashable], max_shift: int) -> list[int]:
        """An order, as indices into `passages`, which come by falling relevance.

        Args: head, all that stands before the passages and must be the same: scope and system text. No passage moves by
        more than `max_shift` places.
        """
        left = list(range(len(passages)))
        node, out = self._root.children.get(head), list[int]()
        while left:
            at = len(out)
            # The first one left has the least rank: if it may not move further back, it is the only choice.
            late = left[0] + max_shift <= at
            allowed = left[:1] if late else [i for i in left if i <= at + max_shift]
            known = {} if node is None else {i: c for i in allowed if (c := node.children.get(passages[i])) is not None}
            best = max(known, key=lambda i: (known[i].hits, -i), default=allowed[0])
            node = known.get(best)
            left.remove(best)
            out.append(best)
        return out

    def record(self, head: Hashable, passages: Sequence[Hashable], sizes: Sequence[int]) -> None:
        """An order was sent to the engine; `sizes` are the passages' tokens."""
        now, node = next(self._clock), self._root
        for key, size in zip((head, *passages), (0, *sizes), strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, node, size)
                self.num_tokens += size
            child.hits += 1
            child.last = now
            node = child
        if self.num_tokens > self.max_tokens:
            self._forget(self.max_tokens * 9 // 10)

    def _forget(self, max_tokens: int) -> None:
        """Drop the least recently used ends of orders until no more than `max_tokens` are left."""
        heap = [(node.last, i, node) for i, node in enumerate(self._leaves())]
        heapify(heap)
        serial = count(len(heap))
        while self.num_tokens > max_tokens:
            _, _, leaf = heappop(heap)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.key]
            self.num_tokens -= leaf.size
            if not leaf.parent.children and leaf.parent is not self._root:
                heappush(heap, (leaf.parent.last, next(serial), leaf.parent))

    def _leaves(self) -> list[_Node]:
        todo, out = list(self._root.children.values()), list[_Node]()
        while todo:
            node = todo.pop()
            todo += node.children.values()
            out += [] if node.children else [node]
        return out
