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
MAX_N = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_PRIORITY = 8
MIN_TEMPERATURE = 1e-5
"""Below this a temperature counts as 0, since dividing by it would overflow."""


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


class CacheMode(StrEnum):
    """What a request may have of the KV of earlier ones."""

    AUTO = "auto"
    """Whatever gives the exact answer fastest: for now `exact`."""
    EXACT = "exact"
    """The longest exact prefix is reused, and what is computed may be reused."""
    OFF = "off"
    """Nothing is looked up and nothing is left behind: all is computed, in blocks that are freed at the end."""


class Segment(msgspec.Struct, frozen=True):
    """One piece of a prompt. Each segment starts on a fresh KV block, so that a finished one is shared whole."""

    token_ids: tuple[int, ...]
    """Token ids, at least one."""
    kind: SegmentKind = SegmentKind.TEXT
    """Role in the prompt."""
    scope: str = SHARED_SCOPE
    """`shared`, or the one tenant that may reuse these blocks. Once a tenant is named, later segments keep it."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose tokens, and when to stop. `verify` names the first field that is out of range.

    Logits are changed in this order: logit_bias, repetition_penalty, frequency and presence penalty, min_tokens; then
    temperature, and what is left by min_p, top_k and top_p is drawn from.
    """

    max_tokens: int = 16
    """Most tokens to generate, 1 or more; cut to what the context has room for."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. At most 100; below 0.00001 it counts as 0."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p, 0 < p <= 1 (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens at least this times as probable as the best one, 0 to 1."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it if positive, else multiplied; above 0, 1 is none."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that stands in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time it stands in the output, -2 to 2."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, each -100 to 100; at most 1024."""
    seed: int | None = None
    """Makes this request's draws reproducible, whoever else is in the batch."""
    n: int = 1
    """How many continuations to make of the one prompt, 1 to 64."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it. At most 16."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text; their text is not part of it."""
    min_tokens: int = 0
    """Make this many tokens before anything but max_tokens may end the text."""
    ignore_eos: bool = False
    """Go on past the end-of-text tokens (for load tests)."""
    logprobs: int | None = None
    """Give each output token's log-probability and this many of the best, 0 to 20."""
    prompt_logprobs: int | None = None
    """The same for each prompt token. The prompt is then computed whole, since cached KV gives no logits."""

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def verify(self, vocab_size: int | None = None) -> None:
        """Raise `ValueError`, whose message begins with the field's name, if a value is out of range."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, got {value}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty must be above 0 and at most 100, got {self.repetition_penalty}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}")
        self._verify_stops(vocab_size)
        self._verify_bias(vocab_size)

    def _verify_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not s for s in self.stop):
            raise ValueError("stop strings must not be empty")
        bad = [t for t in self.stop_token_ids if t < 0 or (vocab_size is not None and t >= vocab_size)]
        if bad:
            raise ValueError(f"stop_token_ids holds ids outside the vocabulary: {bad[:5]}")

    def _verify_bias(self, vocab_size: int | None) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
        bad = [t for t in self.logit_bias if t < 0 or (vocab_size is not None and t >= vocab_size)]
        if bad:
            raise ValueError(f"logit_bias holds ids outside the vocabulary: {bad[:5]}")
        wrong = [v for v in self.logit_bias.values() if not -100.0 <= v <= 100.0]
        if wrong:
            raise ValueError(f"logit_bias values must be between -100 and 100, got {wrong[0]}")


_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "temperature": (0, 100),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, MAX_N),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


class EngineRequest(msgspec.Struct, frozen=True):
    """One prompt to continue. `request_id` is made by the caller's server, never taken from a client."""

    request_id: str
    segments: tuple[Segment, ...]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    """-8 to 8; lower goes first. One level is worth 30 s of waiting, so a low priority delays but never starves."""
    cache: CacheMode = CacheMode.AUTO

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens over all segments."""
        return sum(len(s.token_ids) for s in self.segments)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the model's own distribution: before bias, penalties and temperature."""

    token_id: int
    """The token that stands there."""
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the best tokens, best first, as many as were asked for."""


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
    index: int = 0
    """Which of the request's n continuations this is."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The next prompt tokens' in order, beginning with the second token; the first has none."""
    finish_reason: FinishReason | None = None
    """Set on the last output of each continuation, and only there."""
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
    weights: str
    """How the weights are kept, and their size."""
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
    pinned_blocks: int = 0
    """Blocks of system segments that are evicted last."""
    num_recomputed_tokens: int = 0
    """Tokens whose KV was lost by preemption and had to be computed again."""
    num_non_finite: int = 0
    """Requests that ended because the model gave NaN or infinite logits."""
    num_integrity_checks: int = 0
    num_integrity_failures: int = 0
    """Idle checks of the cache's invariants, and how many found one broken."""
