"""`foreword serve` as a child process, for tests that see the server as a client does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

REPO = Path(__file__).resolve().parents[1]


class Server:
    """`foreword serve` in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.data_dir = folder / "data"
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--data-dir", str(self.data_dir)]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        self.log = (folder / "server.log").open("w+")
        self.process = subprocess.Popen(
            [*command, "--offline", *flags], stderr=self.log, stdout=self.log, env=environment, cwd=REPO
        )
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def wait_ready(self, timeout_s: float = 90) -> None:
        wait_for(lambda: self.status("/health/ready") == 200, timeout_s)

    def status(self, path: str) -> int | None:
        assert self.process.poll() is None, self.read_log()
        try:
            return self.client.get(path).status_code
        except httpx.HTTPError:
            return None

    def read_log(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")

    def stop(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(40)
        self.log.close()
        return code


def read_events(reply: httpx.Response) -> list[tuple[str, Any]]:
    """SSE events as (name, data)."""
    out, name = [], ""
    for line in reply.text.splitlines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            raw = line.removeprefix("data: ")
            out.append((name, raw if raw == "[DONE]" else json.loads(raw)))
            name = ""
    return out


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
