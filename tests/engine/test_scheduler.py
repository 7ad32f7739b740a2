"""The scheduler in exact small worlds: which tokens, which order, which blocks; no model."""

from __future__ import annotations

import pytest

from engine.api import CacheMode, EngineRequest, FinishReason, SamplingParams, Segment
from engine.cache import CacheManager
from engine.request import Request
from engine.scheduler import MAX_TRIES, Scheduler
from engine.step import SchedulerOutput, StepResult


class World:
    """A scheduler, and a model that always answers 7."""

    def __init__(self, num_blocks: int = 64, budget: int = 32, seqs: int = 8, max_len: int = 512, **extra: int) -> None:
        self.now = 0.0
        self.budget = budget
        self.names: dict[int, str] = {}
        self.last = SchedulerOutput(())
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

    def add(
        self,
        name: str,
        num: int,
        max_tokens: int = 4,
        first: int = 100,
        priority: int = 0,
        cache: CacheMode = CacheMode.AUTO,
        **params: object,
    ) -> list[Request]:
        tokens = tuple(range(first, first + num))
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        source = EngineRequest(name, (Segment(tokens),), sampling, priority, cache)
        added = self.scheduler.add(source)
        self.names |= {r.key: name if len(added) == 1 else f"{name}{r.index}" for r in added}
        return added

    def step(self, token: int = 7) -> list[tuple[str, int, int]]:
        """Run a step; returns (name, first new position, new tokens) of each request in it."""
        out = self.scheduler.schedule()
        assert out.num_tokens <= self.budget
        assert len({r.key for r in out.requests}) == len(out.requests)
        self.scheduler.update(out, {r.key: StepResult(token) for r in out.requests if r.needs_token})
        self.scheduler.check_integrity()
        self.last = out
        return [(self.names[r.key], r.start, len(r.token_ids)) for r in out.requests]

    def run(self, limit: int = 500) -> int:
        steps = 0
        while self.scheduler.has_work:
            assert self.step(), "a step did nothing although there is work"
            steps += 1
            assert steps < limit
        return steps


def test_a_prompt_is_prefilled_in_chunks_while_a_running_answer_goes_first() -> None:
    w = World()
    w.add("a", 5)
    assert w.step() == [("a", 0, 5)]
    w.add("b", 70, first=1000)
    assert w.step() == [("a", 5, 1), ("b", 0, 31)]
    assert w.step() == [("a", 6, 1), ("b", 31, 31)]
    assert w.step() == [("a", 7, 1), ("b", 62, 8)]
    assert w.step() == [("b", 70, 1)]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    w = World(max_len=32, enable_chunked_prefill=False)
    w.add("a", 20)
    w.add("b", 20, first=1000)
    assert w.step() == [("a", 0, 20)]
    assert w.step() == [("a", 20, 1), ("b", 0, 20)]
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        World(max_len=64, enable_chunked_prefill=False)


def test_the_second_request_computes_only_what_is_not_cached() -> None:
    w = World()
    w.add("a", 20, max_tokens=1)
    w.run()
    w.add("b", 20, max_tokens=1)
    assert w.step() == [("b", 16, 4)]
    assert w.scheduler.counters.prefix_tokens == 16


def test_the_second_request_waits_for_the_blocks_that_the_first_is_computing() -> None:
    w = World()
    w.add("a", 60, max_tokens=1)
    w.add("b", 60, max_tokens=1)
    w.add("c", 5, max_tokens=1, first=900)
    assert w.step() == [("a", 0, 32)]
    assert w.step() == [("a", 32, 28), ("c", 0, 4)]
    assert w.step() == [("c", 4, 1), ("b", 48, 12)]
    assert w.scheduler.counters.computed_tokens == 60 + 5 + 12


def test_who_waits_for_blocks_goes_on_alone_when_the_other_is_aborted() -> None:
    w = World()
    w.add("a", 100, max_tokens=1)
    w.add("b", 100, max_tokens=1)
    assert w.step() == [("a", 0, 32)]
    w.scheduler.abort("a")
    assert w.step() == [("b", 32, 32)]
    w.run()


def test_nobody_waits_for_a_request_that_ranks_behind() -> None:
    w = World()
    w.add("low", 100, max_tokens=1, priority=8)
    assert w.step() == [("low", 0, 32)]
    w.add("high", 100, max_tokens=1)
    assert w.step() == [("high", 32, 32)]
    assert w.step() == [("high", 64, 32)]
    assert w.step() == [("high", 96, 4), ("low", 32, 28)]
    w.run()


def test_scopes_do_not_wait_for_each_other() -> None:
    w = World(budget=64)
    for scope in ("a", "b"):
        segments = (Segment(tuple(range(48)), scope=scope),)
        (request,) = w.scheduler.add(EngineRequest(scope, segments, SamplingParams(max_tokens=1)))
        w.names[request.key] = scope
    assert w.step() == [("a", 0, 48), ("b", 0, 16)]


def test_n_continuations_share_the_prompt() -> None:
    w = World(budget=128)
    added = w.add("x", 70, max_tokens=3, n=4, ignore_eos=True)
    assert w.step() == [("x0", 0, 70)]
    assert w.step() == [("x0", 70, 1), ("x1", 64, 6), ("x2", 64, 6), ("x3", 64, 6)]
    assert [r.stream for r in w.last.requests] == [0, 1, 2, 3]
    w.run()
    assert all(r.finish_reason is FinishReason.LENGTH and r.num_output_tokens == 3 for r in added)
    w.add("x", 70, n=2)
    w.step()
    assert len(w.scheduler.abort("x")) == 2
    assert not w.scheduler.has_work


def test_priority_shifts_the_order_and_waiting_makes_up_for_it() -> None:
    w = World(seqs=1)
    w.add("running", 5, max_tokens=2)
    w.step()
    w.add("low", 5, max_tokens=1, priority=1, first=200)
    w.add("normal", 5, max_tokens=1, first=300)
    w.add("high", 5, max_tokens=1, priority=-1, first=400)
    w.now = 31.0
    w.add("late", 5, max_tokens=1, first=500)
    order = []
    while w.scheduler.has_work:
        order += [name for name, _, _ in w.step()]
    assert order == ["running", "high", "normal", "low", "late"]
    with pytest.raises(ValueError, match="priority"):
        w.add("x", 5, priority=9)


def test_a_higher_priority_passes_a_prompt_under_way() -> None:
    w = World()
    w.add("low", 200, max_tokens=1)
    assert w.step() == [("low", 0, 32)]
    w.add("high", 40, max_tokens=1, priority=-1, first=900)
    assert w.step() == [("high", 0, 32)]
    assert w.step() == [("high", 32, 8), ("low", 32, 24)]


def test_running_answers_get_a_token_in_every_step_and_the_first_prompt_half_the_budget() -> None:
    w = World(num_blocks=400, budget=16, seqs=64)
    answers = [w.add(f"d{i}", 3, max_tokens=60, ignore_eos=True, first=1000 * i)[0] for i in range(12)]
    for _ in range(20):
        w.step()
    assert w.scheduler.num_running == 8, "seats are half the budget"
    (long,) = w.add("long", 160, max_tokens=1, first=50_000, priority=-8)
    shares = []
    while long.finish_reason is None:
        before = {r.key for r in answers if r.allocation is not None and r.num_output_tokens}
        w.step()
        share = {r.key: len(r.token_ids) for r in w.last.requests}
        assert before <= share.keys(), "a running answer was left out of a step"
        shares.append(share.get(long.key, 0))
    waited = next(i for i, n in enumerate(shares) if n)
    assert waited <= 60, "it waits for the first seat only"
    assert all(n >= 8 for n in shares[waited:-1])
    assert sum(shares) == 160


def test_beside_running_answers_a_prompt_gets_smaller_chunks() -> None:
    w = World(num_blocks=400, budget=64, seqs=32, mixed_token_budget=16)
    w.add("long", 100, max_tokens=1)
    assert w.step() == [("long", 0, 64)]
    assert w.step() == [("long", 64, 36)]
    w.add("a", 5, max_tokens=60, ignore_eos=True, first=1000)
    w.step()
    w.add("b", 300, max_tokens=1, first=2000)
    assert w.step() == [("a", 5, 1), ("b", 0, 15)]
    added = [w.add(f"c{i}", 3, max_tokens=60, first=3000 + 10 * i, priority=-1, ignore_eos=True)[0] for i in range(11)]
    while not all(r.num_output_tokens for r in added):
        w.step()
    step = w.step()
    answers = [n for name, _, n in step if name != "b"]
    assert answers == [1] * len(answers)
    assert len(answers) >= 11
    assert sum(n for name, _, n in step if name == "b") == len(answers), "the prompt gets half"


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
    (aborted,) = w.scheduler.abort("gone")
    assert aborted.finish_reason is FinishReason.ABORT
    assert w.scheduler.abort("gone") == []
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
    assert requests["new"].num_recomputed_tokens == w.scheduler.counters.recomputed_tokens
    assert all(r.finish_reason is FinishReason.LENGTH for r in requests.values())
    assert all(r.num_output_tokens == 44 for r in requests.values())


def test_eight_long_answers_in_a_pool_for_one_and_a_half_all_end() -> None:
    w = World(num_blocks=12)
    for i in range(8):
        w.add(f"r{i}", 30, max_tokens=90, ignore_eos=True, first=1000 * i)
    requests = w.scheduler.requests()
    w.run(limit=3000)
    assert all(r.num_output_tokens == 90 for r in requests)
    assert sum(r.num_preemptions for r in requests) > 0
    assert max(r.num_preemptions for r in requests) <= MAX_TRIES


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
    a, b = requests["a"].key, requests["b"].key
    w.scheduler.update(
        out, {a: StepResult(fault="the model gave non-finite logits", is_non_finite=True), b: StepResult(7)}
    )
    assert w.scheduler.counters.non_finite == 1
    assert requests["a"].finish_reason is FinishReason.ERROR
    assert requests["a"].error == "the model gave non-finite logits"
    w.run()
    assert requests["b"].finish_reason is FinishReason.LENGTH


def test_statistics_say_what_each_segment_cost() -> None:
    w = World(budget=32)
    segments = (Segment(tuple(range(20))), Segment((50, 51, 52)), Segment((60, 61)))
    for name in ("cold", "warm"):
        (request,) = w.scheduler.add(EngineRequest(name, segments, SamplingParams(max_tokens=1)))
        w.names[request.key] = name
        w.run()
    stats = request.stats()
    assert [(s.prefix, s.computed) for s in stats.segments] == [(20, 0), (3, 0), (0, 2)]
    assert (stats.counts.prefix, stats.counts.computed, stats.counts.cached) == (23, 2, 23)


def test_with_the_cache_off_nothing_is_found_and_nothing_is_left_behind() -> None:
    w = World()
    w.add("off", 40, max_tokens=20, cache=CacheMode.OFF, ignore_eos=True)
    w.run()
    assert w.cache.counts().free == w.cache.num_blocks
    w.add("exact", 40, max_tokens=1, cache=CacheMode.EXACT)
    assert w.step() == [("exact", 0, 32)]
    w.run()
    w.add("off again", 40, max_tokens=1, cache=CacheMode.OFF)
    assert w.step() == [("off again", 0, 32)]
    w.run()
    assert w.scheduler.counters.prefix_tokens == 0
    w.add("auto", 40, max_tokens=1)
    assert w.step() == [("auto", 32, 8)]


def test_nobody_waits_for_blocks_that_will_not_be_shared_and_off_waits_for_nobody() -> None:
    w = World(budget=64)
    w.add("off", 60, max_tokens=1, cache=CacheMode.OFF)
    w.add("exact", 60, max_tokens=1)
    w.add("also off", 60, max_tokens=1, cache=CacheMode.OFF)
    assert w.step() == [("off", 0, 60), ("exact", 0, 4)]
    assert w.step() == [("exact", 4, 56), ("also off", 0, 8)]
    w.run()


def test_with_the_cache_off_a_preempted_request_computes_all_again_and_frees_all() -> None:
    w = World(num_blocks=5)
    w.add("old", 20, max_tokens=44, ignore_eos=True, cache=CacheMode.OFF)
    (new,) = w.add("new", 20, max_tokens=44, ignore_eos=True, first=1000, cache=CacheMode.OFF)
    w.run()
    assert new.num_preemptions >= 1
    assert new.num_recomputed_tokens >= 20
    assert (new.finish_reason, new.num_output_tokens) == (FinishReason.LENGTH, 44)
    assert w.cache.counts().free == w.cache.num_blocks
    w.add("later", 20, max_tokens=1, first=1000)
    w.step()
    assert w.scheduler.counters.prefix_tokens == 0
