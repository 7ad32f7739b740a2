"""The one owner of KV blocks: allocator and prefix tree behind the operations a scheduler needs.

At any moment each block is in exactly one place (invariant I1): free, in the tree and evictable, in the tree and
protected by a lock, or held privately by one request.

A request may also borrow blocks from another place in the tree (`link`): a passage that was computed right behind the
same system text stands for the same passage further on, its keys turned by the difference of the positions. What is
computed behind borrowed blocks is approximate, so from the first of them on nothing enters the tree (I8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.allocator import BlockAllocator
from engine.api import BLOCK_SIZE
from engine.layout import BlockLayout, IntColumn, Passage
from engine.radix import RadixCache, RadixNode


@dataclass(frozen=True, slots=True)
class Link:
    """A passage whose blocks first_block..last_block-1 are borrowed."""

    passage: Passage
    first_block: int
    blocks: list[int]
    delta: int
    """Its position here less its position there."""
    node: RadixNode
    """Locked handle on its last block."""


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
    is_used: bool = False
    """Whether it ever got blocks; one that was only looked up is no use of what it found."""
    links: list[Link] = field(default_factory=list)
    """Borrowed blocks, in order."""
    deltas: IntColumn = field(default_factory=lambda: IntColumn(()))
    """Rotary delta of each block, where any are borrowed."""

    @property
    def num_blocks(self) -> int:
        """Blocks it has."""
        return len(self.block_ids)

    @property
    def num_exact(self) -> int:
        """Leading blocks that may ever be shared: those before the first that is borrowed."""
        return self.links[0].first_block if self.links else len(self.layout.starts)

    @property
    def borrowed(self) -> dict[int, int]:
        """Index in the table -> id of the borrowed blocks."""
        return {link.first_block + i: block for link in self.links for i, block in enumerate(link.blocks)}

    @property
    def held(self) -> list[int]:
        """Ids of the blocks that are its own."""
        own = self.block_ids.tolist()[self.num_shared :]
        if not self.links:
            return own
        borrowed = self.borrowed
        return [block for i, block in enumerate(own, self.num_shared) if i not in borrowed]


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

    def link(self, allocation: Allocation, num_recomputed: int) -> list[Passage]:
        """Borrow the passages behind the cached prefix from behind the system segments, all but their first blocks.

        Args: num_recomputed, tokens at each one's beginning, in whole blocks, that the request computes itself. Called
        between `open` and `reserve`. Returns the passages that are not there: nobody has computed them at that place.
        """
        layout, missing = allocation.layout, []
        for passage in layout.passages:
            first = max(passage.first_block + num_recomputed // BLOCK_SIZE, allocation.num_shared)
            if first >= passage.last_block:
                continue
            keys = compiled_keys(layout, passage)
            blocks, node = self._tree.match(keys)
            self._tree.lock(node)
            if len(blocks) < len(keys):
                self._tree.unlock(node, is_use=False)
                missing.append(passage)
                continue
            delta = layout.starts[passage.first_block] - layout.num_system_tokens
            borrowed = blocks[first - passage.last_block :]
            allocation.links.append(Link(passage, first, borrowed, delta, node))
        return missing

    def unlink(self, allocation: Allocation) -> None:
        """Give the borrowed blocks back, before `reserve`."""
        for link in allocation.links:
            self._tree.unlock(link.node, allocation.is_used)
        allocation.links.clear()

    def announce(self, allocation: Allocation, num_tokens: int) -> None:
        """Say that the request will compute and share its sealed blocks below `num_tokens`, its known tokens."""
        if not self._enabled or allocation.is_private:
            return
        last = min(allocation.layout.num_sealed(num_tokens), len(allocation.layout.paths), allocation.num_exact)
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
        first, last = allocation.num_blocks, allocation.layout.num_blocks_for(num_tokens)
        borrowed = {i: block for i, block in allocation.borrowed.items() if first <= i < last}
        missing = last - first - len(borrowed)
        if missing > self.num_available:
            return False
        allocation.layout.extend_to(num_tokens)
        short = missing - self._allocator.num_free
        if short > 0:
            self._allocator.free(self._tree.evict(short))
        fresh = self._allocator.allocate(missing)
        allocation.is_used = True
        if allocation.links:
            own = iter(fresh)
            fresh = [borrowed[i] if i in borrowed else next(own) for i in range(first, last)]
            self._extend_deltas(allocation, last)
        allocation.block_ids.extend(fresh)
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
        last = min(allocation.layout.num_sealed(num_computed), allocation.num_exact)
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
        self._tree.unlock(allocation.node, allocation.is_used)
        self._allocator.free(allocation.held)
        self.unlink(allocation)
        allocation.block_ids = IntColumn(())
        allocation.num_shared = 0

    def counts(self) -> CacheCounts:
        """Where all blocks are now."""
        held = sum(len(a.held) for a in self._live)
        tree = self._tree
        return CacheCounts(
            self._allocator.num_free, tree.num_evictable, tree.num_protected, held, self.num_blocks, tree.num_pinned
        )

    def nodes(self) -> Iterator[RadixNode]:
        """The tree's nodes, parents first, to look at only."""
        return self._tree.nodes()

    def scope_of(self, node: RadixNode) -> str:
        """Scope of a node's last block."""
        number = int.from_bytes(node.keys[-1][:4], "little")
        return list(self._scope_ids)[number]

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
            assert shared.issuperset(allocation.borrowed.values()), "a borrowed block left the tree"
            assert all(link.node.locks for link in allocation.links), "a borrowed block is not locked"
            assert allocation.num_shared <= allocation.num_exact, "an approximate block is shared"
        assert self._live.issuperset(self._announced.values()), "blocks are announced by a request that has ended"
        counts = self.counts()
        assert counts.free + counts.evictable + counts.protected + counts.held == counts.total, f"I1 fails: {counts}"
        assert counts.pinned <= self._pin_budget, f"{counts.pinned} blocks are pinned, {self._pin_budget} may be"

    def _extend_deltas(self, allocation: Allocation, num_blocks: int) -> None:
        deltas = [0] * (num_blocks - len(allocation.deltas))
        for link in allocation.links:
            for i in range(link.first_block, link.passage.last_block):
                if len(allocation.deltas) <= i < num_blocks:
                    deltas[i - len(allocation.deltas)] = link.delta
        allocation.deltas.extend(deltas)

    def _withdraw(self, allocation: Allocation, last: int) -> None:
        """Take back what was announced of the blocks below `last`."""
        announced = allocation.announced
        for i in range(announced.start, min(announced.stop, last)):
            path = allocation.layout.paths[i]
            if self._announced.get(path) is allocation:
                del self._announced[path]
        allocation.announced = range(max(announced.start, min(announced.stop, last)), announced.stop)


def compiled_keys(layout: BlockLayout, passage: Passage) -> list[bytes]:
    """Keys of [system][passage], of a layout whose keys are made: where a passage is computed to be borrowed."""
    return layout.keys[: layout.num_system_blocks] + layout.keys[passage.first_block : passage.last_block]
