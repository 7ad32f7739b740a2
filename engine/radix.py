"""Radix tree over sealed KV blocks: which blocks already hold the KV of a given prefix.

A key is the whole content of one block (scope and tokens, see `layout.block_keys`); a node is a run of keys with the
block ids that hold them, and a node's children differ in their first key. Looking up a prefix walks the tree comparing
keys byte by byte, so identity is the tokens, never a hash (RadixAttention: Zheng et al., SGLang, 2024, section 3).

A lock on a node protects it and all its ancestors from eviction (invariant I2). Eviction takes the least recently
used unlocked leaf and gives up its blocks from the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count


class RadixNode:
    """A run of blocks. Opaque to callers: a handle that is valid while locked."""

    __slots__ = ("blocks", "children", "keys", "last_use", "locks", "parent")

    def __init__(self, keys: list[bytes], blocks: list[int], parent: RadixNode | None) -> None:
        self.keys = keys
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.locks = 0
        self.last_use = 0


class RadixCache:
    """Prefix tree of KV blocks. Owner: `CacheManager`; block ids in it belong to the tree until evicted."""

    def __init__(self) -> None:
        self.root = RadixNode([], [], None)
        self.num_evictable = 0
        self.num_protected = 0
        self._clock = count(1)
        self._serial = count()
        self._heap: list[tuple[int, int, RadixNode]] = []

    def match(self, keys: Sequence[bytes]) -> tuple[list[int], RadixNode]:
        """Longest stored prefix of `keys`: its block ids and the node where it ends (the root if nothing matches)."""
        node, blocks, at = self.root, [], 0
        now = next(self._clock)
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            n = _common(child.keys, keys, at)
            if n < len(child.keys):
                child = self._split(child, n)
            child.last_use = now
            blocks += child.blocks
            node, at = child, at + n
        return blocks, node

    def insert(self, node: RadixNode, keys: Sequence[bytes], blocks: Sequence[int]) -> tuple[list[int], RadixNode]:
        """Store `keys` below `node`, a locked handle, and move that lock to where they end.

        Returns the block ids that now stand for the keys and the new handle. A key that is already there keeps its
        block; the caller still owns its own block for that key and frees it. All others belong to the tree.
        """
        found, deepest = self._descend(node, keys)
        rest = len(found)
        if rest < len(keys):
            deepest = self._append(deepest, list(keys[rest:]), list(blocks[rest:]), handle=node)
        self._lock_between(deepest, node)
        return found + list(blocks[rest:]), deepest

    def lock(self, node: RadixNode) -> None:
        """Protect `node` and its ancestors."""
        self._lock_between(node, None)

    def unlock(self, node: RadixNode) -> None:
        """Give one lock back. Raises `ValueError` if there is none."""
        now = next(self._clock)
        walk: RadixNode | None = node
        while walk is not None and walk is not self.root:
            if walk.locks < 1:
                raise ValueError("a radix node is unlocked more often than locked")
            walk.last_use = now
            walk.locks -= 1
            if walk.locks == 0:
                self.num_protected -= len(walk.blocks)
                self.num_evictable += len(walk.blocks)
                self._offer(walk)
            walk = walk.parent

    def evict(self, n: int) -> list[int]:
        """Give up at least n blocks if that many are evictable, else all of those; returns their ids."""
        out: list[int] = []
        while len(out) < n and self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            if node.locks or node.children or not node.blocks or node.last_use != last_use or node.parent is None:
                continue
            take = min(n - len(out), len(node.blocks))
            out += node.blocks[-take:]
            del node.blocks[-take:]
            self.num_evictable -= take
            self._shrink(node, take)
        return out

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, parents first."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError` if links, locks or counts disagree (I1, I2)."""
        evictable = protected = 0
        for node in self.nodes():
            assert node.parent is not None, "a node has no parent"
            assert node.keys, "a node is empty"
            assert len(node.keys) == len(node.blocks), "a node's keys and blocks differ in number"
            assert node.parent.children[node.keys[0]] is node, "a child is filed under another key"
            assert node.parent is self.root or node.parent.locks >= node.locks, "a parent is locked less than its child"
            protected += len(node.blocks) if node.locks else 0
            evictable += 0 if node.locks else len(node.blocks)
        assert evictable == self.num_evictable, f"evictable is {self.num_evictable}, counted {evictable}"
        assert protected == self.num_protected, f"protected is {self.num_protected}, counted {protected}"

    def _descend(self, node: RadixNode, keys: Sequence[bytes]) -> tuple[list[int], RadixNode]:
        """Like `match`, from `node` on."""
        blocks: list[int] = []
        now = next(self._clock)
        while len(blocks) < len(keys):
            child = node.children.get(keys[len(blocks)])
            if child is None:
                break
            n = _common(child.keys, keys, len(blocks))
            if n < len(child.keys):
                child = self._split(child, n)
            child.last_use = now
            blocks += child.blocks
            node = child
        return blocks, node

    def _append(self, node: RadixNode, keys: list[bytes], blocks: list[int], handle: RadixNode) -> RadixNode:
        """Add a run after `node`: in place where only the caller's own lock holds a leaf, else as a child."""
        if node is handle and node.locks == 1 and not node.children and node is not self.root:
            node.keys += keys
            node.blocks += blocks
            self.num_protected += len(blocks)
            return node
        child = RadixNode(keys, blocks, node)
        child.last_use = next(self._clock)
        node.children[keys[0]] = child
        self.num_evictable += len(blocks)
        return child

    def _split(self, node: RadixNode, n: int) -> RadixNode:
        """Cut `node` after n keys. The object stays the lower part, so handles on it stay true; returns the upper."""
        assert node.parent is not None
        upper = RadixNode(node.keys[:n], node.blocks[:n], node.parent)
        upper.locks, upper.last_use = node.locks, node.last_use
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.blocks, node.parent = node.keys[n:], node.blocks[n:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _lock_between(self, node: RadixNode, stop: RadixNode | None) -> None:
        walk: RadixNode | None = node
        while walk is not None and walk is not stop and walk is not self.root:
            if walk.locks == 0:
                self.num_evictable -= len(walk.blocks)
                self.num_protected += len(walk.blocks)
            walk.locks += 1
            walk = walk.parent

    def _offer(self, node: RadixNode) -> None:
        """Make an unlocked leaf known to `evict`; entries that have become untrue are dropped there."""
        if not node.children and not node.locks and node is not self.root:
            heapq.heappush(self._heap, (node.last_use, next(self._serial), node))

    def _shrink(self, node: RadixNode, taken: int) -> None:
        assert node.parent is not None
        if node.blocks:
            del node.keys[-taken:]
            self._offer(node)
            return
        del node.parent.children[node.keys[0]]
        self._offer(node.parent)
        node.parent = None


def _common(run: list[bytes], keys: Sequence[bytes], at: int) -> int:
    """Length of the common prefix of `run` and `keys[at:]`."""
    n = min(len(run), len(keys) - at)
    if run[:n] == keys[at : at + n]:
        return n
    return next(i for i in range(n) if run[i] != keys[at + i])
