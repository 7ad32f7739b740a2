"""Whose turn is next: requests wait in one queue for each tenant, and tenants share what there is by weight.

Start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services
Packet Switching Networks", SIGCOMM 1996) over tokens. Each tenant has a clock of its own that a request moves on by
cost / weight, and the tenant whose clock is furthest behind goes next. While two tenants both have requests waiting,
what they got, each divided by its weight, differs by no more than one request of each. A tenant that comes back after
a pause begins at the time of the one served last: idleness earns nothing.

A request's cost is known only when it has ended; `settle` then corrects the clock, as virtual token counters do
(Sheng et al.: "Fairness in Serving Large Language Models", OSDI 2024, section 4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """A request that waits, or has had its turn."""

    item: T
    tenant: str
    cost: float
    """Tokens it is expected to take."""
    weight: float
    serial: int = 0


@dataclass(slots=True)
class _Line(Generic[T]):
    """A tenant's requests in order of arrival, and its clock."""

    clock: float
    waiting: deque[Entry[T]] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """Lines of tenants. Nothing here waits: the owner calls `pop` when there is room for one more."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}
        self._now = 0.0
        """Clock of the tenant served last, before its request moved it on."""
        self._serial = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_waiting(self, tenant: str) -> int:
        """Requests of one tenant that wait."""
        line = self._lines.get(tenant)
        return len(line.waiting) if line is not None else 0

    def push(self, item: T, tenant: str, cost: float, weight: float = 1.0) -> Entry[T]:
        """Put a request at the end of its tenant's line. Raises `ValueError` unless cost and weight are positive."""
        if cost <= 0 or weight <= 0:
            raise ValueError(f"cost and weight must be positive, got {cost} and {weight}")
        line = self._lines.setdefault(tenant, _Line(self._now))
        if not line.waiting:
            line.clock = max(line.clock, self._now)
        self._serial += 1
        entry = Entry(item, tenant, cost, weight, self._serial)
        line.waiting.append(entry)
        self._num_waiting += 1
        return entry

    def pop(self) -> Entry[T] | None:
        """Take the next request, or None if none waits."""
        waiting = [line for line in self._lines.values() if line.waiting]
        if not waiting:
            return None
        line = min(waiting, key=lambda x: (x.clock, x.waiting[0].serial))
        entry = line.waiting.popleft()
        self._num_waiting -= 1
        self._now = line.clock
        line.clock += entry.cost / entry.weight
        self._forget()
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """Take out a request that waits no longer. Raises `ValueError` if it does not wait."""
        line = self._lines.get(entry.tenant)
        if line is None:
            raise ValueError("the request does not wait")
        line.waiting.remove(entry)
        self._num_waiting -= 1

    def settle(self, entry: Entry[T], cost: float) -> None:
        """Say what a request that had its turn did cost."""
        line = self._lines.get(entry.tenant)
        if line is not None:
            line.clock += (cost - entry.cost) / entry.weight

    def waiting(self) -> list[Entry[T]]:
        """All that wait, tenant by tenant, each in order."""
        return [entry for line in self._lines.values() for entry in line.waiting]

    def longest(self) -> Entry[T] | None:
        """The request that came last in the line that is longest for its weight, or None if none waits."""
        lines = [line for line in self._lines.values() if line.waiting]
        if not lines:
            return None
        return max(lines, key=lambda x: (len(x.waiting) / x.waiting[-1].weight, x.waiting[-1].serial)).waiting[-1]

    def _forget(self) -> None:
        """Drop tenants that would begin at the same time anew: all once nobody waits, since then nobody competes."""
        if not self._num_waiting:
            self._now = max(line.clock for line in self._lines.values())
        for tenant in [t for t, line in self._lines.items() if not line.waiting and line.clock <= self._now]:
            del self._lines[tenant]
