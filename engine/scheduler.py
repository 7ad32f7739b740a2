"""Decides what each step computes. One rule: computed tokens chase known tokens, under a token budget.

That rule covers prefill in chunks, decode, cache hits and recomputation after preemption alike (vLLM v1 and Sarathi,
Agrawal et al. 2024, section 4). In a step, requests that need one token go first, so running answers never wait for a
prompt; the rest of the budget goes to prompts in order of arrival.

When the pool is full, the latest arrival gives its blocks back and waits (preemption by recomputing). The earliest
never does, and a request that cannot fit alone is refused at `add`, so every admitted request ends.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.api import EngineRequest, FinishReason, SamplingParams
from engine.cache import CacheManager
from engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step. Block arrays cover all its tokens up to and with this step's."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens to compute."""
    start: int
    """Logical position of the first of them."""
    slots: npt.NDArray[np.int64]
    """Pool slot of each new token."""
    block_ids: npt.NDArray[np.int32]
    block_starts: npt.NDArray[np.int32]
    """Logical position of each block's first token."""
    block_valids: npt.NDArray[np.int32]
    """Tokens in each block, 1 to 16."""
    block_deltas: npt.NDArray[np.int32]
    """Rotary delta of each block; 0 for blocks used where they were computed."""
    needs_token: bool
    """Whether the last new token's logits give the next token."""
    params: SamplingParams
    seed: int
    output_index: int
    """How many tokens the request has made, which with the seed fixes the draw."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work."""

    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens in the step."""
        return sum(len(r.token_ids) for r in self.requests)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A request gained a token, or ended, or both."""

    request: Request
    token_id: int | None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class Scheduler:
    """Owns all requests in the engine. Called from one thread."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
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
        self._max_num_seqs = max_num_seqs
        self._token_budget = max_num_batched_tokens
        self._chunked = enable_chunked_prefill
        self._eos = eos_token_ids
        self._random = random.Random(seed)
        self._clock = clock
        self._arrivals = 0
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
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

    def add(self, source: EngineRequest) -> Request:
        """Queue a request. Raises `ValueError`, naming the fault, for one that could never run."""
        if source.request_id in self._requests:
            raise ValueError(f"request_id {source.request_id!r} is in use")
        _check_segments(source)
        n = source.num_prompt_tokens
        if n >= self._max_model_len:
            raise ValueError(f"the prompt has {n} tokens; max_model_len is {self._max_model_len}, output included")
        max_tokens = min(source.params.max_tokens, self._max_model_len - n)
        seed = source.params.seed if source.params.seed is not None else self._random.getrandbits(63)
        request = Request.make(source, self._arrivals, max_tokens, seed, self._clock())
        need = request.layout.num_blocks_for(n + max_tokens)
        if need > self._cache.num_blocks:
            raise ValueError(
                f"the request needs {need} KV blocks with its output; the pool has {self._cache.num_blocks}"
            )
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)
        return request

    def requests(self) -> list[Request]:
        """All requests in the engine, running and waiting."""
        return list(self._requests.values())

    def abort(self, request_id: str) -> Request | None:
        """End a request at once and free its blocks. Unknown or ended ids are ignored, since ends race with aborts."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request: blocks freed, whatever is sealed stays cached."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.error = reason, error
        del self._requests[request.request_id]
        if request.allocation is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        self._count_end(reason)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work. Empty only if nothing is left to do."""
        budget = self._token_budget
        chosen: dict[Request, int] = {}
        was_preempted = False
        for request in sorted(self._running, key=lambda r: (r.num_tokens - r.num_computed_tokens > 1, r.arrival)):
            if request.allocation is None:
                continue
            n = min(request.num_tokens - request.num_computed_tokens, budget - sum(chosen.values()))
            if n <= 0:
                continue
            was_preempted |= self._make_room(request, request.num_computed_tokens + n, chosen)
            if request.allocation is not None:
                chosen[request] = n
        if not was_preempted:
            self._admit(chosen)
        return SchedulerOutput(tuple(self._record(r, n) for r, n in chosen.items()))

    def update(self, output: SchedulerOutput, tokens: Mapping[str, int | str]) -> list[TokenEvent]:
        """Take a step's results: for each request that needed one its next token id, or a string naming a fault."""
        now = self._clock()
        events: list[TokenEvent] = []
        for item in output.requests:
            request = self._requests.get(item.request_id)
            if request is None:
                continue
            request.num_computed_tokens += len(item.token_ids)
            assert request.allocation is not None
            self._cache.commit(request.allocation, request.token_ids, request.num_computed_tokens)
            if item.needs_token:
                events.append(self._take_token(request, tokens[item.request_id], now))
        return events

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken (I1, I2, I4)."""
        self._cache.check_integrity()
        for request in self._requests.values():
            assert request.num_computed_tokens <= request.num_tokens, "computed tokens passed known tokens"
            assert (request.allocation is None) == (request in self._waiting), "a request is in the wrong queue"

    def _take_token(self, request: Request, token: int | str, now: float) -> TokenEvent:
        if isinstance(token, str):
            self.finish(request, FinishReason.ERROR, token)
            return TokenEvent(request, None)
        request.token_ids.append(token)
        request.first_token_s = request.first_token_s if request.first_token_s is not None else now
        request.last_token_s = now
        self.counters.output_tokens += 1
        params = request.source.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            self.finish(request, FinishReason.STOP)
        elif request.num_output_tokens >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)
        return TokenEvent(request, token)

    def _make_room(self, request: Request, num_tokens: int, chosen: dict[Request, int]) -> bool:
        """Reserve blocks, preempting the latest arrivals as long as it fails; True if any was preempted."""
        was_preempted = False
        while request.allocation is not None and not self._cache.reserve(request.allocation, num_tokens):
            victim = max(self._running, key=lambda r: r.arrival)
            chosen.pop(victim, None)
            self._preempt(victim)
            was_preempted = True
        return was_preempted

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        at = next((i for i, r in enumerate(self._waiting) if r.arrival > request.arrival), len(self._waiting))
        self._waiting.insert(at, request)

    def _admit(self, chosen: dict[Request, int]) -> None:
        """Start waiting requests in order of arrival while budget, seats and blocks last."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            budget = self._token_budget - sum(chosen.values())
            request = self._waiting[0]
            if budget <= 0:
                return
            allocation, num_cached = self._cache.open(request.layout, request.token_ids)
            missing = request.num_tokens - num_cached
            fits = self._chunked or missing <= budget
            # All known tokens get their blocks at once, so a prefill under way never runs out of them.
            if not fits or not self._cache.reserve(allocation, request.num_tokens):
                self._cache.close(allocation)
                return
            self._waiting.popleft()
            self._running.append(request)
            request.allocation, request.num_computed_tokens = allocation, num_cached
            self._count_start(request, num_cached)
            chosen[request] = min(missing, budget)

    def _count_start(self, request: Request, num_cached: int) -> None:
        if request.first_run_s is not None:
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

    def _record(self, request: Request, n: int) -> ScheduledRequest:
        assert request.allocation is not None
        first, last = request.num_computed_tokens, request.num_computed_tokens + n
        layout, num_blocks = request.layout, request.layout.num_blocks_for(last)
        ids = request.allocation.block_ids[:num_blocks]
        starts = np.asarray(layout.starts[:num_blocks], np.int32)
        ends = np.asarray(layout.ends[:num_blocks], np.int32)
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[first:last]),
            start=first,
            slots=layout.slots(ids, first, last),
            block_ids=np.asarray(ids, np.int32),
            block_starts=starts,
            block_valids=np.minimum(ends, last) - starts,
            block_deltas=np.zeros(num_blocks, np.int32),
            needs_token=last == request.num_tokens,
            params=request.source.params,
            seed=request.seed,
            output_index=request.num_output_tokens,
        )


def _check_segments(source: EngineRequest) -> None:
    """Raise `ValueError` for a prompt without tokens or with a scope that widens."""
    if not source.segments or not all(s.token_ids for s in source.segments):
        raise ValueError("the prompt is empty, or has an empty segment")
    scope = source.segments[0].scope
    for segment in source.segments:
        if scope not in (segment.scope, "shared"):
            raise ValueError(f"a segment of scope {segment.scope!r} stands behind one of scope {scope!r}")
        scope = segment.scope
