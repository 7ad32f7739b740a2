"""Turns token events into text for the caller, and stops at stop strings.

Text is held back only while it could still become part of a stop string, so streamed text equals unstreamed text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import FinishReason, RequestOutput
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step import TokenEvent
from engine.tokenizer import DetokenizerStream, Tokenizer


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Take a piece; returns the text that is safe to show and whether a stop string was met."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Longest end of `text` that begins a stop string."""
        longest = max(len(s) for s in self._stops) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stops):
                return n
        return 0


@dataclass(slots=True)
class _Stream:
    detokenizer: DetokenizerStream
    stops: StopStrings


class OutputProcessor:
    """Keeps one text stream for each continuation."""

    def __init__(self, tokenizer: Tokenizer, scheduler: Scheduler) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._streams: dict[int, _Stream] = {}

    def open(self, request: Request) -> None:
        """Begin a request's text."""
        stops = StopStrings(request.source.params.stop)
        self._streams[request.key] = _Stream(self._tokenizer.stream(), stops)

    def close(self, request: Request) -> None:
        """Forget a request that was aborted."""
        self._streams.pop(request.key, None)

    def process(self, events: Sequence[TokenEvent]) -> list[RequestOutput]:
        """Outputs of a step. May end requests in the scheduler, where a stop string is met."""
        return [self._output(event) for event in events]

    def _output(self, event: TokenEvent) -> RequestOutput:
        request = event.request
        text = self._text(request, event.token_id)
        if request.finish_reason is not None:
            del self._streams[request.key]
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=() if event.token_id is None else (event.token_id,),
            index=request.index,
            logprobs=() if event.logprobs is None else (event.logprobs,),
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=request.finish_reason,
            error=request.error,
            stats=request.stats() if request.finish_reason is not None else None,
        )

    def _text(self, request: Request, token_id: int | None) -> str:
        """What may be shown now. Ends the request where a stop string is met."""
        stream = self._streams[request.key]
        # The token that ends the text by its id is not part of the text.
        ends_by_id = request.finish_reason is FinishReason.STOP
        piece = "" if ends_by_id or token_id is None else stream.detokenizer.step(token_id)
        if request.num_output_tokens < request.source.params.min_tokens:
            return piece
        text, met = stream.stops.push(piece)
        if met:
            self._scheduler.finish(request, FinishReason.STOP)
            # A length limit reached by the same token yields to the stop string, as the text ends before it.
            request.finish_reason = FinishReason.STOP
            return text
        return text + stream.stops.flush() if request.finish_reason is not None else text
