"""Mixed load for a long time: `foreword bench soak --minutes 30 --seed 1 [-- FLAGS of foreword serve]`.

Starts a server of its own on loopback, with an empty store. Clients chat, ask, complete, stream, leave in the middle,
send hostile bodies, ingest and delete, while the engine and the retrieval worker are killed now and then. All choices
come from the seed; their interleaving does not.

What must hold: no status of 500 or above but an announced 503; each stream ends with `[DONE]` or an announced error;
nobody is left without an answer; after each kill readiness turns false and comes back; /health/live answers in time
all along; at the end nothing runs, waits or holds a block, the cache's invariants hold, and files and memory of the
gateway have not grown. Prints a table, then one JSON line; the exit code is 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtest.hostile import hostile_body
from loadtest.run import own_server

ANNOUNCED = frozenset({"engine_unavailable", "retrieval_unavailable", "queue_timeout", "queue_full"})
IDLE = ("requests_running", "requests_waiting", "requests_queued", "queued_prompt_tokens", "integrity_failures")
CHAT, COMPLETIONS, RAG = "/v1/chat/completions", "/v1/completions", "/rag/query"
WORDS = ("lamp", "bread", "bridge", "oil", "flour", "harbour", "night", "dough", "green", "nine", "cat", "stone")
LIVE_EVERY_S, SETTLE_S, BACK_S = 0.1, 60.0, 120.0


@dataclass(slots=True)
class Findings:
    """What was seen."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    live_ms: list[float] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Something did not hold."""
        if len(self.faults) < 50:
            self.faults.append(text[:400])


class Soak:
    """One run against a server."""

    def __init__(self, url: str, pid: int, a: argparse.Namespace) -> None:
        self._url, self._pid, self._args = url, pid, a
        self.found = Findings()
        self._end = 0.0

    @property
    def _is_over(self) -> bool:
        return bool(time.monotonic() >= self._end)

    async def run(self) -> dict[str, Any]:
        """All clients, killers and watchers until the time is over; then what is left."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            await self._ingest(client, random.Random(self._args.seed))
            before = self._resources()
            self._end = time.monotonic() + self._args.minutes * 60
            watcher = asyncio.create_task(self._watch())
            try:
                clients = [self._client(client, random.Random(f"{self._args.seed}/{i}")) for i in range(self._args.c)]
                await asyncio.gather(*clients, self._kill(client))
                await self._settle(client)
            finally:
                watcher.cancel()
            after = self._resources()
        self._compare(before, after)
        live = sorted(self.found.live_ms)
        slow = sum(ms > self._args.live_ms for ms in live)
        if slow:
            self.found.fault(f"/health/live took more than {self._args.live_ms:g} ms {slow} times of {len(live)}")
        return {
            "counts": dict(sorted(self.found.counts.items())),
            "live_p50_ms": live[len(live) // 2],
            "live_p99_ms": live[int(len(live) * 0.99)],
            "live_max_ms": live[-1],
            "before": before,
            "after": after,
            "faults": self.found.faults,
        }

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        actions = {self._ask: 8, self._leave: 3, self._hostile: 3, self._ingest: 2}
        while not self._is_over:
            (action,) = rng.choices(list(actions), list(actions.values()))
            try:
                await action(client, rng)
            except httpx.HTTPError as e:
                self.found.fault(f"{action.__name__}: {type(e).__name__}: {e}")

    def _body(self, rng: random.Random, stream: bool) -> tuple[str, dict[str, Any]]:
        text = " ".join(rng.choices(WORDS, k=rng.choice((3, 30, 120))))
        sampling = {"max_tokens": rng.choice((1, 8, 40)), "temperature": rng.choice((0, 1)), "stream": stream}
        path = rng.choice((CHAT, RAG, RAG, COMPLETIONS))
        if path == RAG:
            return path, {"query": text[:80], **sampling}
        if path == CHAT:
            extra = {"n": rng.choice((1, 1, 3)), "ignore_eos": rng.random() < 0.5}
            return path, {"model": "default", "messages": [{"role": "user", "content": text}], **sampling, **extra}
        return path, {"model": "default", "prompt": text if stream else [text, text[:20]], **sampling}

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        stream = rng.random() < 0.6
        path, body = self._body(rng, stream)
        if not stream:
            await self._check(path, await client.post(path, json=body))
            return
        async with client.stream("POST", path, json=body) as reply:
            await reply.aread()
        await self._check(path, reply)
        if reply.status_code == 200:
            self._check_stream(path, reply.text)

    def _check_stream(self, path: str, text: str) -> None:
        errors = [line for line in text.splitlines() if line.startswith('data: {"error"')]
        codes = {json.loads(line.removeprefix("data: "))["error"]["code"] for line in errors}
        is_done = "data: [DONE]" in text
        if is_done == bool(codes) or codes - ANNOUNCED:
            self.found.fault(f"{path}: a stream ended with {codes or 'nothing'}: {text[-200:]!r}")
        for code in codes:
            self.found.counts[f"stream {code}"] += 1

    async def _leave(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        path, body = self._body(rng, rng.random() < 0.5)
        self.found.counts["left"] += 1
        extra = {} if path == RAG else {"ignore_eos": True}
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.choice((0.01, 0.1, 0.5))):
                await client.post(path, json={**body, "max_tokens": 400, **extra})

    async def _hostile(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        path = rng.choice((CHAT, COMPLETIONS, RAG, "/rag/documents"))
        content, headers = hostile_body(rng)
        reply = await client.post(path, content=content, headers={"Content-Type": "application/json", **headers})
        await self._check(f"hostile {path}", reply)
        if reply.status_code == 200:
            self.found.fault(f"{path}: a hostile body was taken: {content[:100]!r}")

    async def _ingest(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        ids = rng.sample(range(40), rng.choice((1, 5)))
        documents = [{"id": f"doc-{i}", "text": " ".join(rng.choices(WORDS, k=60))} for i in ids]
        await self._check("ingest", await client.post("/rag/documents", json={"documents": documents}))
        if rng.random() < 0.3:
            await self._check("delete", await client.delete(f"/rag/documents/doc-{rng.randrange(40)}"))

    async def _check(self, what: str, reply: httpx.Response) -> None:
        """Count a reply; wait a little where the server says that it is busy."""
        self.found.counts[f"{what} {reply.status_code}"] += 1
        if reply.status_code < 400:
            return
        try:
            code = reply.json()["error"]["code"]
        except (ValueError, KeyError, TypeError):
            self.found.fault(f"{what}: {reply.status_code} without an error's body: {reply.text[:100]!r}")
            return
        if reply.status_code >= 500 and (reply.status_code != 503 or code not in ANNOUNCED):
            self.found.fault(f"{what}: {reply.status_code} {code}: {reply.text[:200]}")
        if reply.status_code in (429, 503):
            if not reply.headers.get("retry-after", "").isdigit():
                self.found.fault(f"{what}: {reply.status_code} without Retry-After")
            await asyncio.sleep(0.2)

    async def _kill(self, client: httpx.AsyncClient) -> None:
        """Kill the engine, now and then the worker; see readiness turn, and come back before the next."""
        rng = random.Random(f"{self._args.seed}/kill")
        pause_s = self._args.kill_every
        while time.monotonic() + pause_s < self._end:
            await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
            module = rng.choice(("engine.process", "engine.process", "retrieval.worker"))
            os.kill(child_pid(self._pid, module), signal.SIGKILL)
            self.found.counts[f"killed {module}"] += 1
            for wanted, time_s in ((503, 5.0), (200, BACK_S)):
                if not await self._until_ready_is(client, wanted, time_s):
                    self.found.fault(f"readiness was not {wanted} within {time_s:g} s of the kill of {module}")

    async def _until_ready_is(self, client: httpx.AsyncClient, status: int, time_s: float) -> bool:
        end = time.monotonic() + time_s
        while time.monotonic() < end:
            if (await client.get("/health/ready")).status_code == status:
                return True
            await asyncio.sleep(0.02)
        return False

    async def _watch(self) -> None:
        """Poll liveness on a connection of its own."""
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            while True:
                started = time.perf_counter()
                reply = await client.get("/health/live")
                self.found.live_ms.append((time.perf_counter() - started) * 1e3)
                if reply.status_code != 200:
                    self.found.fault(f"/health/live: {reply.status_code}")
                await asyncio.sleep(LIVE_EVERY_S)

    async def _settle(self, client: httpx.AsyncClient) -> None:
        """Wait until nothing is left of all requests, then ask one more question."""
        names = [f"foreword_{n}" for n in IDLE]
        names += [f'foreword_kv_blocks{{state="{s}"}}' for s in ("protected", "held")]
        end, left = time.monotonic() + SETTLE_S, {"?": 1.0}
        while left and time.monotonic() < end:
            values = metrics((await client.get("/metrics")).text)
            left = {n: values.get(n, -1.0) for n in names if values.get(n) != 0}
            await asyncio.sleep(0.2 if left else 0)
        if left:
            self.found.fault(f"left at the end: {left}")
        kills = self.found.counts["killed engine.process"]
        if values.get("foreword_engine_restarts") != kills:
            self.found.fault(f"{values.get('foreword_engine_restarts')} restarts after {kills} kills")
        reply = await client.post(RAG, json={"query": "lamp", "max_tokens": 4})
        if reply.status_code != 200:
            self.found.fault(f"the last question got {reply.status_code}: {reply.text[:200]}")

    def _resources(self) -> dict[str, float]:
        status = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        anon = next(line for line in status if line.startswith("RssAnon"))
        return {"files": len(list(Path(f"/proc/{self._pid}/fd").iterdir())), "memory_mb": int(anon.split()[1]) / 1024}

    def _compare(self, before: dict[str, float], after: dict[str, float]) -> None:
        # A few connections of ours are still open at the end, and none was at the beginning.
        if after["files"] > before["files"] + 2 * self._args.c + 8:
            self.found.fault(f"open files grew from {before['files']} to {after['files']}")
        if after["memory_mb"] > before["memory_mb"] + self._args.growth_mb:
            self.found.fault(f"memory grew from {before['memory_mb']:.0f} to {after['memory_mb']:.0f} MB")


def child_pid(parent: int, module: str) -> int:
    """Process id of a server's child that runs `module`. Raises `ValueError` unless there is exactly one."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (pid,) = [int(p) for p in children if module.encode() in Path(f"/proc/{p}/cmdline").read_bytes()]
    return pid


def metrics(text: str) -> dict[str, float]:
    """Samples by name and labels."""
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    p = argparse.ArgumentParser("bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=30.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("-c", type=int, default=8, help="clients")
    p.add_argument("--kill-every", type=float, default=60.0, help="seconds between kills, at most")
    p.add_argument("--live-ms", type=float, default=250.0, help="slowest /health/live that is accepted")
    p.add_argument("--growth-mb", type=float, default=100.0, help="most that the gateway's memory may grow by")
    p.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of foreword serve")
    a = p.parse_args(argv)
    with own_server(a.flags) as (url, pid):
        report = asyncio.run(Soak(url, pid, a).run())
    for name, n in report["counts"].items():
        print(f"{name:44}{n:8}")
    for fault in report["faults"]:
        print(f"did not hold: {fault}")
    print(json.dumps({"settings": vars(a), **report}))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
