"""Admission: who is let in, who waits, and who is refused before any work is done for it.

A request is admitted by what its headers say (`Admission.admit`): its tokens are estimated from the body's length. It
then counts as queued until the engine may have it (`Admission.ask`), when its prompt is made and the tokens are known.
At most `max_active` sequences are with the engine; the rest wait in a fair queue bounded by requests and prompt tokens.

When the queue is full, the newest request of the tenant that has most in it, for its weight, gives way to one of a
tenant that has less, so that nobody can keep others out by filling it. Everything here is pure logic on one thread,
with a clock that is given; `gateway.turns` adds the waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from gateway.errors import ApiError
from gateway.fair_queue import Entry, FairQueue
from gateway.keys import Caller
from gateway.quota import KeyQuota

BYTES_PER_TOKEN = 4
LEARNING_RATE = 0.1
"""Weight of the newest value in running means."""
MAX_RETRY_AFTER_S = 60


ANYONE = Caller()


def caller_in(scope: Mapping[str, Any]) -> Caller:
    """The caller that the gate has put into a connection's state; anyone where the path is open to all."""
    caller: Caller = scope.get("state", {}).get("caller", ANYONE)
    return caller


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the queue and quotas of each key; 0 is no limit for the quotas."""

    max_active: int
    max_queued_requests: int = 256
    max_queued_tokens: int = 262_144
    queue_timeout_s: float = 120.0
    """0: none."""
    key_max_concurrent: int = 0
    key_requests_per_minute: int = 0
    key_tokens_per_minute: int = 0
    tenant_weights: dict[str, float] = {}
    """Shares of the engine under load; 1 for a tenant that is not named."""


class Refused(ApiError):
    """A request that is not let in; `reason` is one of a fixed few, for the metric."""

    def __init__(self, code: str, reason: str, message: str, retry_after_s: int) -> None:
        super().__init__(code, message, retry_after_s=retry_after_s)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Turn:
    """One prompt of a request: it waits, then holds seats until it ends."""

    ticket: Ticket
    num_tokens: int
    seats: int
    on_turn: Callable[[], None]
    on_refusal: Callable[[Refused], None]
    asked_s: float
    num_output_tokens: int = 0
    """Tokens made so far, over all its sequences; its owner counts them."""
    waited_s: float = 0.0
    """How long it waited for its turn."""
    is_running: bool = False
    entry: Entry[Turn] | None = None


class Stage(NamedTuple):
    """A part of a request's way, for traces; times by admission's clock."""

    name: str
    start_s: float
    end_s: float
    parent: str = ""
    """Name of the stage that it is a part of."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was let in. Its owner closes it."""

    caller: Caller
    route: str
    arrived_s: float
    num_body_tokens: int
    """Tokens that the body's length stands for."""
    num_tokens: int
    """Prompt tokens expected in all, until its prompts are made."""
    deadline_s: float | None
    holds_place: bool = True
    """Whether it counts as queued although no prompt of it waits yet."""
    used_tokens: int = 0
    """Prompt and output tokens of its ended prompts."""
    stages: list[Stage] = field(default_factory=list)
    engine_ids: list[str] = field(default_factory=list)
    """The engine's names of its prompts, which the engine's log lines carry."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    fault: str | None = None
    """Error code of the first of its prompts that failed."""
    is_closed: bool = False


class Admission:
    """Bounds, quotas and order of all generating requests."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._queue: FairQueue[Turn] = FairQueue()
        self._keys: dict[str, KeyQuota] = {}
        self._extra_tokens: dict[str, float] = {}
        """Route -> mean of prompt tokens beyond those that the body's length stands for, as retrieval adds them."""
        self._num_preparing = 0
        self._preparing_tokens = 0
        self._waiting_tokens = 0
        self._seats_used = 0
        self._num_running = 0
        self._last_end_s: float | None = None
        self._pace_s = 1.0
        """Mean time between the ends of requests while others wait."""

    @property
    def num_queued(self) -> int:
        """Requests that were let in and have no seat yet."""
        return self._num_preparing + len(self._queue)

    @property
    def num_waiting(self) -> int:
        """Those of them that are ready for the engine."""
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """Their prompt tokens, estimated where the prompt is not made yet."""
        return self._preparing_tokens + self._waiting_tokens

    @property
    def num_running(self) -> int:
        """Prompts that the engine has."""
        return self._num_running

    def admit(self, caller: Caller, route: str, num_body_bytes: int) -> Ticket:
        """Let a request in. Raises `Refused` where a quota or the queue is used up."""
        now = self._clock()
        num_body_tokens = max(1, num_body_bytes // BYTES_PER_TOKEN)
        num_tokens = num_body_tokens + int(self._extra_tokens.get(route, 0.0))
        quota = self._quota(caller, now)
        broken = quota.refusal(num_tokens, now)
        if broken is not None:
            name, wait_s = broken
            raise Refused(
                "rate_limit_exceeded", f"key_{name}", f"the key's limit of {name.replace('_', ' ')} is used up", wait_s
            )
        self._make_place(caller, num_tokens)
        quota.begin(num_tokens, now)
        self._num_preparing += 1
        self._preparing_tokens += num_tokens
        timeout_s = self.limits.queue_timeout_s
        return Ticket(caller, route, now, num_body_tokens, num_tokens, now + timeout_s if timeout_s else None)

    def ask(
        self,
        ticket: Ticket,
        num_tokens: int,
        max_tokens: int,
        seats: int,
        on_turn: Callable[[], None],
        on_refusal: Callable[[Refused], None],
    ) -> Turn:
        """Ask for the turn of a prompt that is made; `on_turn` is called at once or later, else `on_refusal`.

        Raises `Refused` where a request of several prompts does not find room for the next.
        Args: seats, how many sequences it will run; max_tokens, the most that each of them may make.
        """
        if ticket.holds_place:
            self._give_up_place(ticket)
            extra = self._extra_tokens.get(ticket.route, 0.0)
            newest = max(0, num_tokens - ticket.num_body_tokens)
            self._extra_tokens[ticket.route] = extra + LEARNING_RATE * (newest - extra)
        else:
            self._make_place(ticket.caller, num_tokens)
        turn = Turn(ticket, num_tokens, seats, on_turn, on_refusal, self._clock())
        cost = num_tokens + seats * max_tokens
        turn.entry = self._queue.push(turn, ticket.caller.tenant, cost, self._weight(ticket.caller))
        self._waiting_tokens += num_tokens
        self._grant()
        return turn

    def leave(self, turn: Turn) -> None:
        """A prompt has ended, or waits no longer. May be called again."""
        entry, turn.entry = turn.entry, None
        if entry is None:
            return
        if not turn.is_running:
            self._queue.remove(entry)
            self._waiting_tokens -= turn.num_tokens
            return
        used = turn.num_tokens + turn.num_output_tokens
        turn.ticket.used_tokens += used
        self._queue.settle(entry, used)
        self._seats_used -= turn.seats
        self._num_running -= 1
        self._note_pace()
        self._grant()

    def close(self, ticket: Ticket) -> None:
        """A request has ended, however; its turns have left before. May be called again."""
        if ticket.is_closed:
            return
        ticket.is_closed = True
        if ticket.holds_place:
            self._give_up_place(ticket)
        now = self._clock()
        self._quota(ticket.caller, now).end(ticket.num_tokens, ticket.used_tokens, now)

    def now(self) -> float:
        """The time by which everything here is counted."""
        return self._clock()

    def left_s(self, ticket: Ticket) -> float | None:
        """Seconds that a request may still be queued; None: for ever."""
        return None if ticket.deadline_s is None else max(0.0, ticket.deadline_s - self._clock())

    def elapsed_s(self, ticket: Ticket) -> float:
        """Seconds since a request arrived."""
        return self._clock() - ticket.arrived_s

    def waiting(self) -> list[Turn]:
        """Prompts that wait for their turn, tenant by tenant."""
        return [entry.item for entry in self._queue.waiting()]

    def refuse_all(self, refusal: Refused) -> None:
        """Refuse everything that waits."""
        while (entry := self._queue.longest()) is not None:
            self._push_out(entry.item, refusal)

    def _quota(self, caller: Caller, now: float) -> KeyQuota:
        quota = self._keys.get(caller.key_id)
        if quota is None:
            limits = self.limits
            quota = self._keys[caller.key_id] = KeyQuota(
                limits.key_max_concurrent, limits.key_requests_per_minute, limits.key_tokens_per_minute, now
            )
        return quota

    def _weight(self, caller: Caller) -> float:
        return self.limits.tenant_weights.get(caller.tenant, 1.0)

    def _give_up_place(self, ticket: Ticket) -> None:
        ticket.holds_place = False
        self._num_preparing -= 1
        self._preparing_tokens -= ticket.num_tokens

    def _make_place(self, caller: Caller, num_tokens: int) -> None:
        """Raise `Refused` unless there is room in the queue, or can be made."""
        while (what := self._what_is_full(num_tokens)) is not None:
            refusal = Refused("queue_full", "queue_full", f"the server is busy: {what}", self._retry_after_s())
            victim = self._queue.longest()
            if victim is None or not self._has_less(caller, victim):
                raise refusal
            self._push_out(victim.item, refusal)

    def _what_is_full(self, num_tokens: int) -> str | None:
        free = max(0, self.limits.max_active - self._seats_used)
        if self.num_queued < free:
            return None
        if self.num_queued - free >= self.limits.max_queued_requests:
            return f"{self.num_queued} requests are queued, {self.limits.max_queued_requests} may be"
        if self.num_queued_tokens + num_tokens > self.limits.max_queued_tokens:
            return (
                f"{self.num_queued_tokens} prompt tokens are queued and this request has about {num_tokens}; "
                f"{self.limits.max_queued_tokens} may be"
            )
        return None

    def _has_less(self, caller: Caller, victim: Entry[Turn]) -> bool:
        """Whether a caller's tenant would still have less in the queue, for its weight, than the victim's has."""
        if victim.tenant == caller.tenant:
            return False
        mine = (self._queue.num_waiting(caller.tenant) + 1) / self._weight(caller)
        return mine < self._queue.num_waiting(victim.tenant) / victim.weight

    def _push_out(self, turn: Turn, refusal: Refused) -> None:
        self.leave(turn)
        turn.on_refusal(refusal)

    def _grant(self) -> None:
        while self._seats_used < self.limits.max_active and (entry := self._queue.pop()) is not None:
            turn = entry.item
            turn.is_running = True
            turn.waited_s = self._clock() - turn.asked_s
            self._waiting_tokens -= turn.num_tokens
            self._seats_used += turn.seats
            self._num_running += 1
            turn.on_turn()

    def _note_pace(self) -> None:
        now = self._clock()
        if self._last_end_s is not None and len(self._queue):
            self._pace_s += LEARNING_RATE * (now - self._last_end_s - self._pace_s)
        self._last_end_s = now

    def _retry_after_s(self) -> int:
        """When about half of the queue will be gone."""
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._pace_s * self.num_queued / 2)))
