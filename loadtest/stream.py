"""Reads the streams of both APIs and times their tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


class StreamFailed(Exception):
    """The stream brought an error, or ended without saying that it was done."""


@dataclass(slots=True)
class Timed:
    """When text arrived, and what the last event said."""

    started: float
    stamps: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    num_sources: int | None = None
    """Passages that were found; None where the stream does not say."""

    @property
    def ttft_ms(self) -> float | None:
        """Start to the first text; None where no text came."""
        return (self.stamps[0] - self.started) * 1e3 if self.stamps else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None where there is no second token."""
        n = self.usage.get("completion_tokens") or len(self.stamps)
        return (self.stamps[-1] - self.stamps[0]) * 1e3 / (n - 1) if self.stamps and n > 1 else None

    @property
    def cached_share(self) -> tuple[int, int]:
        """Cached and all prompt tokens."""
        details = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0, self.usage.get("prompt_tokens") or 0


def read_stream(lines: Iterable[bytes | str], started: float, clock: Callable[[], float] = time.perf_counter) -> Timed:
    """Read server-sent events of /rag/query or of a chat to their end. Raises `StreamFailed`.

    It reads on after `[DONE]`: a connection can be used again only if nothing is left on it.
    """
    timed, is_done = Timed(started), False
    for name, payload in read_events(lines):
        if payload == "[DONE]":
            is_done = True
            continue
        try:
            event = json.loads(payload)
        except ValueError as e:
            raise StreamFailed(f"an event is no JSON: {payload[:80]!r}") from e
        if name == "error" or "error" in event:
            raise StreamFailed((event.get("error") or {}).get("message", "error"))
        if text_of(name, event):
            timed.stamps.append(clock())
        if name == "sources":
            timed.num_sources = len(event["sources"])
        timed.usage = event.get("usage") or timed.usage
    if not is_done:
        raise StreamFailed("the stream ended before it was done")
    return timed


def read_events(lines: Iterable[bytes | str]) -> Iterator[tuple[str, str]]:
    """Name ("" where there is none) and data of each event, as soon as its data line is there.

    Our servers put each event's data on one line, so there is no need to wait for the empty line behind it.
    """
    name = ""
    for raw in lines:
        line = raw.decode() if isinstance(raw, bytes) else raw
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, line[5:].strip()
            name = ""


def text_of(name: str, event: dict[str, Any]) -> str:
    """The text of the answer that an event brings."""
    if name == "delta":
        return str(event["text"])
    return "".join((c.get("delta") or {}).get("content") or "" for c in event.get("choices") or ())
