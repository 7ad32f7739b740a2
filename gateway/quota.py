"""Quotas of one API key: requests at once, requests and tokens per minute. Pure logic; the time is given.

What is per minute is a bucket that holds a minute's worth and fills steadily, so a quota can be used in one burst and
then comes back bit by bit. Tokens are taken by estimate when a request comes and corrected when it ends, so the bucket
may go below zero; whoever owes waits until it is filled again.
"""

from __future__ import annotations

import math

MINUTE_S = 60.0


class Bucket:
    """Holds up to `per_minute` and fills at that rate. 0 means no limit."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute, self._level, self._at = per_minute, per_minute, now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there, 0 if it is; more than the bucket holds needs a full bucket."""
        if not self._per_minute:
            return 0.0
        missing = min(amount, self._per_minute) - self._level_at(now)
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take out, below zero if need be; a negative amount is given back."""
        if self._per_minute:
            self._level = min(self._per_minute, self._level_at(now) - amount)
            self._at = now

    def _level_at(self, now: float) -> float:
        return min(self._per_minute, self._level + (now - self._at) * self._per_minute / MINUTE_S)


class KeyQuota:
    """What one key uses now."""

    def __init__(self, max_concurrent: int, requests_per_minute: int, tokens_per_minute: int, now: float) -> None:
        self._max_concurrent = max_concurrent
        self._requests = Bucket(requests_per_minute, now)
        self._tokens = Bucket(tokens_per_minute, now)
        self.num_concurrent = 0

    def refusal(self, tokens: float, now: float) -> tuple[str, int] | None:
        """Which quota a request would break, and after how many whole seconds to try again; None if none."""
        if self._max_concurrent and self.num_concurrent >= self._max_concurrent:
            return "concurrent_requests", 1
        for name, wait_s in (
            ("requests_per_minute", self._requests.wait_s(1, now)),
            ("tokens_per_minute", self._tokens.wait_s(tokens, now)),
        ):
            if wait_s > 0:
                return name, math.ceil(wait_s)
        return None

    def begin(self, tokens: float, now: float) -> None:
        """A request is let in; its tokens are an estimate."""
        self.num_concurrent += 1
        self._requests.take(1, now)
        self._tokens.take(tokens, now)

    def end(self, estimated: float, used: float, now: float) -> None:
        """It has ended; `used` is what it did take."""
        self.num_concurrent -= 1
        self._tokens.take(used - estimated, now)
