"""Allocator, radix tree and cache manager in exact small worlds, and against a brute-force model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from engine.allocator import BlockAllocator
from engine.api import Segment, SegmentKind
from engine.cache import Allocation, CacheManager
from engine.layout import BlockLayout
from engine.radix import RadixCache


def make_layout(*lengths: int, scopes: tuple[str, ...] | None = None) -> tuple[BlockLayout, list[int]]:
    """A layout of segments of these lengths, with token ids 0, 1, 2, ... over all of them."""
    ids = iter(range(sum(lengths)))
    segments = [
        Segment(tuple(next(ids) for _ in range(n)), scope=scopes[i] if scopes else "shared")
        for i, n in enumerate(lengths)
    ]
    return BlockLayout(segments), list(range(sum(lengths)))


def test_allocator_hands_out_each_id_once_and_refuses_double_free() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(3) == [0, 1, 2]
    with pytest.raises(MemoryError, match="2 KV blocks asked for, 1 free"):
        allocator.allocate(2)
    allocator.free([1])
    assert allocator.allocate(2) == [1, 3]
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free([0, 0])


def test_each_segment_starts_on_a_fresh_block_and_only_the_last_is_open() -> None:
    layout, _ = make_layout(20, 3, 5)
    assert layout.starts == [0, 16, 20, 23]
    assert layout.ends == [16, 20, 23, 39]
    assert [layout.num_sealed(n) for n in (15, 16, 20, 23, 28, 39)] == [0, 1, 2, 3, 3, 4]
    assert [layout.num_blocks_for(n) for n in (1, 16, 17, 21, 24, 39, 40, 56)] == [1, 1, 2, 3, 4, 4, 5, 6]
    layout.extend_to(41)
    assert layout.starts[4:] == [39]
    ids = np.array([7, 2, 9, 1, 5], np.int32)
    assert layout.slots(ids, 18, 41).tolist() == [34, 35, 144, 145, 146, *range(16, 32), 80, 81]
    assert layout.slots(ids, 22, 23).tolist() == [146]
    assert [c.tolist() for c in layout.columns(41)] == [[0, 16, 20, 23, 39], [16, 4, 3, 16, 2]]
    assert [c.tolist() for c in layout.columns(18)] == [[0, 16], [16, 2]]


def test_keys_are_scope_and_tokens_whole() -> None:
    layout, tokens = make_layout(16, 2, 16, scopes=("shared", "a", "a"))
    scopes: dict[str, int] = {}
    keys = list(layout.make_keys(tokens, 3, scopes))
    assert scopes == {"shared": 0, "a": 1}
    assert [len(k) for k in keys] == [4 + 64, 4 + 8, 4 + 64]
    assert layout.make_keys(tokens, 2, scopes) == keys[:2]
    same, _ = make_layout(16, 2, 16, scopes=("shared", "b", "b"))
    assert same.make_keys(tokens, 3, scopes)[0] == keys[0]
    assert same.keys[1] != keys[1]
    assert same.paths[:1] == layout.paths[:1]
    assert not set(same.paths[1:]) & set(layout.paths[1:])


def test_tree_splits_and_keeps_handles_true() -> None:
    tree = RadixCache()
    a, b, c, d = (bytes([x]) for x in range(4))
    blocks, node = tree.insert(tree.root, [a, b, c], [0, 1, 2])
    assert blocks == [0, 1, 2]
    found, upper = tree.match([a, b, d])
    assert found == [0, 1]
    tree.lock(upper)
    blocks, other = tree.insert(upper, [d], [3])
    assert blocks == [3]
    assert (tree.num_protected, tree.num_evictable) == (4, 0)
    tree.unlock(node)
    assert (tree.num_protected, tree.num_evictable) == (3, 1)
    assert tree.evict(4) == [2]
    tree.unlock(other)
    tree.check_integrity()
    assert sorted(tree.evict(9)) == [0, 1, 3]
    assert tree.match([a]) == ([], tree.root)


def test_insert_keeps_the_first_block_of_a_key() -> None:
    tree = RadixCache()
    tree.insert(tree.root, [b"a", b"b"], [0, 1])
    blocks, _ = tree.insert(tree.root, [b"a", b"c"], [5, 6])
    assert blocks == [0, 6]
    tree.check_integrity()


def test_eviction_takes_the_least_recently_released_from_its_end() -> None:
    tree = RadixCache()
    _, first = tree.insert(tree.root, [b"a", b"b"], [0, 1])
    _, second = tree.insert(tree.root, [b"c", b"d"], [2, 3])
    tree.unlock(second)
    tree.unlock(first)
    assert tree.evict(3) == [2, 3, 1]
    assert tree.match([b"a", b"b"])[0] == [0]


def use(tree: RadixCache, keys: list[bytes], first: int = 0) -> list[int]:
    """Find or store a path and let it go; returns its blocks."""
    found, node = tree.match(keys)
    tree.lock(node)
    blocks, node = tree.insert(node, keys[len(found) :], list(range(first, first + len(keys) - len(found))))
    tree.unlock(node)
    tree.check_integrity()
    return found + blocks


def test_what_is_used_often_outlives_what_passes_by_once() -> None:
    tree = RadixCache()
    for _ in range(3):
        use(tree, [b"often"], 0)
    for i in range(1, 6):
        use(tree, [b"once %d" % i], i)
    assert tree.evict(3) == [1, 2, 3]
    assert tree.match([b"often"])[0] == [0]


def test_what_was_used_often_long_ago_gives_way() -> None:
    tree = RadixCache()
    for _ in range(3):
        use(tree, [b"long ago"], 0)
    for i in range(1, 9):
        for _ in range(2):
            use(tree, [b"lately %d" % i], i)
        if len(list(tree.nodes())) > 3:
            tree.evict(1)
    assert tree.match([b"long ago"])[0] == []


def test_the_uses_of_what_was_evicted_are_remembered() -> None:
    tree = RadixCache()
    for _ in range(3):
        use(tree, [b"a"], 0)
    assert tree.evict(1) == [0]
    use(tree, [b"a"], 0)
    for i in (1, 2):
        use(tree, [b"b%d" % i], i)
    assert tree.evict(2) == [1, 2]


def test_a_look_that_leads_to_nothing_is_no_use() -> None:
    cache = CacheManager(8)
    run_to_end(cache, *make_layout(20, 5))
    layout, tokens = make_layout(20, 5)
    for _ in range(9):
        cache.close(cache.open(layout, tokens)[0])
    assert [n.num_uses for n in cache._tree.nodes()] == [1]


def run_to_end(cache: CacheManager, layout: BlockLayout, tokens: list[int]) -> int:
    """Open, compute all, close; returns the cached tokens."""
    allocation, cached = cache.open(layout, tokens)
    assert cache.reserve(allocation, len(tokens))
    cache.commit(allocation, tokens, len(tokens))
    cache.close(allocation)
    cache.check_integrity()
    return cached


@pytest.mark.parametrize(("n", "cached"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_full_hit_in_one_segment_leaves_at_least_one_token(n: int, cached: int) -> None:
    cache = CacheManager(8)
    assert run_to_end(cache, *make_layout(n)) == 0
    assert run_to_end(cache, *make_layout(n)) == cached


def test_finished_segments_are_shared_with_their_partly_filled_blocks() -> None:
    cache = CacheManager(16)
    assert run_to_end(cache, *make_layout(20, 3, 5)) == 0
    assert run_to_end(cache, *make_layout(20, 3, 5)) == 23
    assert run_to_end(cache, *make_layout(20, 8)) == 20


def test_scopes_never_mix_but_share_what_is_marked_shared() -> None:
    cache = CacheManager(16)
    run_to_end(cache, *make_layout(16, 16, 4, scopes=("shared", "a", "a")))
    assert run_to_end(cache, *make_layout(16, 16, 4, scopes=("shared", "b", "b"))) == 16
    assert run_to_end(cache, *make_layout(16, 16, 4, scopes=("shared", "a", "a"))) == 32
    assert run_to_end(cache, *make_layout(16, 16, 4, scopes=("c", "c", "c"))) == 0


def test_two_requests_that_computed_the_same_block_keep_one_copy() -> None:
    cache = CacheManager(8)
    (layout_a, tokens), (layout_b, _) = make_layout(40), make_layout(40)
    a, _ = cache.open(layout_a, tokens)
    b, _ = cache.open(layout_b, tokens)
    assert cache.reserve(a, 40)
    assert cache.reserve(b, 40)
    assert cache.counts().free == 2
    cache.commit(a, tokens, 40)
    cache.commit(b, tokens, 40)
    assert a.block_ids.tolist()[:2] == b.block_ids.tolist()[:2]
    assert cache.counts().free == 4
    cache.check_integrity()


def test_a_locked_prefix_is_never_evicted() -> None:
    cache = CacheManager(4)
    layout, tokens = make_layout(48)
    a, _ = cache.open(layout, tokens)
    assert cache.reserve(a, 48)
    cache.commit(a, tokens, 48)
    other, other_tokens = BlockLayout([Segment(tuple(range(900, 932)))]), list(range(900, 932))
    b, _ = cache.open(other, other_tokens)
    assert not cache.reserve(b, 32)
    assert cache.reserve(b, 16)
    cache.close(a)
    assert cache.reserve(b, 32)
    cache.check_integrity()


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = CacheManager(8, enable_prefix_caching=False)
    assert run_to_end(cache, *make_layout(40)) == 0
    assert run_to_end(cache, *make_layout(40)) == 0
    assert cache.counts().free == 8


def test_equal_path_numbers_are_no_identity() -> None:
    cache = CacheManager(16)
    (one, tokens), (other, _) = make_layout(40), make_layout(40)
    different = [t + 1 for t in tokens]
    a, _ = cache.open(one, tokens)
    cache.announce(a, 40)
    b, cached = cache.open(other, different)
    other.paths[:] = one.paths
    assert cached == 0
    assert cache.in_flight(b) is None
    same, _ = cache.open(make_layout(40)[0], tokens)
    assert cache.in_flight(same) is a
    cache.close(a)
    assert cache.in_flight(same) is None


def used(cache: CacheManager, *lengths: int, start: int, times: int = 2) -> None:
    """Run a prompt whose first segment is a system text."""
    for _ in range(times):
        at, segments = start, []
        for i, n in enumerate(lengths):
            kind = SegmentKind.PASSAGE if i else SegmentKind.SYSTEM
            segments.append(Segment(tuple(range(at, at + n)), kind))
            at += n
        run_to_end(cache, BlockLayout(segments), list(range(start, at)))


def test_a_system_text_used_twice_is_evicted_last() -> None:
    cache = CacheManager(12, pin_budget=4)
    used(cache, 40, 20, start=0)
    assert cache.counts().pinned == 3
    for i in range(1, 6):
        used(cache, 64, start=1000 * i, times=1)
    layout = BlockLayout([Segment(tuple(range(40)), SegmentKind.SYSTEM), Segment((7,) * 20)])
    assert run_to_end(cache, layout, [*range(40), *[7] * 20]) == 40
    # It is no obstacle: a request that needs every block gets them.
    ids = list(range(9000, 9192))
    big, _ = cache.open(BlockLayout([Segment(tuple(ids))]), ids)
    assert cache.reserve(big, 192)
    assert cache.counts().pinned == 0
    cache.check_integrity()


def test_the_least_recently_used_pins_give_way_to_the_budget() -> None:
    cache = CacheManager(32, pin_budget=5)
    used(cache, 32, 5, start=0)
    used(cache, 32, 5, start=1000)
    assert cache.counts().pinned == 4
    used(cache, 33, 5, start=2000)
    assert cache.counts().pinned == 5
    used(cache, 96, 5, start=3000)
    assert cache.counts().pinned == 5, "a text beyond the budget is not pinned"
    no_pins = CacheManager(32)
    used(no_pins, 32, 5, start=0)
    assert no_pins.counts().pinned == 0


def test_offers_to_evict_do_not_pile_up() -> None:
    cache = CacheManager(32)
    for _ in range(500):
        run_to_end(cache, *make_layout(20, 20, 5))
    assert len(cache._tree._heap) < 100


class CacheMachine(RuleBasedStateMachine):
    """Random opens, reservations, commits and closes against a model that remembers every inserted prefix."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(24, pin_budget=6)
        self.content: dict[int, tuple[tuple[int, ...], int]] = {}
        self.progress: dict[int, tuple[Allocation, list[int], int]] = {}
        self.serial = 0

    @rule(
        target=running,
        lengths=st.lists(st.sampled_from([1, 5, 16, 17, 33]), min_size=1, max_size=3),
        seed=st.integers(0, 2),
    )
    def open(self, lengths: list[int], seed: int) -> int:
        tokens = [(seed * (i // 8)) % 3 for i in range(sum(lengths))]
        at, segments = 0, []
        for n in lengths:
            kind = SegmentKind.PASSAGE if segments else SegmentKind.SYSTEM
            segments.append(Segment(tuple(tokens[at : at + n]), kind))
            at += n
        allocation, cached = self.cache.open(BlockLayout(segments), tokens)
        assert cached < len(tokens)
        self.verify_content(allocation, tokens, cached)
        self.serial += 1
        self.progress[self.serial] = (allocation, tokens, cached)
        return self.serial

    @rule(key=running, n=st.integers(1, 40))
    def compute(self, key: int, n: int) -> None:
        allocation, tokens, done = self.progress[key]
        upto = min(done + n, len(tokens))
        if not self.cache.reserve(allocation, upto):
            return
        for i, block in enumerate(allocation.block_ids.tolist()):
            end = min(allocation.layout.ends[i], upto)
            if end > done:
                self.content[block] = (tuple(tokens[:end]), allocation.layout.starts[i])
        self.cache.commit(allocation, tokens, upto)
        self.progress[key] = (allocation, tokens, upto)
        self.verify_content(allocation, tokens, upto)

    @rule(key=consumes(running))
    def close(self, key: int) -> None:
        self.cache.close(self.progress.pop(key)[0])

    def verify_content(self, allocation: Allocation, tokens: list[int], upto: int) -> None:
        """Each block holds exactly the KV of these tokens at this place after this context."""
        for i, block in enumerate(allocation.block_ids.tolist()):
            start, end = allocation.layout.starts[i], min(allocation.layout.ends[i], upto)
            if end > start:
                held, held_start = self.content[block]
                assert held_start == start
                assert held[:end] == tuple(tokens[:end])

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()

    @precondition(lambda self: not self.progress)
    @invariant()
    def idle_means_free_or_cached(self) -> None:
        counts = self.cache.counts()
        assert counts.free + counts.evictable == counts.total


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
