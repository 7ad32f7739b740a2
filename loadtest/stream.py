"""Reads the streams of both APIs and times their tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
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

    @property
    def ttft_ms(self) -> float:
        """Start to the first text."""
        return (self.stamps[0] - self.started) * 1e3 if self.stamps else 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first."""
        n = self.usage.get("completion_tokens") or len(self.stamps)
        return (self.stamps[-1] - self.stamps[0]) * 1e3 / (n - 1) if self.stamps and n > 1 else 0.0

    @property
    def cached_share(self) -> tuple[int, int]:
        """Cached and all prompt tokens."""
        details = self.usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0, self.usage.get("prompt_tokens") or 0


def read_stream(lines: Iterable[bytes | str], started: float, clock: Any = time.perf_counter) -> Timed:
    """Read server-sent events of /rag/query or of a chat to their end. Raises `StreamFailed`."""
    timed, is_done = Timed(started), False
    for raw in lines:
        line = raw.decode() if isinstance(raw, bytes) else raw
        if not line.startswith("data:"):
            continue
        payload = line[5:].strip()
        if payload == "[DONE]":
            is_done = True
            continue
        event = json.loads(payload)
        if "error" in event:
            raise StreamFailed(event["error"].get("message", "error"))
        if text_of(event):
            timed.stamps.append(clock())
        timed.usage = event.get("usage") or timed.usage
    if not is_done:
        raise StreamFailed("the stream ended before it was done")
    return timed


def text_of(event: dict[str, Any]) -> str:
    """The text that an event brings."""
    if "choices" in event:
        return "".join((c.get("delta") or {}).get("content") or "" for c in event["choices"])
    return str(event.get("text") or "") if set(event) == {"text"} else ""
