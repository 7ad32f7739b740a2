"""What the gateway adds: `python -m loadtest.share_bench [--url http://127.0.0.1:8000] [--pid PID of foreword serve]`.

Sends one prompt again and again, so that the engine has little to do, first one at a time, then by 8 clients. From the
client's times, the engine's (the server's metrics) are taken off: what remains of the time to first token is HTTP,
JSON, tokenising, and the way to the engine and back. With `--pid`, the gateway process's own CPU time per output token
is read from /proc and stated for 400 tokens per second. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
from pathlib import Path

import httpx

from loadtest.ragbench import Row, percentile, send
from loadtest.workload import make_requests

ENGINE = ("foreword_queue_time_seconds", "foreword_prefill_time_seconds")
TARGET_TOK_S = 400


def main() -> None:
    """Entry point."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--pid", type=int, help="the server's process")
    p.add_argument("-n", type=int, default=30, help="requests one at a time; four times as many by 8 clients")
    p.add_argument("--passages", type=int, default=5)
    a = p.parse_args()
    rows = asyncio.run(run(a))
    for name, row in rows.items():
        print(f"{name:12}" + "  ".join(f"{k} {v:.2f}" for k, v in row.items() if v is not None))
    print(json.dumps(rows))


async def run(a: argparse.Namespace) -> dict[str, Row]:
    """Both loads."""
    settings = {"model": "default", "layout": "inline", "extra": "{}", "api_key": "", **vars(a)}
    request = make_requests(77, 1, 1.0, a.passages)[0]
    async with httpx.AsyncClient(timeout=300) as client:
        for _ in range(3):
            await send(client, argparse.Namespace(**settings), request, 8)
        return {
            "1 client": await measure(client, argparse.Namespace(**settings), request, 1, a.n),
            "8 clients": await measure(client, argparse.Namespace(**settings), request, 8, 4 * a.n),
        }


async def measure(client: httpx.AsyncClient, a: argparse.Namespace, request: Row, c: int, n: int) -> Row:
    """n requests by c clients."""
    before, cpu_before, left = await engine_seconds(client, a.url), cpu_seconds(a.pid), iter(range(n))

    async def worker() -> list[Row]:
        return [await send(client, a, request, 32) for _ in left]

    got = [row for rows in await asyncio.gather(*(worker() for _ in range(c))) for row in rows]
    engine_ms = (await engine_seconds(client, a.url) - before) / n * 1e3
    tokens, ttft = sum(g["num_out"] for g in got), [g["ttft_ms"] for g in got]
    row: Row = {
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_mean_ms": statistics.mean(ttft),
        "engine_mean_ms": engine_ms,
        "gateway_ttft_ms": statistics.mean(ttft) - engine_ms,
    }
    if a.pid:
        per_token = (cpu_seconds(a.pid) - cpu_before) / tokens
        row |= {"cpu_us_per_token": per_token * 1e6, f"core_pct_at_{TARGET_TOK_S}": 100 * per_token * TARGET_TOK_S}
    return row


async def engine_seconds(client: httpx.AsyncClient, url: str) -> float:
    """Seconds that requests spent in the engine until their first token, in all."""
    text = (await client.get(url + "/metrics")).text
    return sum(float(re.findall(rf"^{name}_sum (\S+)", text, re.M)[0]) for name in ENGINE)


def cpu_seconds(pid: int | None) -> float:
    """User and system time of a process, without its children."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
