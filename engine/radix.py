"""Radix tree over sealed KV blocks: which blocks already hold the KV of a given prefix.

A key is the whole content of one block (scope and tokens, see `layout.block_keys`); a node is a run of keys with the
block ids that hold them, and a node's children differ in their first key. Looking up a prefix walks the tree comparing
keys byte by byte, so identity is the tokens, never a hash (RadixAttention: Zheng et al., SGLang, 2024, section 3).

A lock on a node protects it and all its ancestors from eviction (invariant I2). Eviction takes the unlocked leaf of
least worth and gives up its blocks from the end. Worth is the number of uses on top of an age that rises to the worth
of what was evicted (least frequently used with dynamic aging, Arlitt et al. 2000), so a passage that is often retrieved
outlives prompts that pass by once, and what was popular long ago still goes; of equal worth the least recently used
goes first. The uses of what was evicted are remembered for a while. Pinned nodes go only when nothing else is left:
pinning shifts the order, it never makes a request fail.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count

MAX_REMEMBERED = 10_000
"""Evicted nodes whose uses are remembered."""


class RadixNode:
    """A run of blocks. Opaque to callers: a handle that is valid while locked."""

    __slots__ = ("blocks", "children", "is_pinned", "keys", "last_use", "locks", "num_uses", "parent", "worth")

    def __init__(self, keys: list[bytes], blocks: list[int], parent: RadixNode | None) -> None:
        self.keys = keys
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.locks = 0
        self.last_use = self.num_uses = self.worth = 0
        self.is_pinned = False


_Offer = tuple[int, int, int, RadixNode]
"""(worth, last use, serial number, node): two nodes are never compared."""


class RadixCache:
    """Prefix tree of KV blocks. Owner: `CacheManager`; block ids in it belong to the tree until evicted."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.root = RadixNode([], [], None)
        self.num_evictable = 0
        self.num_protected = 0
        self.num_pinned = 0
        self._num_nodes = 0
        self._pinned: set[RadixNode] = set()
        self._clock = clock
        """Time in nanoseconds; never the same twice."""
        self._age = 0
        self._uses_before: OrderedDict[bytes, int] = OrderedDict()
        """First key of a node that was evicted -> its uses, the last MAX_REMEMBERED of them."""
        self._serial = count()
        self._heap: list[_Offer] = []
        """Unlocked leaves by last use. Entries may be stale: each is checked when it comes up."""
        self._pinned_heap: list[_Offer] = []

    def match(self, keys: Sequence[bytes]) -> tuple[list[int], RadixNode]:
        """Longest stored prefix of `keys`: its block ids and the node where it ends (the root if nothing matches)."""
        return self._descend(self.root, keys)

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

    def unlock(self, node: RadixNode, is_use: bool = True) -> None:
        """Give one lock back; `is_use` says whether it was used meanwhile. Raises `ValueError` if there is none."""
        now = self._clock()
        walk: RadixNode | None = node
        while walk is not None and walk is not self.root:
            if walk.locks < 1:
                raise ValueError("a radix node is unlocked more often than locked")
            walk.last_use = now
            walk.num_uses += is_use
            walk.worth = self._age + walk.num_uses
            walk.locks -= 1
            if walk.locks == 0:
                self.num_protected -= len(walk.blocks)
                self.num_evictable += len(walk.blocks)
                self._offer(walk)
            walk = walk.parent

    def pin(self, node: RadixNode, depth: int, num_blocks: int, budget: int) -> None:
        """Pin the first `num_blocks` blocks of the path that ends at `node`, `depth` blocks deep.

        At most `budget` blocks are pinned: the least recently used pinned paths give way; a longer one is not pinned.
        """
        if num_blocks > budget:
            return
        while depth - len(node.keys) >= num_blocks and node.parent is not None:
            depth -= len(node.keys)
            node = node.parent
        if node.is_pinned:
            return
        if depth > num_blocks:
            node = self._split(node, len(node.keys) - (depth - num_blocks))
        path = []
        while node is not self.root and not node.is_pinned:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        self._unpin_down_to(budget - sum(len(n.blocks) for n in path), below=node)
        for pinned in path:
            self._set_pinned(pinned, True)

    def evict(self, n: int) -> list[int]:
        """Give up at least n blocks if that many are evictable, else all of those; returns their ids."""
        out: list[int] = []
        while len(out) < n and (self._heap or self._pinned_heap):
            heap = self._heap or self._pinned_heap
            worth, last_use, _, node = heapq.heappop(heap)
            is_true = self._is_evictable(node) and (node.worth, node.last_use) == (worth, last_use)
            if not is_true or node.is_pinned is not (heap is self._pinned_heap):
                continue
            self._age = max(self._age, worth)
            take = min(n - len(out), len(node.blocks))
            out += node.blocks[-take:]
            del node.blocks[-take:]
            self.num_evictable -= take
            self.num_pinned -= take if node.is_pinned else 0
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
        evictable = protected = pinned = num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            pinned += len(node.blocks) if node.is_pinned else 0
            assert node.is_pinned == (node in self._pinned), "the set of pinned nodes is wrong"
            assert node.parent is not None, "a node has no parent"
            assert node.keys, "a node is empty"
            assert len(node.keys) == len(node.blocks), "a node's keys and blocks differ in number"
            assert node.parent.children[node.keys[0]] is node, "a child is filed under another key"
            assert node.parent is self.root or node.parent.locks >= node.locks, "a parent is locked less than its child"
            assert node.parent is self.root or node.parent.is_pinned or not node.is_pinned, "pinned below unpinned"
            protected += len(node.blocks) if node.locks else 0
            evictable += 0 if node.locks else len(node.blocks)
        assert evictable == self.num_evictable, f"evictable is {self.num_evictable}, counted {evictable}"
        assert protected == self.num_protected, f"protected is {self.num_protected}, counted {protected}"
        assert pinned == self.num_pinned, f"pinned is {self.num_pinned}, counted {pinned}"
        assert num_nodes == self._num_nodes, f"there are {num_nodes} nodes, counted {self._num_nodes}"

    def _descend(self, node: RadixNode, keys: Sequence[bytes]) -> tuple[list[int], RadixNode]:
        """Longest stored continuation of `node` along `keys`: its block ids and the node where it ends."""
        blocks: list[int] = []
        now = self._clock()
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
        is_own = node is handle and node.locks == 1 and not node.is_pinned
        if is_own and not node.children and node is not self.root:
            node.keys += keys
            node.blocks += blocks
            self.num_protected += len(blocks)
            return node
        child = RadixNode(keys, blocks, node)
        child.last_use = self._clock()
        child.num_uses = self._uses_before.pop(keys[0], 0)
        node.children[keys[0]] = child
        self.num_evictable += len(blocks)
        self._num_nodes += 1
        return child

    def _split(self, node: RadixNode, n: int) -> RadixNode:
        """Cut `node` after n keys. The object stays the lower part, so handles on it stay true; returns the upper."""
        assert node.parent is not None
        upper = RadixNode(node.keys[:n], node.blocks[:n], node.parent)
        upper.locks, upper.last_use = node.locks, node.last_use
        upper.num_uses, upper.worth = node.num_uses, node.worth
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.blocks, node.parent = node.keys[n:], node.blocks[n:], upper
        upper.children[node.keys[0]] = node
        self._num_nodes += 1
        if node.is_pinned:
            upper.is_pinned = True
            self._pinned.add(upper)
        return upper

    def _lock_between(self, node: RadixNode, stop: RadixNode | None) -> None:
        walk: RadixNode | None = node
        while walk is not None and walk is not stop and walk is not self.root:
            if walk.locks == 0:
                self.num_evictable -= len(walk.blocks)
                self.num_protected += len(walk.blocks)
            walk.locks += 1
            walk = walk.parent

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and not node.locks and not node.children

    def _offer(self, node: RadixNode) -> None:
        """Make an unlocked leaf known to `evict`."""
        if not self._is_evictable(node):
            return
        heap = self._pinned_heap if node.is_pinned else self._heap
        heapq.heappush(heap, (node.worth, node.last_use, next(self._serial), node))
        # Every use of a prefix offers it anew, so without this the heap would grow with the requests.
        if len(heap) > 64 + 2 * self._num_nodes:
            heap[:] = [e for e in heap if self._is_evictable(e[3]) and (e[3].worth, e[3].last_use) == e[:2]]
            heapq.heapify(heap)

    def _unpin_down_to(self, budget: int, below: RadixNode) -> None:
        """Unpin the least recently used pinned leaves until `budget` is kept; `below` and its ancestors stay."""
        keep = {below}
        while below.parent is not None:
            below = below.parent
            keep.add(below)
        while self.num_pinned > budget:
            tips = [n for n in self._pinned - keep if not any(c.is_pinned for c in n.children.values())]
            if not tips:
                return
            tip = min(tips, key=lambda n: n.last_use)
            self._set_pinned(tip, False)
            self._offer(tip)

    def _set_pinned(self, node: RadixNode, is_pinned: bool) -> None:
        node.is_pinned = is_pinned
        self.num_pinned += len(node.blocks) if is_pinned else -len(node.blocks)
        (self._pinned.add if is_pinned else self._pinned.discard)(node)

    def _shrink(self, node: RadixNode, taken: int) -> None:
        assert node.parent is not None
        if node.blocks:
            del node.keys[-taken:]
            self._offer(node)
            return
        del node.parent.children[node.keys[0]]
        self._uses_before[node.keys[0]] = node.num_uses
        if len(self._uses_before) > MAX_REMEMBERED:
            self._uses_before.popitem(last=False)
        self._pinned.discard(node)
        self._num_nodes -= 1
        self._offer(node.parent)
        node.parent = None


def _common(run: list[bytes], keys: Sequence[bytes], at: int) -> int:
    """Length of the common prefix of `run` and `keys[at:]`."""
    n = min(len(run), len(keys) - at)
    if run[:n] == keys[at : at + n]:
        return n
    return next(i for i in range(n) if run[i] != keys[at + i])
