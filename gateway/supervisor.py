"""A child process that is watched: started, spoken to over ZeroMQ, noticed when it dies, started again.

The child holds our pipe as its standard input and ends when that closes, so it never outlives us.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from gateway.logs import logs_are_json

log = logging.getLogger("foreword")

STOP_GRACE_S = 5.0
MAX_LINE = 2**20
"""Bytes of a line that a child prints."""
RESTART_PAUSES_S = (0.0, 1.0, 3.0, 10.0)
"""Pause before each start in a row that did not get as far as being ready; the last one repeats."""


class ChildProcess:
    """Runs `python -m MODULE --endpoint E ARGS...` and restarts it when it dies.

    `on_frame(bytes)` gets each message, `on_death(exit_code)` is called at once when the process ends by itself; both
    run on the event loop. The owner calls `mark_ready` when the child has said that it is.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        on_frame: Callable[[bytes], None],
        on_death: Callable[[int], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._args, self._environment = module, list(args), dict(environment or {})
        self._on_frame, self._on_death = on_frame, on_death
        self._folder = Path(tempfile.mkdtemp(prefix="foreword-"))
        self._endpoint = f"ipc://{self._folder}/socket"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._relay: asyncio.Task[None] | None = None
        self._failures = 0
        self.num_restarts = 0
        self.should_restart = True
        """Set to False where starting again cannot help, such as a model that cannot be loaded."""

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self) -> None:
        """Start it, and keep it running until `stop`."""
        self._task = asyncio.create_task(self._keep_running())

    def mark_ready(self) -> None:
        """Forget earlier failed starts."""
        self._failures = 0

    def send(self, frame: bytes) -> None:
        """Send a message; dropped if the child is gone, which `on_death` has said or will say."""
        if self._socket is not None:
            with suppress(zmq.ZMQError):
                self._socket.send(frame, zmq.NOBLOCK)
            # Sending may take the socket's signal that something has come; it is given once only.
            asyncio.get_running_loop().call_soon(self._take_all)

    async def stop(self) -> None:
        """End the child: politely, then for good."""
        self.should_restart = False
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._end_process()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep_running(self) -> None:
        while self.should_restart:
            await asyncio.sleep(RESTART_PAUSES_S[min(self._failures, len(RESTART_PAUSES_S) - 1)])
            self._failures += 1
            code = await self._run_once()
            log.error("%s ended with code %s", self._module, code)
            self._on_death(code)
            self.num_restarts += 1

    async def _run_once(self) -> int:
        """One life of the child; returns its exit code."""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.bind(self._endpoint)
        self._socket = socket
        command = [sys.executable, "-m", self._module, "--endpoint", self._endpoint, *self._args]
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **self._environment,
        }
        self._process = await self._spawn(command, environment)
        # zmq.asyncio makes a future, a timer and more for each message; a token is one.
        loop, descriptor = asyncio.get_running_loop(), int(socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._take_all)
        loop.call_soon(self._take_all)
        try:
            code = await self._process.wait()
            await asyncio.sleep(0.05)  # what it said last may still be on its way
            self._take_all()
            return code
        finally:
            loop.remove_reader(descriptor)
            self._socket = None
            socket.close()

    async def _spawn(self, command: list[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
        """Start the program. What it prints goes to our standard error, as lines of our log where that is JSON."""
        pipe = asyncio.subprocess.PIPE
        if not logs_are_json():
            return await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=sys.stderr.fileno(), env=environment
            )
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment, limit=MAX_LINE
        )
        self._relay = asyncio.create_task(self._relay_lines(process.stdout))
        return process

    async def _relay_lines(self, lines: asyncio.StreamReader | None) -> None:
        assert lines is not None
        child = logging.getLogger(f"foreword.{self._module}")
        while line := await lines.readline():
            child.warning("%s", line.decode(errors="replace").rstrip())

    def _take_all(self) -> None:
        """Hand on every message that has come."""
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
