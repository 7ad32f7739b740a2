"""Serving bench: `foreword bench serve NAME=URL [NAME=URL ...]`, any OpenAI-compatible servers, compared in turn.

The workload is ragbench's: a system text, passages of Zipf popularity, a question. A closed loop (`-c` clients) or an
open one (`--rate` requests per second, Poisson arrivals, so that a slow server cannot slow the questions down). In each
of `--runs` rounds every server gets the same fresh requests; the table holds medians over the rounds, and each number
as a ratio to the first server's.

Checked, not assumed: every answer has the length asked for (else the round does not count and the exit code is 1), and
with `--tokenizer` the prompt's tokens are counted here too, since servers count, cut and template differently.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from loadtest.ragbench import Row, body, percentile, send
from loadtest.run import is_loopback
from loadtest.workload import make_requests

POINTS = (50, 95, 99)
TIMES = ("ttft", "tpot", "itl", "e2e")
RATES = ("req_s", "prompt_tok_s", "out_tok_s", "cached_pct")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 where some answer was too short or some prompt miscounted."""
    args = make_parser().parse_args(argv)
    servers = dict(named(x) for x in args.servers)
    if not args.allow_remote and (far := [u for u in servers.values() if not is_loopback(u)]):
        raise SystemExit(f"{far[0]} is not on this machine; --allow-remote loads it all the same")
    count = make_counter(args.tokenizer) if args.tokenizer else None
    rounds = asyncio.run(run_rounds(args, servers, count))
    table = {name: medians([r[name] for r in rounds]) for name in servers}
    print_table(table)
    bad = sum(r[name]["short_answers"] + (r[name].get("miscounted") or 0) for r in rounds for name in servers)
    settings = {k: v for k, v in vars(args).items() if k not in ("servers", "tokenizer", "run")}
    print(json.dumps({"settings": settings, "servers": table, "bad": bad}))
    return 1 if bad else 0


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(
        "bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("servers", nargs="+", metavar="[NAME=]URL")
    p.add_argument("--model", default="default")
    p.add_argument("--api-key", default="")
    p.add_argument("--layout", choices=["inline", "documents"], default="inline")
    p.add_argument("-c", type=int, default=1, help="clients of the closed loop")
    p.add_argument("--rate", type=float, help="requests per second of an open loop, instead")
    p.add_argument("-n", type=int, default=16, help="requests in a round")
    p.add_argument("--runs", type=int, default=3, help="rounds")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--zipf", type=float, default=1.0)
    p.add_argument("--passages", type=int, default=5, help="5, 15, 30 give about 1,330, 3,400, 6,500 prompt tokens")
    p.add_argument("--max-tokens", type=int, default=32)
    p.add_argument("--extra", default="{}", help="JSON merged into every request body")
    p.add_argument(
        "--tokenizer", type=Path, help="the model's GGUF file or folder, to count prompts here (inline only)"
    )
    p.add_argument("--allow-remote", action="store_true")
    return p


def named(text: str) -> tuple[str, str]:
    """Name and address of `NAME=URL`, or of a bare URL, which is its own name."""
    name, _, url = text.rpartition("=") if "=" in text.split("://")[0] else (text, "", text)
    return name, url.rstrip("/")


def make_counter(path: Path) -> Callable[[Row], int]:
    """Counts a request's prompt tokens by the model's own template and vocabulary."""
    from engine import load_tokenizer

    tokenizer = load_tokenizer(path)
    return lambda request: len(tokenizer.encode_template(tokenizer.render_chat(request["messages"])))


async def run_rounds(
    a: argparse.Namespace, servers: dict[str, str], count: Callable[[Row], int] | None
) -> list[dict[str, Row]]:
    """For each round and server what was measured."""
    rounds = []
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        for i in range(a.runs + 1):
            row = {}
            for name, url in servers.items():
                # The first round warms up, with few requests; its numbers are dropped.
                n = a.n if i else min(2, a.n)
                requests = make_requests(a.seed + i, n, a.zipf, a.passages)
                row[name] = await one_round(client, argparse.Namespace(**{**vars(a), "url": url}), requests, count)
            rounds.append(row)
    return rounds[1:]


async def one_round(
    client: httpx.AsyncClient, a: argparse.Namespace, requests: list[Row], count: Callable[[Row], int] | None
) -> Row:
    """All requests against one server."""
    start = time.perf_counter()
    got = await (open_loop if a.rate else closed_loop)(client, a, requests)
    wall_s = time.perf_counter() - start
    row = summarise(got, wall_s, a.max_tokens)
    if count is not None and a.layout == "inline":
        expected = [count(body(a, r, a.max_tokens)) for r in requests]
        row["miscounted"] = sum(g["num_prompt"] != n for g, n in zip(got, expected, strict=True))
    return row


async def closed_loop(client: httpx.AsyncClient, a: argparse.Namespace, requests: list[Row]) -> list[Row]:
    """c clients, each with the next request as soon as it has its answer."""
    queue, got = iter(enumerate(requests)), [Row()] * len(requests)

    async def worker() -> None:
        for i, request in queue:
            got[i] = await send(client, a, request, a.max_tokens)

    await asyncio.gather(*(worker() for _ in range(a.c)))
    return got


async def open_loop(client: httpx.AsyncClient, a: argparse.Namespace, requests: list[Row]) -> list[Row]:
    """Requests at times of their own, however long answers take: each sleeps until its arrival, drawn beforehand."""
    rng = random.Random(a.seed)
    arrivals = list(itertools.accumulate(rng.expovariate(a.rate) for _ in requests))

    async def later(at: float, request: Row) -> Row:
        await asyncio.sleep(at)
        return await send(client, a, request, a.max_tokens)

    return list(await asyncio.gather(*map(later, arrivals, requests)))


def summarise(got: list[Row], wall_s: float, max_tokens: int) -> Row:
    """Percentiles in ms, rates per second."""
    prompt, cached = sum(g["num_prompt"] for g in got), [g["cached"] for g in got]
    row: Row = {
        "req_s": len(got) / wall_s,
        "prompt_tok_s": prompt / wall_s,
        "out_tok_s": sum(g["num_out"] for g in got) / wall_s,
        "cached_pct": None if None in cached else 100 * sum(cached) / max(1, prompt),
        "prompt_tokens": prompt / len(got),
        "short_answers": sum(g["num_out"] < max_tokens for g in got),
    }
    for name in TIMES:
        values = [x for g in got for x in g["itl_ms"]] if name == "itl" else [g[f"{name}_ms"] for g in got]
        row |= {f"{name}_p{p}_ms": percentile(values, p) if values else None for p in POINTS}
    return row


def medians(rows: list[Row]) -> Row:
    """Of each number over the rounds; None where a round has none."""
    return {k: None if any(r[k] is None for r in rows) else statistics.median(r[k] for r in rows) for k in rows[0]}


def print_table(table: dict[str, Row]) -> None:
    """Names across, numbers down, each with its ratio to the first server's."""
    names = list(table)
    print(f"{'':16}" + "".join(f"{n[:18]:>22}" for n in names))
    keys = [*RATES, *(f"{t}_p{p}_ms" for t in TIMES for p in POINTS), "prompt_tokens", "short_answers"]
    for key in [*keys, *(["miscounted"] if "miscounted" in table[names[0]] else [])]:
        first = table[names[0]][key]
        print(f"{key:16}" + "".join(f"{cell(table[n][key], first):>22}" for n in names))


def cell(value: Any, first: Any) -> str:
    """A number with its ratio."""
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" ({value / first:.2f})" if first else "")


if __name__ == "__main__":
    raise SystemExit(main())
