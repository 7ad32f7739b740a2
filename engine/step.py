"""Records that pass between scheduler and runner. Immutable; nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from engine.api import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """Tokens that follow each other in one request. Block arrays cover all its tokens up to and with these.

    A request may have several of these in a step: each layer writes the KV of all new tokens before any token attends.
    """

    key: int
    """The scheduler's own number for the request; results are filed under it."""
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
    output_index: int = 0
    """How many tokens the request has made, which with seed and stream fixes the draw."""
    stream: int = 0
    """Which of n continuations this is; each draws numbers of its own."""
    banned_ids: tuple[int, ...] = ()
    """Tokens that may not come yet, by min_tokens."""
    prompt_ids: npt.NDArray[np.int64] | None = None
    """Distinct token ids of the prompt, where a penalty needs them."""
    output_ids: npt.NDArray[np.int64] | None = None
    """Token ids made so far, where a penalty needs them."""
    prompt_targets: tuple[int, ...] = ()
    """Tokens that stand behind the first new ones, where their log-probabilities are asked for."""


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One step's work."""

    requests: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens in the step."""
        return sum(len(r.token_ids) for r in self.requests)


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one request: a token, log-probabilities of prompt tokens, or a fault that ends it."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    fault: str | None = None
    is_non_finite: bool = False


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """A request gained a token or prompt log-probabilities, or ended, or both."""

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
