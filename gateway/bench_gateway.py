"""What the gateway itself costs: `foreword bench gateway [--runs 3]`, with an engine that computes nothing.

The server is the real one (uvicorn, routes, admission, tokenizer, streams) in a process of its own on loopback; only
the engine is faked, at the protocol behind which a real one stands. The clients here write prepared bytes to sockets.

  ttft         one client, streamed chats: sending to the first text; the engine has it at once, so all is the gateway's
  chats        32 connections, chats of one token: requests a second, by the clock and by the server's own CPU time
  refusals     the same while the queue is full
  streams      500 streams at once that wait 5 s for their first token: gaps between bytes, which `keep_alive_s` bounds

Every prompt is another one, so each is tokenized anew. Rates by CPU time are what one core would do if the gateway had
it alone; on a shared machine they are the ones to read. Prints a table of medians over the runs, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from litestar.types import ASGIApp

from engine import EngineConfig, load_tokenizer
from gateway.app import make_app
from gateway.fake_engine import FakeEngine, NoRetrieval
from gateway.models import DEFAULT_LLM, resolve_model
from gateway.services import Services
from gateway.settings import GatewaySettings, Settings
from loadtest.raw_http import connection, post

CONNECTIONS, KEEP_ALIVE_S = 32, 1.0
HOLD_MS = 3_600_000
READY_TIMEOUT_S = 60
PROMPT = "What does the third passage say about the lighthouse, and when was it built? " * 4
Row = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    p = argparse.ArgumentParser(
        "bench gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default=DEFAULT_LLM, help="whose tokenizer and template are used")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    p.add_argument("--streams", type=int, default=500, help="at once")
    p.add_argument("--wait-s", type=int, default=5, help="before each stream's first token")
    p.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    p.add_argument("--max-active", type=int, default=1, help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    model = resolve_model(a.model, offline=False)
    if a.serve:
        with tempfile.TemporaryDirectory() as folder:  # so that there are no keys
            app = make_bench_app(model, a.max_active, folder)
            config = uvicorn.Config(app, port=a.serve, log_config=None, access_log=False, timeout_graceful_shutdown=1)
            asyncio.run(uvicorn.Server(config).serve())  # on asyncio's own loop, as `foreword serve`
        return 0
    rows = [asyncio.run(measure(str(model), a)) for _ in range(a.runs)]
    table = {name: statistics.median(r[name] for r in rows) for name in rows[0]}
    for name, value in table.items():
        print(f"{name:32}{value:12.2f}")
    print(json.dumps({"runs": a.runs, "cores": os.cpu_count(), "load": os.getloadavg()[0], **table}))
    return 0


def make_bench_app(model: Path, max_active: int, data_dir: str) -> ASGIApp:
    """The application with a fake engine, with room for `max_active` requests and none to wait."""
    g = GatewaySettings(
        data_dir=data_dir,
        keep_alive_s=KEEP_ALIVE_S,
        max_active_requests=max_active,
        max_queued_requests=0,
        queue_timeout_s=0,
    )
    vocab_size = load_tokenizer(model).vocab_size
    services = Services(Settings(g, EngineConfig()), FakeEngine(model, vocab_size), NoRetrieval(), model)
    return make_app(services)


async def measure(model: str, a: argparse.Namespace) -> Row:
    """All of it once."""
    with server(model, a.streams + CONNECTIONS) as (port, pid):
        row = await ttft(port) | await rate(port, pid, "chats", 200, a.seconds)
        row |= await streams(port, pid, a.streams, a.wait_s)
    with server(model, 1) as (port, pid):
        async with connection(port) as holder:
            holder.send(chat(HOLD_MS, stream=True))
            await holder.head()
            return row | await rate(port, pid, "refusals", 429, a.seconds)


async def ttft(port: int, n: int = 300) -> Row:
    """Milliseconds from sending to the first text."""
    times = []
    async with connection(port) as c:
        for i in range(n + 20):
            started = time.perf_counter()
            c.send(chat(0, stream=True, max_tokens=2, about=i))
            await c.head()
            first = 0.0
            async for piece in c.pieces():
                if not first and b'" token"' in piece:
                    first = time.perf_counter() - started
            if i >= 20:  # the first ones warm up
                times.append(first * 1e3)
    times.sort()
    return {"ttft_p50_ms": times[n // 2], "ttft_p99_ms": times[n * 99 // 100]}


async def rate(port: int, pid: int, name: str, status: int, seconds: float) -> Row:
    """Requests a second that get `status`, by the clock and by the server's CPU time."""
    count, end = 0, time.perf_counter() + 0.5 + seconds

    async def client() -> None:
        nonlocal count
        async with connection(port) as c:
            while time.perf_counter() < end:
                c.send(chat(0, about=count))
                got, _ = await c.head()
                if got != status:
                    raise RuntimeError(f"{name}: status {got}, expected {status}: {await c.body()!r}")
                await c.body()
                count += 1

    clients = asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    await asyncio.sleep(0.5)
    before, cpu, started = count, cpu_s(pid), time.perf_counter()
    await asyncio.sleep(seconds - 0.2)
    done, cpu, wall = count - before, cpu_s(pid) - cpu, time.perf_counter() - started
    await clients
    return {f"{name}_per_s": done / wall, f"{name}_per_cpu_s": done / cpu}


async def streams(port: int, pid: int, n: int, wait_s: int) -> Row:
    """Many streams that wait: how long each was without a byte."""
    gaps: list[float] = []

    async def client() -> None:
        async with connection(port) as c:
            c.send(chat(1000 * wait_s, stream=True, max_tokens=2))
            await c.head()
            last, is_done = time.perf_counter(), False
            async for piece in c.pieces():
                now = time.perf_counter()
                gaps.append(now - last)
                last, is_done = now, is_done or b"[DONE]" in piece
            if not is_done:
                raise RuntimeError("a stream ended before it was done")

    cpu = cpu_s(pid)
    await asyncio.gather(*(client() for _ in range(n)))
    missed = sum(g > 2 * KEEP_ALIVE_S for g in gaps)
    return {"streams_missed": missed, "streams_max_gap_s": max(gaps), "streams_cpu_s": cpu_s(pid) - cpu}


def chat(wait_ms: int, stream: bool = False, max_tokens: int = 1, about: int = 0) -> bytes:
    """A whole HTTP request."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": f"{about} {PROMPT}"}],
        "max_tokens": max_tokens,
        "seed": wait_ms,
        "stream": stream,
    }
    return post("/v1/chat/completions", body)


@contextmanager
def server(model: str, max_active: int) -> Iterator[tuple[int, int]]:
    """The server in a process of its own: port and process id."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "gateway.bench_gateway", "--model", model, "--serve", str(port)]
    process = subprocess.Popen([*command, "--max-active", str(max_active)])
    try:
        _wait_ready(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it does not listen yet
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    raise SystemExit(main())
