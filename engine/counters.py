"""What the scheduler counts: totals since start, and of each request how its prompt's tokens were had."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import FinishReason
from engine.request import Request


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    linked_tokens: int = 0
    computed_tokens: int = 0
    compiled_passages: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    non_finite: int = 0

    def start(self, request: Request, num_cached: int, now: float) -> None:
        """A request got its blocks; the first `num_cached` of its tokens and its links need no computing."""
        if request.first_run_s is not None:
            self._start_again(request, num_cached)
            return
        request.first_run_s = now if request.began_s is None else request.began_s
        if request.is_compile:
            return
        # What was computed on its account while it waited was computed for it, wherever it finds it now.
        before = num_cached if request.prefix_before is None or not request.paid else request.prefix_before
        request.num_prefix_tokens = min(num_cached, before)
        paid = [request.spans[i] for i in request.paid]
        request.linked_spans = [(a, b) for a, b in request.links if not any(x <= a < y for x, y in paid)]
        counts = request.counts(0, request.num_prompt_tokens)
        self.prompt_tokens += request.num_prompt_tokens
        self.prefix_tokens += counts.prefix
        self.linked_tokens += counts.linked
        self.computed_tokens += counts.computed

    def end(self, reason: FinishReason) -> None:
        """A request ended."""
        if reason is FinishReason.ABORT:
            self.aborted += 1
        elif reason is FinishReason.ERROR:
            self.failed += 1
        else:
            self.finished += 1

    def _start_again(self, request: Request, num_cached: int) -> None:
        """After a preemption: what it had computed and finds no more is computed again."""
        lost = request.num_lost_tokens
        linked = sum(max(0, min(last, lost) - first) for first, last in request.links)
        again = max(0, lost - num_cached - linked)
        request.num_recomputed_tokens += again
        self.recomputed_tokens += again
