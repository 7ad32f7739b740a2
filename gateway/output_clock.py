"""Times of one prompt's outputs, as the metrics count them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine import RequestOutput
from gateway.metrics import Metrics


class OutputClock:
    """Observes the outputs of one prompt.

    Args: elapsed_s, seconds since the request arrived, now; queued_s, how long it waited before the engine had it.
    """

    def __init__(self, metrics: Metrics, elapsed_s: Callable[[], float], queued_s: float) -> None:
        self._metrics, self._elapsed_s, self._queued_s = metrics, elapsed_s, queued_s
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def take(self, out: RequestOutput) -> RequestOutput:
        """Observe an output; its statistics, if any, come back with the time in the gateway's queue added."""
        now = self._elapsed_s()
        if out.token_ids:
            last = self._last_s.get(out.index)
            if last is None:
                self._first_s[out.index] = now
                self._metrics.ttft.observe(now)
            else:
                self._metrics.itl.observe(now - last)
            self._last_s[out.index] = now
        if out.stats is None or out.finish_reason is None:
            return out
        stats = msgspec.structs.replace(out.stats, queue_s=out.stats.queue_s + self._queued_s)
        self._metrics.finished(stats, now, out.index, out.finish_reason)
        return msgspec.structs.replace(out, stats=stats)
