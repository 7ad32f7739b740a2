"""The one owner of KV blocks: allocator and prefix tree behind the operations a scheduler needs.

At any moment each block is in exactly one place (invariant I1): free, in the tree and evictable, in the tree and
protected by a lock, or held privately by one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.allocator import BlockAllocator
from engine.layout import BlockLayout, IntColumn
from engine.radix import RadixCache, RadixNode


@dataclass(slots=True, eq=False)
class Allocation:
    """Blocks of one running request. Made and changed by `CacheManager` alone; callers only read."""

    layout: BlockLayout
    block_ids: IntColumn
    num_shared: int
    """Leading blocks that belong to the tree; the rest are held privately."""
    node: RadixNode
    """Locked handle on the last shared block."""
    capacity: int = 0
    """Tokens that its blocks have room for."""
    is_private: bool = False
    """Whether none of its blocks is ever shared."""
    announced: range = range(0)
    """Blocks it is about to compute and share, so that others can wait for them."""

    @property
    def num_blocks(self) -> int:
        """Blocks it has."""
        return len(self.block_ids)

    @property
    def held(self) -> list[int]:
        """Ids of the blocks that are its own."""
        return self.block_ids.tolist()[self.num_shared :]


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Where all blocks are (I1: the first four add up to `total`)."""

    free: int
    evictable: int
    protected: int
    held: int
    total: int
    pinned: int
    """Of those in the tree, the ones that are evicted last."""


class CacheManager:
    """Finds, reserves, shares and frees the KV blocks of requests.

    Args: pin_budget, the most blocks of system segments that are kept back from eviction while anything else can go.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True, pin_budget: int = 0) -> None:
        self._allocator = BlockAllocator(num_blocks)
        self._tree = RadixCache()
        self._enabled = enable_prefix_caching
        self._pin_budget = pin_budget
        self._scope_ids: dict[str, int] = {}
        self._live: set[Allocation] = set()
        self._announced: dict[int, Allocation] = {}
        """Path number of a block -> the request that computes it now."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._allocator.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that could be reserved now: free or evictable."""
        return self._allocator.num_free + self._tree.num_evictable

    def open(
        self, layout: BlockLayout, token_ids: Sequence[int], *, reads: bool = True, is_private: bool = False
    ) -> tuple[Allocation, int]:
        """Start a request: lock the longest cached prefix and return it with the number of tokens it covers.

        The match is shorter than the sequence (I3), since its last token must be computed to give logits. A system
        segment that is found is pinned: it has been used twice. With `reads` off nothing is looked up; where it
        `is_private`, nothing is shared later either.
        """
        last = layout.num_sealed(len(token_ids) - 1) if self._enabled and reads and not is_private else 0
        blocks, node = self._tree.match(layout.make_keys(token_ids, last, self._scope_ids))
        self._tree.lock(node)
        if self._pin_budget and 0 < layout.num_system_blocks <= len(blocks):
            self._tree.pin(node, len(blocks), layout.num_system_blocks, self._pin_budget)
        num_cached = layout.ends[len(blocks) - 1] if blocks else 0
        allocation = Allocation(layout, IntColumn(blocks), len(blocks), node, num_cached, is_private)
        self._live.add(allocation)
        return allocation, num_cached

    def announce(self, allocation: Allocation, num_tokens: int) -> None:
        """Say that the request will compute and share its sealed blocks below `num_tokens`, its known tokens."""
        if not self._enabled or allocation.is_private:
            return
        last = min(allocation.layout.num_sealed(num_tokens), len(allocation.layout.paths))
        allocation.announced = range(allocation.num_shared, last)
        for i in allocation.announced:
            self._announced.setdefault(allocation.layout.paths[i], allocation)

    def in_flight(self, allocation: Allocation) -> Allocation | None:
        """The request that is computing the block this one needs next behind the same prefix, if there is one."""
        layout, at = allocation.layout, allocation.num_shared
        if at >= len(layout.paths):
            return None
        other = self._announced.get(layout.paths[at])
        if other is None or other is allocation or other.layout.keys[: at + 1] != layout.keys[: at + 1]:
            return None
        return other

    def reserve(self, allocation: Allocation, num_tokens: int) -> bool:
        """Give the request blocks for its first `num_tokens` tokens, evicting if needed; False if impossible."""
        if num_tokens <= allocation.capacity:
            return True
        missing = allocation.layout.num_blocks_for(num_tokens) - allocation.num_blocks
        if missing > self.num_available:
            return False
        allocation.layout.extend_to(num_tokens)
        short = missing - self._allocator.num_free
        if short > 0:
            self._allocator.free(self._tree.evict(short))
        allocation.block_ids.extend(self._allocator.allocate(missing))
        allocation.capacity = allocation.layout.ends[allocation.num_blocks - 1]
        return True

    def commit(self, allocation: Allocation, token_ids: Sequence[int], num_computed: int) -> None:
        """Share the sealed blocks among the first `num_computed` tokens, whose KV is in the pool.

        Where another request has put the same block into the tree meanwhile, this request takes over that one and its
        own is freed.
        """
        first, ends = allocation.num_shared, allocation.layout.ends
        if not self._enabled or allocation.is_private or num_computed < ends[min(first, len(ends) - 1)]:
            return
        last = allocation.layout.num_sealed(num_computed)
        if last <= first:
            return
        keys = allocation.layout.make_keys(token_ids, last, self._scope_ids)
        own = allocation.block_ids.first(last)[first:].tolist()
        blocks, allocation.node = self._tree.insert(allocation.node, keys[first:last], own)
        self._allocator.free(mine for mine, theirs in zip(own, blocks, strict=True) if mine != theirs)
        allocation.block_ids.replace(first, blocks)
        allocation.num_shared = last
        self._withdraw(allocation, last)

    def close(self, allocation: Allocation) -> None:
        """End a request: its shared blocks become evictable, its private ones free."""
        self._live.remove(allocation)
        self._withdraw(allocation, len(allocation.layout.paths))
        self._tree.unlock(allocation.node)
        self._allocator.free(allocation.held)
        allocation.block_ids = IntColumn(())
        allocation.num_shared = 0

    def counts(self) -> CacheCounts:
        """Where all blocks are now."""
        held = sum(a.num_blocks - a.num_shared for a in self._live)
        tree = self._tree
        return CacheCounts(
            self._allocator.num_free, tree.num_evictable, tree.num_protected, held, self.num_blocks, tree.num_pinned
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a block is in two places or in none, or a count is wrong (I1, I2)."""
        self._tree.check_integrity()
        free = self._allocator.free_ids()
        cached = [b for node in self._tree.nodes() for b in node.blocks]
        held = [b for a in self._live for b in a.held]
        everywhere = [*free, *cached, *held]
        assert len(set(everywhere)) == len(everywhere), "a block is in two places"
        assert len(everywhere) == self.num_blocks, f"{self.num_blocks - len(everywhere)} blocks are nowhere"
        shared = set(cached)
        for allocation in self._live:
            assert shared.issuperset(allocation.block_ids.first(allocation.num_shared).tolist()), (
                "a shared block left the tree"
            )
        assert self._live.issuperset(self._announced.values()), "blocks are announced by a request that has ended"
        counts = self.counts()
        assert counts.free + counts.evictable + counts.protected + counts.held == counts.total, f"I1 fails: {counts}"
        assert counts.pinned <= self._pin_budget, f"{counts.pinned} blocks are pinned, {self._pin_budget} may be"

    def _withdraw(self, allocation: Allocation, last: int) -> None:
        """Take back what was announced of the blocks below `last`."""
        announced = allocation.announced
        for i in range(announced.start, min(announced.stop, last)):
            path = allocation.layout.paths[i]
            if self._announced.get(path) is allocation:
                del self._announced[path]
        allocation.announced = range(max(announced.start, min(announced.stop, last)), announced.stop)
