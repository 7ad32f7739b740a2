"""Server-sent events, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.response import Stream

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before the answer was ready."""


def event(data: object, name: str | None = None) -> bytes:
    """One event with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def stream(events: AsyncGenerator[bytes, None], keep_alive_s: float) -> Stream:
    """A response of events, with comments while there are none. Closing it closes the generator."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Stream(with_keep_alive(events, keep_alive_s), media_type="text/event-stream", headers=headers)


async def with_keep_alive(events: AsyncGenerator[bytes, None], every_s: float) -> AsyncIterator[bytes]:
    """Pass events on, those that wait already in one piece; after `every_s` seconds without one, a comment.

    The first comment is sent at once. A task reads ahead, since a task and a timer for each event would cost more than
    the event; what it holds is bounded by the answer's length.
    """
    yield KEEP_ALIVE
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[bytes | BaseException] = asyncio.Queue()
    last = loop.time()
    timer = loop.call_later(every_s, lambda: tick())

    def tick() -> None:
        nonlocal timer
        idle_s = loop.time() - last
        if idle_s >= every_s:
            ready.put_nowait(KEEP_ALIVE)
        timer = loop.call_later(every_s if idle_s >= every_s else every_s - idle_s, tick)

    async def read_ahead() -> None:
        try:
            async for item in events:
                ready.put_nowait(item)
            ready.put_nowait(StopAsyncIteration())
        except Exception as e:  # raised again where the events are passed on
            ready.put_nowait(e)

    reading = asyncio.create_task(read_ahead())
    try:
        while True:
            item = await ready.get()
            piece = b""
            while isinstance(item, bytes):
                piece += item
                if ready.empty():
                    break
                item = ready.get_nowait()
            if piece:
                last = loop.time()
                yield piece
            if isinstance(item, StopAsyncIteration):
                return
            if isinstance(item, BaseException):
                raise item
    finally:
        timer.cancel()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await events.aclose()


async def until_disconnect(request: Request[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client goes away. Raises `ClientGone`.

    The server cancels a stream's generator on disconnect but never a plain handler, so this watches the connection.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for t in (task, watch):
            if not t.done():
                t.cancel()
                with suppress(asyncio.CancelledError):
                    await t


async def within(request: Request[Any, Any, Any], work: asyncio.Future[T], time_s: float) -> None:
    """Give `work` some time, so that its faults still get a status of their own before the stream begins.

    Raises what it raised by then, and `ClientGone`; it is cancelled where this ends with a fault.
    """
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        both: set[asyncio.Future[Any]] = {work, watch}
        await asyncio.wait(both, timeout=time_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        elif watch.done():
            raise ClientGone
    except BaseException:
        work.cancel()
        raise
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
