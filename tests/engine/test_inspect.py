"""Views of an engine at work, in an exact small world."""

from __future__ import annotations

import msgspec

from engine.api import EngineRequest, SamplingParams, Segment
from engine.cache import CacheManager
from engine.inspect import MAX_PREFIXES, view_of
from engine.scheduler import Scheduler
from engine.step import StepResult


class World:
    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self.cache = CacheManager(num_blocks)
        self.scheduler = Scheduler(
            self.cache, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, clock=lambda: self.now
        )

    def add(
        self, name: str, first: int, num: int, max_tokens: int = 4, priority: int = 0, scope: str = "shared"
    ) -> None:
        segment = Segment(tuple(range(first, first + num)), scope=scope)
        self.scheduler.add(EngineRequest(name, (segment,), SamplingParams(max_tokens=max_tokens), priority))

    def step(self) -> None:
        out = self.scheduler.schedule()
        self.scheduler.update(out, {r.key: StepResult(7) for r in out.requests if r.needs_token})

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_requests_are_shown_with_tokens_ages_and_blocks() -> None:
    w = World(num_blocks=4)
    w.add("a", 100, 33)
    w.now = 2.0
    w.step()
    w.add("b", 500, 40, max_tokens=9, priority=3)
    w.now = 5.0
    w.step()
    view = view_of(w.scheduler, w.cache)
    a, b = view.requests
    assert (a.request_id, a.state, a.age_s, a.num_prompt_tokens, a.num_computed_tokens) == ("a", "running", 5.0, 33, 34)
    assert (a.num_output_tokens, a.num_blocks, a.num_own_blocks, a.max_tokens) == (2, 3, 1, 4)
    assert (b.request_id, b.state, b.age_s, b.priority, b.num_blocks, b.max_tokens) == ("b", "waiting", 3.0, 3, 0, 9)
    pool = view.pool
    assert pool.free + pool.evictable + pool.protected + pool.held == pool.total == 4
    assert (pool.protected, pool.held, pool.free) == (2, 1, 1)


def test_the_largest_prefixes_are_listed_with_scope_and_without_content() -> None:
    w = World(num_blocks=256)
    for i in range(MAX_PREFIXES + 5):
        w.add(f"s{i}", 1000 * (i + 1), 20 + 16 * (i % 3))
    w.add("big", 50_000, 100, scope="acme")
    w.run()
    w.add("use", 50_000, 100, scope="acme", max_tokens=50)
    w.step()
    view = view_of(w.scheduler, w.cache)
    assert view.num_prefixes == MAX_PREFIXES + 6
    assert len(view.prefixes) == MAX_PREFIXES
    sizes = [p.num_tokens for p in view.prefixes]
    assert sizes == sorted(sizes, reverse=True)
    first, second = view.prefixes[:2]
    assert (first.num_tokens, first.num_blocks, first.scope, first.is_protected) == (96, 6, "acme", True)
    assert (second.num_tokens, second.scope, second.is_protected) == (48, "shared", False)
    assert 0 <= first.idle_s < 60
    assert b"50001" not in msgspec.json.encode(view)
    before = w.cache.counts()
    assert view_of(w.scheduler, w.cache).prefixes[0].num_tokens == 96
    assert w.cache.counts() == before


def test_a_branch_counts_the_tokens_above_it() -> None:
    w = World(num_blocks=64)
    head = tuple(range(64))
    for i in range(2):
        segments = (Segment(head), Segment(tuple(range(1000 * i + 900, 1000 * i + 940))))
        w.scheduler.add(EngineRequest(f"r{i}", segments, SamplingParams(max_tokens=1)))
        w.run()
    assert [p.num_tokens for p in view_of(w.scheduler, w.cache).prefixes] == [64 + 32, 64 + 32]
