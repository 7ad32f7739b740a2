"""A request while it is in the engine. Owner of its fields: `Scheduler`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.api import MAX_PRIORITY, CacheMode, EngineRequest, FinishReason, RequestStats, TokenCounts
from engine.cache import Allocation
from engine.layout import BlockLayout, Passage, segment_spans

PRIORITY_STEP_S = 30.0
"""Seconds of waiting that one level of priority is worth."""


@dataclass(slots=True, eq=False)
class Request:
    """Known tokens, computed tokens, and where their KV is.

    There are no prefill and decode phases: `num_computed_tokens` chases `num_tokens` (I4).
    """

    source: EngineRequest
    key: int
    """Serial number in order of arrival: the engine's own name for it."""
    index: int
    """Which of the source's n continuations it makes."""
    rank: tuple[float, float]
    """The lower, the higher its claim on tokens and blocks: arrival time shifted by priority, then serial number."""
    max_tokens: int
    """Output tokens it may make, cut to what the context allows."""
    seed: int
    arrival_s: float
    token_ids: list[int]
    num_prompt_tokens: int
    layout: BlockLayout
    banned_ids: tuple[int, ...]
    """Tokens that would end the text, kept away until min_tokens are made."""
    spans: list[tuple[int, int]]
    needs_extras: bool
    """Whether its sampling parameters look at more than the logits."""
    prompt_ids: npt.NDArray[np.int64] | None
    """Distinct prompt tokens, where a penalty needs them."""
    allocation: Allocation | None = None
    leader: tuple[Allocation, int] | None = None
    """While it waits for blocks that another request is computing: that one's allocation, and which block."""
    num_computed_tokens: int = 0
    """Position up to which all KV is there, computed or not."""
    is_compile: bool = False
    """Whether it only computes a passage behind its system text, for others to borrow; nobody reads its answer."""
    links: list[tuple[int, int]] = field(default_factory=list)
    """Positions whose KV is borrowed, those still ahead of the computed ones."""
    compiles: set[Request] = field(default_factory=set)
    """What it waits for: passages that are being computed to be borrowed."""
    prefix_before: int | None = None
    """Tokens found in the cache before it had passages computed; None if it had none computed."""
    paid: set[int] = field(default_factory=set)
    """Segments that were computed on its account, to be borrowed by it and by later ones."""
    num_prefix_tokens: int = 0
    """Prompt tokens found in the cache when it was first scheduled."""
    linked_spans: list[tuple[int, int]] = field(default_factory=list)
    """Positions of prompt tokens whose KV was borrowed when it was first scheduled."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities were given out."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Computed tokens at the last preemption."""
    num_recomputed_tokens: int = 0
    """Tokens that preemption made it compute again."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    began_s: float | None = None
    """When a passage that it waited for was begun."""
    first_run_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @classmethod
    def make(
        cls, source: EngineRequest, key: int, index: int, max_tokens: int, seed: int, now: float, eos: frozenset[int]
    ) -> Request:
        """A waiting request made of what the caller sent."""
        tokens = [t for segment in source.segments for t in segment.token_ids]
        params = source.params
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        return cls(
            source=source,
            key=key,
            index=index,
            rank=(now + PRIORITY_STEP_S * source.priority, key),
            max_tokens=max_tokens,
            seed=seed,
            arrival_s=now,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            layout=BlockLayout(source.segments),
            banned_ids=tuple(sorted(ends)) if params.min_tokens else (),
            spans=segment_spans(source.segments),
            needs_extras=bool(params.has_penalties or params.min_tokens or params.prompt_logprobs is not None),
            prompt_ids=np.unique(np.asarray(tokens, np.int64)) if params.repetition_penalty != 1.0 else None,
        )

    @classmethod
    def make_compile(cls, parent: Request, passage: Passage, key: int, rank: tuple[float, float]) -> Request:
        """A request that computes [system][passage] of a prompt, and nothing behind it."""
        segments = parent.source.segments
        own = (*(s for s, (a, _) in zip(segments, parent.spans, strict=True) if a < parent.layout.num_system_tokens),)
        source = EngineRequest(f"compile-{key}", (*own, segments[passage.segment]))
        out = cls.make(source, key, 0, 0, 0, parent.arrival_s, frozenset())
        out.layout, out.is_compile, out.rank = BlockLayout(source.segments, is_open=False), True, rank
        return out

    @property
    def request_id(self) -> str:
        """The caller's id."""
        return self.source.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Known tokens whose KV is to be computed."""
        ahead = sum(b - a for a, b in self.links) if self.links else 0
        return len(self.token_ids) - self.num_computed_tokens - ahead

    def advance(self, position: int) -> None:
        """All KV below a position is there; what is borrowed right behind it as well."""
        self.num_computed_tokens = position
        while self.links and self.links[0][0] <= self.num_computed_tokens:
            self.num_computed_tokens = self.links.pop(0)[1]

    def runs(self, n: int) -> list[tuple[int, int]]:
        """The next n positions to compute, as stretches between borrowed ones."""
        out: list[tuple[int, int]] = []
        at = self.num_computed_tokens
        for first, last in self.links:
            if n <= 0:
                return out
            out.append((at, min(first, at + n)))
            n -= first - at
            at = last
        return [*out, (at, at + n)] if n > 0 else out

    @property
    def wants_links(self) -> bool:
        """Whether passages may be borrowed for it; log-probabilities of prompt tokens need them computed."""
        return self.source.cache is CacheMode.LINKED and not self.wants_prompt_logprobs

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed; cached KV gives none."""
        wanted = self.source.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def num_blocks_at_end(self) -> int:
        """Blocks it needs for all the tokens it may ever have."""
        return self.layout.num_blocks_for(self.num_prompt_tokens + self.max_tokens)

    def stats(self) -> RequestStats:
        """What it cost, for the last output."""
        parts = tuple(self.counts(a, b) for a, b in self.spans)
        first_run = self.first_run_s if self.first_run_s is not None else self.arrival_s
        first_token = self.first_token_s if self.first_token_s is not None else first_run
        last_token = self.last_token_s if self.last_token_s is not None else first_token
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            counts=self.counts(0, self.num_prompt_tokens),
            segments=parts,
            num_preemptions=self.num_preemptions,
            queue_s=first_run - self.arrival_s,
            prefill_s=first_token - first_run,
            decode_s=last_token - first_token,
        )

    def counts(self, a: int, b: int) -> TokenCounts:
        """How the tokens a..b-1 were had."""
        prefix = min(max(self.num_prefix_tokens - a, 0), b - a)
        linked = sum(max(0, min(b, last) - max(a, first)) for first, last in self.linked_spans)
        return TokenCounts(prefix, linked, b - a - prefix - linked)


def check_source(source: EngineRequest) -> None:
    """Raise `ValueError` for a prompt without tokens, a scope that widens, or a priority out of range."""
    if not -MAX_PRIORITY <= source.priority <= MAX_PRIORITY:
        raise ValueError(f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {source.priority}")
    if not source.segments or not all(s.token_ids for s in source.segments):
        raise ValueError("the prompt is empty, or has an empty segment")
    scope = source.segments[0].scope
    for segment in source.segments:
        if scope not in (segment.scope, "shared"):
            raise ValueError(f"a segment of scope {segment.scope!r} stands behind one of scope {scope!r}")
        scope = segment.scope
