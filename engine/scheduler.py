"""Decides what each step computes. One rule: computed tokens chase known tokens, under a token budget.

That rule covers prefill in chunks, decode, cache hits and recomputation after preemption alike (vLLM v1 and Sarathi,
Agrawal et al. 2024, section 4). In a step, requests that need one token go first; the rest of the budget goes to
prompts by rank, which is the order of arrival shifted by priority.

Nothing starves:
- a running answer gets a token in every step: seats are at most half the budget, and single tokens go first;
- the prompt of lowest rank gets at least half the step's budget in every step;
- a waiting request is passed only by one of lower rank, and a level of priority is worth a fixed time of waiting;
- a request waits for another's blocks only if that one runs and has the lower rank.

When the pool is full, the highest rank gives its blocks back and waits (preemption by recomputing). The lowest never
does, and a request that cannot fit alone is refused at `add`, so every admitted request ends. After MAX_TRIES
preemptions a request is started again only with room for all its tokens and those of all that run, so it is preempted
again only by a request that came later with a higher priority.
"""

from __future__ import annotations

import logging
import random
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from engine.api import CacheMode, EngineRequest, FinishReason
from engine.cache import Allocation, CacheManager
from engine.record import make_record
from engine.request import Request, check_source
from engine.step import ScheduledRequest, SchedulerOutput, StepResult, TokenEvent

MAX_TRIES = 3
"""Preemptions after which a request waits until it has room to its end."""

log = logging.getLogger(__name__)
_rank = attrgetter("rank")


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    non_finite: int = 0


class Scheduler:
    """Owns all requests in the engine. Called from one thread."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        mixed_token_budget: int | None = None,
        enable_chunked_prefill: bool = True,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        clock: Callable[[], float],
    ) -> None:
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_model_len ({max_model_len}) "
                "where enable_chunked_prefill is off"
            )
        self._cache = cache
        self._max_model_len = max_model_len
        self._max_num_seqs = min(max_num_seqs, max(1, max_num_batched_tokens // 2))
        self._token_budget = max_num_batched_tokens
        self._mixed_budget = mixed_token_budget
        self._chunked = enable_chunked_prefill
        self._eos = eos_token_ids
        self._random = random.Random(seed)
        self._clock = clock
        self._serial = 0
        self._by_key: dict[int, Request] = {}
        self._by_id: dict[str, list[Request]] = {}
        # Both in order of rank.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        """Requests that have blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    def add(self, source: EngineRequest) -> list[Request]:
        """Queue a request: one for each of its n continuations.

        Raises `ValueError`, naming the fault, for one that could never run.
        """
        if source.request_id in self._by_id:
            raise ValueError(f"request_id {source.request_id!r} is in use")
        check_source(source)
        n = source.num_prompt_tokens
        if n >= self._max_model_len:
            raise ValueError(f"the prompt has {n} tokens; max_model_len is {self._max_model_len}, output included")
        max_tokens = min(source.params.max_tokens, self._max_model_len - n)
        seed = source.params.seed if source.params.seed is not None else self._random.getrandbits(63)
        first, now = self._serial, self._clock()
        requests = [
            Request.make(source, first + i, i, max_tokens, seed, now, self._eos) for i in range(source.params.n)
        ]
        need = requests[0].num_blocks_at_end
        if need > self._cache.num_blocks:
            raise ValueError(
                f"the request needs {need} KV blocks with its output; the pool has {self._cache.num_blocks}"
            )
        self._serial += len(requests)
        self._by_id[source.request_id] = requests
        for request in requests:
            self._by_key[request.key] = request
            insort(self._waiting, request, key=_rank)
        return requests

    def requests(self) -> list[Request]:
        """All requests in the engine, running and waiting."""
        return list(self._by_key.values())

    def abort(self, request_id: str) -> list[Request]:
        """End a request at once and free its blocks; returns what was still going on.

        Unknown or ended ids are ignored, since ends race with aborts.
        """
        requests = [r for r in self._by_id.get(request_id, ()) if r.finish_reason is None]
        for request in requests:
            self.finish(request, FinishReason.ABORT)
        return requests

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request: blocks freed, whatever is sealed stays cached."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.error = reason, error
        del self._by_key[request.key]
        siblings = self._by_id[request.request_id]
        if all(r.finish_reason is not None for r in siblings):
            del self._by_id[request.request_id]
        if request.allocation is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        self._count_end(reason)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work. Empty only if nothing is left to do."""
        chosen: dict[Request, int] = {}
        budget = self._budget_now()
        left, was_preempted = budget, False
        for wants_one in (True, False):
            for request in tuple(self._running):
                missing = request.num_tokens - request.num_computed_tokens
                if request.allocation is None or (missing == 1) is not wants_one:
                    continue
                if not wants_one and not was_preempted:
                    left = self._admit(chosen, left, before=request)
                n = min(missing, left)
                if n <= 0:
                    break
                known = request.num_computed_tokens + n
                if known > request.allocation.capacity and self._make_room(request, known, chosen):
                    was_preempted, left = True, budget - sum(chosen.values())
                if request.allocation is not None:
                    chosen[request] = n
                    left -= n
        if not was_preempted:
            self._admit(chosen, left)
        return SchedulerOutput(tuple(make_record(r, n) for r, n in chosen.items()))

    def update(self, output: SchedulerOutput, results: Mapping[int, StepResult]) -> list[TokenEvent]:
        """Take a step's results, by key: of each request that needed a token or prompt log-probabilities, or failed."""
        now = self._clock()
        events: list[TokenEvent] = []
        for item in output.requests:
            request, result = self._by_key.get(item.key), results.get(item.key)
            if request is None:
                continue
            if result is not None and result.fault is not None:
                self.counters.non_finite += result.is_non_finite
                self.finish(request, FinishReason.ERROR, result.fault)
                events.append(TokenEvent(request, None))
                continue
            request.num_computed_tokens += len(item.token_ids)
            assert request.allocation is not None
            self._cache.commit(request.allocation, request.token_ids, request.num_computed_tokens)
            if result is not None:
                events.append(self._take(request, item, result, now))
        return events

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken (I1, I2, I4)."""
        self._cache.check_integrity()
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"
        for request in self._by_key.values():
            assert request.num_computed_tokens <= request.num_tokens, "computed tokens passed known tokens"
            queue = self._waiting if request.allocation is None else self._running
            assert request in queue, "a request is in the wrong queue"
        assert len(self._waiting) + len(self._running) == len(self._by_key), "a queue holds a request that has ended"

    def _budget_now(self) -> int:
        """The step's token budget: beside running answers a smaller one, of which prompts still get half."""
        if self._mixed_budget is None:
            return self._token_budget
        num_answers = sum(r.num_tokens - r.num_computed_tokens == 1 for r in self._running)
        if not num_answers:
            return self._token_budget
        return min(self._token_budget, max(self._mixed_budget, 2 * num_answers))

    def _take(self, request: Request, item: ScheduledRequest, result: StepResult, now: float) -> TokenEvent:
        """Add a result to its request."""
        # After a preemption some positions are computed a second time; they were given out already.
        known = request.num_prompt_logprobs - item.start
        new = result.prompt_logprobs[known:] if known >= 0 else ()
        request.num_prompt_logprobs += len(new)
        token = result.token_id
        if token is None:
            return TokenEvent(request, None, prompt_logprobs=new)
        request.token_ids.append(token)
        request.first_token_s = request.first_token_s if request.first_token_s is not None else now
        request.last_token_s = now
        self.counters.output_tokens += 1
        params = request.source.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            self.finish(request, FinishReason.STOP)
        elif request.num_output_tokens >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)
        return TokenEvent(request, token, result.logprobs, new)

    def _make_room(self, request: Request, num_tokens: int, chosen: dict[Request, int]) -> bool:
        """Reserve blocks, preempting the highest ranks as long as it fails; True if any was preempted."""
        was_preempted = False
        while request.allocation is not None and not self._cache.reserve(request.allocation, num_tokens):
            victim = self._running[-1]
            chosen.pop(victim, None)
            self._preempt(victim)
            was_preempted = True
        return was_preempted

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        log.warning(
            "request %s was preempted; %d computed tokens are given up", request.request_id, request.num_computed_tokens
        )
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        insort(self._waiting, request, key=_rank)

    def _admit(self, chosen: dict[Request, int], budget: int, before: Request | None = None) -> int:
        """Start waiting requests by rank while budget, seats and blocks last; returns the budget that is left.

        With `before`, only those of lower rank than a running one, which goes on after them. One that would compute
        what a running request of lower rank is computing is left out until that is done.
        """
        at = 0
        while at < len(self._waiting) and len(self._running) < self._max_num_seqs and budget > 0:
            request = self._waiting[at]
            if before is not None and request.rank > before.rank:
                break
            if self._waits_for_blocks(request):
                at += 1
                continue
            allocation, num_cached = self._open(request)
            leader = None if request.wants_prompt_logprobs else self._cache.in_flight(allocation)
            if leader is not None and self._ranks_before(leader, request):
                request.leader = (leader, allocation.num_shared)
                self._cache.close(allocation)
                at += 1
                continue
            missing = request.num_tokens - num_cached
            fits = (self._chunked or missing <= budget) and self._has_room(request, allocation.num_shared)
            # All known tokens get their blocks at once, so a prefill under way never runs out of them.
            if not fits or not self._cache.reserve(allocation, request.num_tokens):
                self._cache.close(allocation)
                break
            del self._waiting[at]
            insort(self._running, request, key=_rank)
            request.allocation, request.num_computed_tokens = allocation, num_cached
            self._cache.announce(allocation, request.num_tokens)
            self._count_start(request, num_cached)
            chosen[request] = min(missing, budget)
            budget -= chosen[request]
        return budget

    def _open(self, request: Request) -> tuple[Allocation, int]:
        """Look up what the request may reuse: its allocation, and the tokens that need no computing."""
        reads, is_private = not request.wants_prompt_logprobs, request.source.cache is CacheMode.OFF
        return self._cache.open(request.layout, request.token_ids, reads=reads, is_private=is_private)

    def _waits_for_blocks(self, request: Request) -> bool:
        """Whether the blocks that it waits for are still being computed."""
        if request.leader is None:
            return False
        allocation, block = request.leader
        if block in allocation.announced:
            return True
        request.leader = None
        return False

    def _ranks_before(self, leader: object, request: Request) -> bool:
        return any(r.allocation is leader and r.rank < request.rank for r in self._running)

    def _has_room(self, request: Request, num_cached_blocks: int) -> bool:
        """For a request that was preempted MAX_TRIES times: whether it and all that run have room to their ends."""
        if request.num_preemptions < MAX_TRIES or not self._running:
            return True
        others = sum(r.num_blocks_at_end - r.allocation.num_blocks for r in self._running if r.allocation)
        return request.num_blocks_at_end - num_cached_blocks + others <= self._cache.num_available

    def _count_start(self, request: Request, num_cached: int) -> None:
        if request.first_run_s is not None:
            again = max(0, request.num_lost_tokens - num_cached)
            request.num_recomputed_tokens += again
            self.counters.recomputed_tokens += again
            return
        request.first_run_s = self._clock()
        request.num_prefix_tokens = num_cached
        self.counters.prompt_tokens += request.num_prompt_tokens
        self.counters.prefix_tokens += num_cached
        self.counters.computed_tokens += request.num_prompt_tokens - num_cached

    def _release(self, request: Request) -> None:
        assert request.allocation is not None
        self._cache.close(request.allocation)
        request.allocation = None

    def _count_end(self, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:
            self.counters.aborted += 1
        elif reason is FinishReason.ERROR:
            self.counters.failed += 1
        else:
            self.counters.finished += 1
