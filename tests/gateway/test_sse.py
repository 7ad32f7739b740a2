"""Streams: events in order, comments while there are none, and what was opened is closed."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator

import pytest

from gateway.sse import KEEP_ALIVE, with_keep_alive


class Clock(selectors.DefaultSelector):
    """Time that passes only while nothing is to be done, and then at once: no test waits, none depends on the machine."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def run(work):
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Source:
    """Events with pauses before them; notes that it was closed."""

    def __init__(self, *steps: tuple[float | None, bytes | Exception]) -> None:
        self.steps, self.is_closed = steps, False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for pause_s, item in self.steps:
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


def collect(source: Source, every_s: float) -> list[bytes]:
    async def read() -> list[bytes]:
        return [piece async for piece in with_keep_alive(source.events(), every_s)]

    return run(read())


def test_events_come_in_order_and_what_waits_comes_together() -> None:
    source = Source(*((None, b"%d;" % i) for i in range(5)))
    first, *rest = collect(source, 10)
    assert first == KEEP_ALIVE
    assert b"".join(rest) == b"0;1;2;3;4;"
    assert len(rest) == 1
    assert source.is_closed


def test_comments_fill_the_pauses_only() -> None:
    pieces = collect(Source((25, b"a"), (1, b"b"), (25, b"c")), 10)
    assert pieces == [KEEP_ALIVE, KEEP_ALIVE, KEEP_ALIVE, b"a", b"b", KEEP_ALIVE, KEEP_ALIVE, b"c"]
    assert collect(Source((9, b"a"), (9, b"b"), (9, b"c")), 10) == [KEEP_ALIVE, b"a", b"b", b"c"]


def test_a_fault_comes_after_what_was_before_it() -> None:
    source = Source((0, b"a"), (0, ValueError("broken")))
    seen: list[bytes] = []

    async def read() -> None:
        async for piece in with_keep_alive(source.events(), 10):
            seen.extend([piece])

    with pytest.raises(ValueError, match="broken"):
        run(read())
    assert seen == [KEEP_ALIVE, b"a"]
    assert source.is_closed


def test_a_reader_that_leaves_closes_the_events() -> None:
    source = Source((0, b"a"), (60, b"never"))

    async def leave() -> None:
        stream = with_keep_alive(source.events(), 10)
        async for piece in stream:
            if piece == b"a":
                break
        await stream.aclose()

    run(leave())
    assert source.is_closed
