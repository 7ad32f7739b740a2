"""The one owner of KV blocks: allocator and prefix tree behind the operations a scheduler needs.

At any moment each block is in exactly one place (invariant I1): free, in the tree and evictable, in the tree and
protected by a lock, or held privately by one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.allocator import BlockAllocator
from engine.layout import BlockLayout, block_keys
from engine.radix import RadixCache, RadixNode


@dataclass(slots=True, eq=False)
class Allocation:
    """Blocks of one running request. Made and changed by `CacheManager` alone; callers only read `block_ids`."""

    layout: BlockLayout
    block_ids: list[int]
    num_shared: int
    """Leading blocks that belong to the tree; the rest are held privately."""
    node: RadixNode
    """Locked handle on the last shared block."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the leading sealed blocks, as far as they were needed."""


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Where all blocks are (I1: the four add up to `total`)."""

    free: int
    evictable: int
    protected: int
    held: int
    total: int


class CacheManager:
    """Finds, reserves, shares and frees the KV blocks of requests."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self._allocator = BlockAllocator(num_blocks)
        self._tree = RadixCache()
        self._enabled = enable_prefix_caching
        self._scope_ids: dict[str, int] = {}
        self._live: set[Allocation] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._allocator.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that could be reserved now: free or evictable."""
        return self._allocator.num_free + self._tree.num_evictable

    def open(self, layout: BlockLayout, token_ids: Sequence[int]) -> tuple[Allocation, int]:
        """Start a request: lock the longest cached prefix and return it with the number of tokens it covers.

        The match is shorter than the sequence (I3), since its last token must be computed to give logits.
        """
        last = layout.num_sealed(len(token_ids) - 1) if self._enabled else 0
        keys = block_keys(layout, token_ids, 0, last, self._scope_ids)
        blocks, node = self._tree.match(keys)
        self._tree.lock(node)
        allocation = Allocation(layout, blocks, len(blocks), node, keys)
        self._live.add(allocation)
        return allocation, layout.ends[len(blocks) - 1] if blocks else 0

    def reserve(self, allocation: Allocation, num_tokens: int) -> bool:
        """Give the request blocks for its first `num_tokens` tokens, evicting if needed; False if impossible."""
        allocation.layout.extend_to(num_tokens)
        missing = allocation.layout.num_blocks_for(num_tokens) - len(allocation.block_ids)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        short = missing - self._allocator.num_free
        if short > 0:
            self._allocator.free(self._tree.evict(short))
        allocation.block_ids += self._allocator.allocate(missing)
        return True

    def commit(self, allocation: Allocation, token_ids: Sequence[int], num_computed: int) -> None:
        """Share the sealed blocks among the first `num_computed` tokens, whose KV is in the pool.

        Where another request has put the same block into the tree meanwhile, this request takes over that one and its
        own is freed.
        """
        if not self._enabled:
            return
        first, last = allocation.num_shared, allocation.layout.num_sealed(num_computed)
        if last <= first:
            return
        have = len(allocation.keys)
        if last > have:
            allocation.keys += block_keys(allocation.layout, token_ids, have, last, self._scope_ids)
        own = allocation.block_ids[first:last]
        blocks, allocation.node = self._tree.insert(allocation.node, allocation.keys[first:last], own)
        self._allocator.free(mine for mine, theirs in zip(own, blocks, strict=True) if mine != theirs)
        allocation.block_ids[first:last] = blocks
        allocation.num_shared = last

    def close(self, allocation: Allocation) -> None:
        """End a request: its shared blocks become evictable, its private ones free."""
        self._live.remove(allocation)
        self._tree.unlock(allocation.node)
        self._allocator.free(allocation.block_ids[allocation.num_shared :])
        allocation.block_ids = []
        allocation.num_shared = 0

    def counts(self) -> CacheCounts:
        """Where all blocks are now."""
        held = sum(len(a.block_ids) - a.num_shared for a in self._live)
        return CacheCounts(
            self._allocator.num_free, self._tree.num_evictable, self._tree.num_protected, held, self.num_blocks
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a block is in two places or in none, or a count is wrong (I1, I2)."""
        self._tree.check_integrity()
        free = self._allocator.free_ids()
        cached = [b for node in self._tree.nodes() for b in node.blocks]
        held = [b for a in self._live for b in a.block_ids[a.num_shared :]]
        everywhere = [*free, *cached, *held]
        assert len(set(everywhere)) == len(everywhere), "a block is in two places"
        assert len(everywhere) == self.num_blocks, f"{self.num_blocks - len(everywhere)} blocks are nowhere"
        shared = set(cached)
        for allocation in self._live:
            assert shared.issuperset(allocation.block_ids[: allocation.num_shared]), "a shared block left the tree"
        counts = self.counts()
        assert counts.free + counts.evictable + counts.protected + counts.held == counts.total, f"I1 fails: {counts}"
