"""The scheduler in exact small worlds: which tokens, which order, which blocks; no model."""

from __future__ import annotations

import pytest

from engine.api import EngineRequest, FinishReason, SamplingParams, Segment
from engine.cache import CacheManager
from engine.scheduler import Scheduler, SchedulerOutput


class World:
    """A scheduler, and a model that always answers 7."""

    def __init__(
        self, num_blocks: int = 64, budget: int = 32, seqs: int = 8, max_len: int = 512, **extra: bool
    ) -> None:
        self.now = 0.0
        self.cache = CacheManager(num_blocks)
        self.scheduler = Scheduler(
            self.cache,
            max_model_len=max_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            eos_token_ids=frozenset({2}),
            clock=lambda: self.now,
            **extra,
        )

    def add(self, name: str, n: int, max_tokens: int = 4, first: int = 100, **params: object) -> None:
        tokens = tuple(range(first, first + n))
        self.scheduler.add(EngineRequest(name, (Segment(tokens),), SamplingParams(max_tokens=max_tokens, **params)))

    def step(self, token: int = 7) -> SchedulerOutput:
        out = self.scheduler.schedule()
        assert out.num_tokens <= 32
        self.scheduler.update(out, {r.request_id: token for r in out.requests if r.needs_token})
        self.scheduler.check_integrity()
        return out

    def run(self, limit: int = 500) -> int:
        steps = 0
        while self.scheduler.has_work:
            assert self.step().requests, "a step did nothing although there is work"
            steps += 1
            assert steps < limit
        return steps


def shape(out: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(r.request_id, r.start, len(r.token_ids)) for r in out.requests]


def test_a_prompt_is_prefilled_in_chunks_while_a_running_answer_goes_first() -> None:
    w = World()
    w.add("a", 5)
    assert shape(w.step()) == [("a", 0, 5)]
    w.add("b", 70, first=1000)
    assert shape(w.step()) == [("a", 5, 1), ("b", 0, 31)]
    assert shape(w.step()) == [("a", 6, 1), ("b", 31, 31)]
    assert shape(w.step()) == [("a", 7, 1), ("b", 62, 8)]
    assert shape(w.step()) == [("b", 70, 1)]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    w = World(max_len=32, enable_chunked_prefill=False)
    w.add("a", 20)
    w.add("b", 20, first=1000)
    assert shape(w.step()) == [("a", 0, 20)]
    assert shape(w.step()) == [("a", 20, 1), ("b", 0, 20)]
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        World(max_len=64, enable_chunked_prefill=False)


def test_the_second_request_computes_only_what_is_not_cached() -> None:
    w = World()
    w.add("a", 20, max_tokens=1)
    w.run()
    w.add("b", 20, max_tokens=1)
    assert shape(w.step()) == [("b", 16, 4)]
    assert w.scheduler.counters.prefix_tokens == 16


def test_a_request_starts_with_what_another_has_computed_so_far() -> None:
    w = World()
    w.add("a", 60, max_tokens=1)
    w.add("b", 60, max_tokens=1)
    assert shape(w.step()) == [("a", 0, 32)]
    assert shape(w.step()) == [("a", 32, 28), ("b", 32, 4)]


def test_ends_by_end_token_length_and_abort() -> None:
    w = World()
    w.add("eos", 3)
    w.add("length", 3, max_tokens=2, ignore_eos=True, first=200)
    w.add("stop-id", 3, first=300, stop_token_ids=(7,))
    requests = {r.request_id: r for r in w.scheduler.requests()}
    w.step(token=2)
    assert requests["eos"].finish_reason is FinishReason.STOP
    w.step(token=7)
    assert requests["length"].finish_reason is FinishReason.LENGTH
    assert requests["stop-id"].finish_reason is FinishReason.STOP
    w.add("gone", 3, first=400)
    w.step()
    aborted = w.scheduler.abort("gone")
    assert aborted is not None
    assert aborted.finish_reason is FinishReason.ABORT
    assert w.scheduler.abort("gone") is None
    counts = w.cache.counts()
    assert counts.free + counts.evictable == counts.total


def test_preemption_takes_the_latest_arrival_and_everyone_ends() -> None:
    w = World(num_blocks=5)
    w.add("old", 20, max_tokens=44, ignore_eos=True)
    w.add("new", 20, max_tokens=44, ignore_eos=True, first=1000)
    requests = {r.request_id: r for r in w.scheduler.requests()}
    w.run()
    assert requests["old"].num_preemptions == 0
    assert requests["new"].num_preemptions >= 1
    assert all(r.finish_reason is FinishReason.LENGTH for r in requests.values())
    assert all(r.num_output_tokens == 44 for r in requests.values())


def test_eight_long_answers_in_a_pool_for_one_and_a_half_all_end() -> None:
    w = World(num_blocks=12)
    for i in range(8):
        w.add(f"r{i}", 30, max_tokens=90, ignore_eos=True, first=1000 * i)
    requests = w.scheduler.requests()
    w.run(limit=3000)
    assert all(r.num_output_tokens == 90 for r in requests)
    assert max(r.num_preemptions for r in requests) <= 90


@pytest.mark.parametrize(
    ("n", "max_tokens", "why"),
    [(0, 1, "empty"), (512, 1, "max_model_len is 512"), (400, 100, "KV blocks")],
)
def test_what_can_never_run_is_refused_by_name(n: int, max_tokens: int, why: str) -> None:
    w = World(num_blocks=26)
    with pytest.raises(ValueError, match=why):
        w.add("x", n, max_tokens=max_tokens)
    assert not w.scheduler.has_work


def test_a_scope_may_narrow_but_never_widen() -> None:
    w = World()
    ok = (Segment((1,)), Segment((2,), scope="a"), Segment((3,), scope="a"))
    w.scheduler.add(EngineRequest("ok", ok))
    with pytest.raises(ValueError, match="scope"):
        w.scheduler.add(EngineRequest("bad", (Segment((1,), scope="a"), Segment((2,)))))


def test_a_fault_of_the_model_ends_only_that_request() -> None:
    w = World()
    w.add("a", 3)
    w.add("b", 3, first=200)
    requests = {r.request_id: r for r in w.scheduler.requests()}
    out = w.scheduler.schedule()
    w.scheduler.update(out, {"a": "the model gave non-finite logits", "b": 7})
    assert requests["a"].finish_reason is FinishReason.ERROR
    assert requests["a"].error == "the model gave non-finite logits"
    w.run()
    assert requests["b"].finish_reason is FinishReason.LENGTH


def test_statistics_say_what_each_segment_cost() -> None:
    w = World(budget=32)
    segments = (Segment(tuple(range(20))), Segment((50, 51, 52)), Segment((60, 61)))
    for name in ("cold", "warm"):
        w.scheduler.add(EngineRequest(name, segments, SamplingParams(max_tokens=1)))
        (request,) = w.scheduler.requests()
        w.run()
    stats = request.stats()
    assert [(s.prefix, s.computed) for s in stats.segments] == [(20, 0), (3, 0), (0, 2)]
    assert (stats.counts.prefix, stats.counts.computed, stats.counts.cached) == (23, 2, 23)
