"""Records that cross the engine's boundary: what goes in, what comes out, what can be asked.

Everything here is an immutable msgspec struct, so that the same objects serve a call in one process
(`engine.LLM`) and a message between two (`EngineClient`). Nothing here imports torch.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

BLOCK_SIZE = 16
"""Token slots in one KV block."""

SHARED_SCOPE = "shared"
"""Scope of text that an operator has marked public; any other scope names one tenant."""

MAX_STOP_STRINGS = 16


class SegmentKind(StrEnum):
    """What a piece of the prompt is; a passage is counted on its own in the reply."""

    SYSTEM = "system"
    PASSAGE = "passage"
    TAIL = "tail"
    TEXT = "text"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Segment(msgspec.Struct, frozen=True):
    """One piece of a prompt. Each segment starts on a fresh KV block, so that a finished one is shared whole."""

    token_ids: tuple[int, ...]
    """Token ids, at least one."""
    kind: SegmentKind = SegmentKind.TEXT
    """Role in the prompt."""
    scope: str = SHARED_SCOPE
    """`shared`, or the one tenant that may reuse these blocks. Once a tenant is named, later segments keep it."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose tokens, and when to stop. `verify` names the first field that is out of range."""

    max_tokens: int = 16
    """Most tokens to generate, 1 or more."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. At most 100."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p, 0 < p <= 1 (nucleus sampling)."""
    seed: int | None = None
    """Makes this request's draws reproducible, whoever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it. At most 16."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text; their text is not part of it."""
    ignore_eos: bool = False
    """Go on past the end-of-text tokens (for load tests)."""

    def verify(self, vocab_size: int | None = None) -> None:
        """Raise `ValueError`, whose message begins with the field's name, if a value is out of range."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not s for s in self.stop):
            raise ValueError("stop strings must not be empty")
        bad = [t for t in self.stop_token_ids if t < 0 or (vocab_size is not None and t >= vocab_size)]
        if bad:
            raise ValueError(f"stop_token_ids holds ids outside the vocabulary: {bad[:5]}")


class EngineRequest(msgspec.Struct, frozen=True):
    """One prompt to continue. `request_id` is made by the caller's server, never taken from a client."""

    request_id: str
    segments: tuple[Segment, ...]
    params: SamplingParams = SamplingParams()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens over all segments."""
        return sum(len(s.token_ids) for s in self.segments)


class TokenCounts(msgspec.Struct, frozen=True):
    """How prompt tokens were had: exact prefix, linked from elsewhere, or computed now."""

    prefix: int = 0
    linked: int = 0
    computed: int = 0

    @property
    def cached(self) -> int:
        """Tokens that were not computed for this request."""
        return self.prefix + self.linked


class RequestStats(msgspec.Struct, frozen=True):
    """What one request cost, sent with its last output. Seconds are wall time inside the engine."""

    num_prompt_tokens: int
    num_output_tokens: int
    counts: TokenCounts
    segments: tuple[TokenCounts, ...]
    """One entry for each prompt segment, in order."""
    num_preemptions: int
    queue_s: float
    """Arrival to the first step that ran any of it."""
    prefill_s: float
    """First step to the first output token."""
    decode_s: float
    """First output token to the last."""


class RequestOutput(msgspec.Struct, frozen=True):
    """What one step added to a request. Text never ends inside a character or inside a possible stop string."""

    request_id: str
    text: str = ""
    """New text; empty where a token completed no character."""
    token_ids: tuple[int, ...] = ()
    """New token ids."""
    finish_reason: FinishReason | None = None
    """Set on the last output of a request, and only there."""
    error: str | None = None
    """What went wrong, with `FinishReason.ERROR`."""
    stats: RequestStats | None = None
    """Set together with `finish_reason`, except where the engine died."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine serves, known once it is ready."""

    model: str
    """Name of the model as configured: its folder's or file's stem."""
    model_path: str
    """File or folder the weights and the tokenizer came from."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    num_blocks: int
    """Blocks in the KV pool, `BLOCK_SIZE` slots each."""
    vocab_size: int
    dtype: str
    device: str
    attention: str
    """Attention implementation, as the kernels' dispatch names it."""
    supports_segments: bool = True
    supports_linking: bool = False


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since start and gauges of now, for metrics and for tests of the invariants."""

    num_running: int
    num_waiting: int
    free_blocks: int
    evictable_blocks: int
    protected_blocks: int
    held_blocks: int
    num_blocks: int
    prompt_tokens: int
    prefix_tokens: int
    linked_tokens: int
    computed_tokens: int
    output_tokens: int
    num_preemptions: int
    num_finished: int
    num_aborted: int
    num_failed: int
