"""Overload: `foreword bench overload [--few 8] [--many 500] [--seconds 12] [--runs 2] [-- FLAGS of foreword serve]`.

A server of its own, with a bound on what runs and waits, is asked in a closed loop by few clients, enough to keep it
busy, then by many, of which most are refused and come back when `Retry-After` says; in turn, so that both see the same
machine. Answers a second should be the same, and refusals quick. Prints medians over the runs, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadtest.ragbench import percentile
from loadtest.raw_http import connection, post
from loadtest.run import own_server

BOUNDS = ("--max-num-seqs", "8", "--max-queued-requests", "16")
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 where a request got neither an answer nor a refusal."""
    p = argparse.ArgumentParser(
        "bench overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--few", type=int, default=8)
    p.add_argument("--many", type=int, default=500)
    p.add_argument("--seconds", type=float, default=12.0)
    p.add_argument("--runs", type=int, default=2)
    p.add_argument("--max-tokens", type=int, default=8)
    p.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of foreword serve")
    a = p.parse_args(argv)
    rows: dict[int, list[Row]] = {a.few: [], a.many: []}
    with own_server([*BOUNDS, *a.flags]) as (url, _):
        port = int(url.rpartition(":")[2])
        asyncio.run(load(port, a.few, 2.0, a.max_tokens))  # warms up
        for _ in range(a.runs):
            for n, found in rows.items():
                found.append(asyncio.run(load(port, n, a.seconds, a.max_tokens)))
    table = {n: {k: statistics.median(r[k] for r in found) for k in found[0]} for n, found in rows.items()}
    for key in table[a.few]:
        print(f"{key:24}" + "".join(f"{n:>8}: {row[key]:10.2f}" for n, row in table.items()))
    print(json.dumps({"settings": vars(a), "bounds": BOUNDS, "clients": table}))
    return 1 if any(row["other"] for row in table.values()) else 0


async def load(port: int, num_clients: int, seconds: float, max_tokens: int) -> Row:
    """A closed loop of so many clients for so long; what is under way at its end is left and not counted."""
    counts: Counter[str] = Counter()
    refusal_ms: list[float] = []

    async def one(i: int) -> None:
        rng = random.Random(i)
        async with connection(port) as c:
            while True:
                started = time.perf_counter()
                c.send(chat(rng, max_tokens))
                status, headers = await c.head()
                ms = (time.perf_counter() - started) * 1e3
                await c.body()
                if status == 429:
                    counts["refused"] += 1
                    refusal_ms.append(ms)
                    await asyncio.sleep(int(headers[b"retry-after"]) * rng.uniform(0.5, 1.5))
                else:
                    counts["answered" if status == 200 else "other"] += 1

    clients = [asyncio.create_task(one(i)) for i in range(num_clients)]
    await asyncio.sleep(seconds)
    done = dict(counts)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return {
        "answers_per_s": done.get("answered", 0) / seconds,
        "refused": done.get("refused", 0),
        "other": done.get("other", 0),
        "refusal_p50_ms": percentile(refusal_ms, 50) if refusal_ms else 0.0,
        "refusal_p99_ms": percentile(refusal_ms, 99) if refusal_ms else 0.0,
    }


def chat(rng: random.Random, max_tokens: int) -> bytes:
    """A short chat that no other is like."""
    words = " ".join(str(rng.randrange(1000)) for _ in range(20))
    body = {"model": "default", "messages": [{"role": "user", "content": words}], "max_tokens": max_tokens}
    return post("/v1/chat/completions", {**body, "ignore_eos": True})


if __name__ == "__main__":
    raise SystemExit(main())
