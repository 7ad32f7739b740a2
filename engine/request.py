"""A request while it is in the engine. Owner of its fields: `Scheduler`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.api import EngineRequest, FinishReason, RequestStats, TokenCounts
from engine.cache import Allocation
from engine.layout import BlockLayout, segment_spans


@dataclass(slots=True, eq=False)
class Request:
    """Known tokens, computed tokens, and where their KV is.

    There are no prefill and decode phases: `num_computed_tokens` chases `num_tokens` (I4).
    """

    source: EngineRequest
    arrival: int
    """Serial number; the lower, the earlier, the higher its claim."""
    max_tokens: int
    """Output tokens it may make, cut to what the context allows."""
    seed: int
    arrival_s: float
    token_ids: list[int]
    num_prompt_tokens: int
    layout: BlockLayout
    allocation: Allocation | None = None
    num_computed_tokens: int = 0
    num_prefix_tokens: int = 0
    """Prompt tokens found in the cache when it was first scheduled."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    first_run_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def make(cls, source: EngineRequest, arrival: int, max_tokens: int, seed: int, now: float) -> Request:
        """A waiting request made of what the caller sent."""
        tokens = [t for segment in source.segments for t in segment.token_ids]
        layout = BlockLayout(source.segments)
        spans = segment_spans(source.segments)
        return cls(source, arrival, max_tokens, seed, now, tokens, len(tokens), layout, spans=spans)

    @property
    def request_id(self) -> str:
        """The caller's id."""
        return self.source.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def stats(self) -> RequestStats:
        """What it cost, for the last output."""
        prefix = self.num_prefix_tokens
        parts = tuple(_counts(min(max(prefix - a, 0), b - a), b - a) for a, b in self.spans)
        first_run = self.first_run_s if self.first_run_s is not None else self.arrival_s
        first_token = self.first_token_s if self.first_token_s is not None else first_run
        last_token = self.last_token_s if self.last_token_s is not None else first_token
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            counts=_counts(prefix, self.num_prompt_tokens),
            segments=parts,
            num_preemptions=self.num_preemptions,
            queue_s=first_run - self.arrival_s,
            prefill_s=first_token - first_run,
            decode_s=last_token - first_token,
        )


def _counts(prefix: int, total: int) -> TokenCounts:
    return TokenCounts(prefix=prefix, computed=total - prefix)
