"""How the gateway sees an engine: one protocol, and the engine process that implements it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from engine import (
    Abort,
    Add,
    AskStats,
    AskView,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    EngineStats,
    EngineView,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    RequestOutput,
    Stats,
    View,
)
from gateway.supervisor import ChildProcess

STATS_TIMEOUT_S = 5.0


class EngineDead(Exception):
    """The engine is gone, or not there yet."""


class EngineClient(Protocol):
    """What the gateway asks of an engine, wherever it runs."""

    @property
    def info(self) -> EngineInfo | None:
        """What it serves; None until it was ready once."""

    @property
    def is_ready(self) -> bool:
        """Whether a token can be made now."""

    @property
    def num_restarts(self) -> int:
        """How often it died and was started again."""

    async def start(self) -> None:
        """Start it; returns when it is ready. Raises `EngineDead` if it cannot start."""

    async def stop(self) -> None:
        """End it."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request until all its continuations have ended; closing the generator aborts it.

        The first may be empty: it says that the request waits no longer. Raises `EngineDead` when the engine dies.
        """

    async def stats(self) -> EngineStats:
        """Counters and gauges. Raises `EngineDead`."""

    async def view(self) -> EngineView:
        """What it is doing, in detail. Raises `EngineDead`."""


class LocalEngineClient:
    """An engine in a child process of this one."""

    def __init__(self, config: EngineConfig) -> None:
        args = ["--config", msgspec.json.encode(config).decode()]
        self._child = ChildProcess("engine.process", args, self._take, self._died)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._queues: dict[str, asyncio.Queue[RequestOutput | EngineDead]] = {}
        self._answers: dict[type[Any], list[asyncio.Future[Any]]] = {Stats: [], View: []}
        """Who waits for an answer of which kind."""
        self._ready = asyncio.Event()
        self._failed: str | None = None
        self._settled = asyncio.Event()
        """Ready or failed for good."""
        self.info: EngineInfo | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a token can be made now."""
        return self._ready.is_set()

    @property
    def num_restarts(self) -> int:
        """How often it died and was started again."""
        return self._child.num_restarts

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._child.pid

    async def start(self) -> None:
        """Start the process; returns when it is ready. Raises `EngineDead` if it cannot start."""
        self._child.start()
        await self._settled.wait()
        if self._failed is not None:
            raise EngineDead(f"the engine cannot start: {self._failed}")

    async def stop(self) -> None:
        """End the process."""
        self._ready.clear()
        self._fail_all("the engine was stopped")
        await self._child.stop()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request until all its continuations have ended; closing the generator aborts it.

        Raises `EngineDead` when the engine dies.
        """
        if not self._ready.is_set():
            raise EngineDead("the engine is not ready")
        queue: asyncio.Queue[RequestOutput | EngineDead] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._child.send(self._encoder.encode(Add(request)))
        num_going = request.params.n
        try:
            while num_going:
                out = await queue.get()
                if isinstance(out, EngineDead):
                    num_going = 0
                    raise out
                if out.finish_reason is not None:
                    # Without statistics the request was refused as a whole.
                    num_going = num_going - 1 if out.stats is not None else 0
                yield out
        finally:
            self._queues.pop(request.request_id, None)
            if num_going:
                self._child.send(self._encoder.encode(Abort(request.request_id)))

    async def stats(self) -> EngineStats:
        """Counters and gauges. Raises `EngineDead`."""
        answer: Stats = await self._ask(AskStats(), Stats)
        return answer.stats

    async def view(self) -> EngineView:
        """What it is doing, in detail. Raises `EngineDead`."""
        answer: View = await self._ask(AskView(), View)
        return answer.view

    async def _ask(self, question: AskStats | AskView, kind: type[Any]) -> Any:
        if not self._ready.is_set():
            raise EngineDead("the engine is not ready")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[kind].append(future)
        self._child.send(self._encoder.encode(question))
        try:
            return await asyncio.wait_for(future, STATS_TIMEOUT_S)
        except TimeoutError as e:
            raise EngineDead("the engine does not answer") from e

    def _take(self, frame: bytes) -> None:
        match self._decoder.decode(frame):
            case Ready(info):
                self.info = info
                self._child.mark_ready()
                self._ready.set()
                self._settled.set()
            case Failed(error):
                self._failed = error
                self._child.should_restart = False
                self._settled.set()
            case Outputs(outputs):
                for out in outputs:
                    queue = self._queues.get(out.request_id)
                    if queue is not None:
                        queue.put_nowait(out)
            case Stats() | View() as answer:
                waiting = self._answers[type(answer)]
                while waiting:
                    if not (future := waiting.pop()).done():
                        future.set_result(answer)

    def _died(self, code: int) -> None:
        self._ready.clear()
        self._fail_all(f"the engine process ended with code {code}")

    def _fail_all(self, why: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(EngineDead(why))
        for waiting in self._answers.values():
            while waiting:
                if not (future := waiting.pop()).done():
                    future.set_exception(EngineDead(why))
