"""Waiting for admission's turns on the event loop, and which request the code that runs now belongs to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from gateway.admission import Admission, Refused, Stage, Ticket, Turn
from retrieval import SearchResult

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters that are tokenized in about 10 ms."""

TICKET: ContextVar[Ticket | None] = ContextVar("foreword_ticket", default=None)
"""The admitted request that this task works for; set by the middleware, so it holds for every route."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Note what the block takes as a stage of the request that this task works for."""
    ticket, started = TICKET.get(), time.monotonic()
    try:
        yield
    finally:
        if ticket is not None:
            ticket.stages.append(Stage(name, started, time.monotonic()))


async def assemble(num_chars: int, work: Callable[[], T]) -> T:
    """Make a prompt, of so many characters: long ones in a thread, as the event loop must not wait for tokenizing."""
    with stage("assemble"):
        return work() if num_chars < LONG_TEXT else await asyncio.to_thread(work)


def search_stages(started_s: float, found: SearchResult) -> None:
    """Note a search and its parts, which the worker timed: they stand one after the other, at the search's end."""
    ticket, now = TICKET.get(), time.monotonic()
    if ticket is None:
        return
    ticket.stages.append(Stage("retrieve", started_s, now))
    parts = {"embed": found.embed_ms, **found.stages_ms, "rerank": found.rerank_ms}
    at = max(started_s, now - sum(parts.values()) / 1e3)
    for name, ms in parts.items():
        if ms:
            ticket.stages.append(Stage(name, at, at + ms / 1e3, "retrieve"))
        at += ms / 1e3


def queue_timeout(admission: Admission) -> Refused:
    """The answer to a request that waited too long."""
    limit_s = admission.limits.queue_timeout_s
    return Refused(
        "queue_timeout", "queue_timeout", f"the request was queued for {limit_s:g} s and did not get its turn", 5
    )


@asynccontextmanager
async def turn_of(
    admission: Admission, ticket: Ticket, num_tokens: int, max_tokens: int, seats: int
) -> AsyncGenerator[Turn, None]:
    """Wait for the turn of a prompt, and hold its seats. Raises `Refused`; leaving early gives the place up."""
    granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_turn() -> None:
        if not granted.done():
            granted.set_result(None)

    def on_refusal(refusal: Refused) -> None:
        if not granted.done():
            granted.set_exception(refusal)

    turn = admission.ask(ticket, num_tokens, max_tokens, seats, on_turn, on_refusal)
    try:
        await before_deadline(admission, ticket, granted)
        yield turn
    finally:
        admission.leave(turn)


async def before_deadline(admission: Admission, ticket: Ticket, work: Awaitable[T]) -> T:
    """What `work` gives, unless the ticket's time in the queue is over before. Raises `Refused`."""
    try:
        async with asyncio.timeout(admission.left_s(ticket)):
            return await work
    except TimeoutError as e:
        raise queue_timeout(admission) from e
