"""RAG serving bench for any OpenAI-compatible server: one client, the same requests for everyone.

Workload (deterministic by --seed): a system text of about 310 tokens, 200 passages of about 200 tokens, each request =
system + 5 passages drawn by Zipf popularity without replacement, in random order + a question; 32 greedy tokens, end of
text ignored. About 1,330 prompt tokens; an unbounded exact prefix cache can save 29 % of them, reuse at any position
73 %.

  python -m loadtest.ragbench --url http://127.0.0.1:8000 --mode rag -c 8    closed loop, c clients
  python -m loadtest.ragbench --mode repeat     the same prompt 11 times: first cold, then full hits
  python -m loadtest.ragbench --mode single     cold prefill of 3 unrelated prompts, decode of 128 tokens

--layout inline (every server): passages inside the user message. --layout documents: passages in the request's
`documents` list ([{"id", "text"}]), for servers that assemble the prompt themselves; same texts, same order given.
Prints a table row and ends with one JSON line. A run counts only if short_answers is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from loadtest.workload import SYSTEM, make_requests

Row = dict[str, Any]


def body(a: argparse.Namespace, req: Row, max_tokens: int) -> Row:
    """The request as JSON."""
    user, extra = req["question"], {}
    if a.layout == "documents" and req["docs"]:
        extra["documents"] = [{"id": i, "text": t} for i, t in req["docs"]]
    else:
        user = "".join(f"### Passage {i}\n{t}\n\n" for i, t in req["docs"]) + user
    return {
        "model": a.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": req.get("system", SYSTEM)}, {"role": "user", "content": user}],
        **extra,
        **json.loads(a.extra),
    }


async def send(client: httpx.AsyncClient, a: argparse.Namespace, req: Row, max_tokens: int) -> Row:
    """One request; what it took and what came back."""
    start, stamps, text = time.perf_counter(), [], ""
    usage: Row = {}
    headers = {"Authorization": f"Bearer {a.api_key}"} if a.api_key else {}
    url = a.url + "/v1/chat/completions"
    async with client.stream("POST", url, json=body(a, req, max_tokens), headers=headers) as r:
        if r.status_code != 200:
            raise SystemExit(f"HTTP {r.status_code}: {(await r.aread())[:400]!r}")
        async for line in r.aiter_lines():
            if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                continue
            event = json.loads(line[5:])
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                piece = (choice.get("delta") or {}).get("content")
                if piece:
                    stamps.append(time.perf_counter())
                    text += piece
    return _measured(start, stamps, text, usage)


def _measured(start: float, stamps: list[float], text: str, usage: Row) -> Row:
    num_out = usage.get("completion_tokens") or len(stamps)
    details = usage.get("prompt_tokens_details") or {}
    end = time.perf_counter()
    first = stamps[0] if stamps else end
    return {
        "ttft_ms": (first - start) * 1e3,
        "itl_ms": [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)],
        "tpot_ms": (stamps[-1] - first) * 1e3 / max(1, num_out - 1) if stamps else 0.0,
        "e2e_ms": (end - start) * 1e3,
        "num_out": num_out,
        "num_prompt": usage.get("prompt_tokens") or 0,
        "cached": details.get("cached_tokens"),
        "details": details,
        "text": text,
    }


def percentile(values: Sequence[float], p: float) -> float:
    """The value at p per cent of the sorted values."""
    return sorted(values)[min(len(values) - 1, round(p / 100 * (len(values) - 1)))]


def peak_memory_mib(pid: int) -> int:
    """Sum of the peak resident memory of a process and its descendants."""
    total, todo = 0.0, [pid]
    while todo:
        folder = Path(f"/proc/{todo.pop()}")
        try:
            status = (folder / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
            for task in (folder / "task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue  # it ended meanwhile
    return round(total)


async def run_repeat(client: httpx.AsyncClient, a: argparse.Namespace) -> Row:
    """The same prompt 11 times."""
    req = make_requests(a.seed + 100, 1, a.zipf, a.passages)[0]
    got = [await send(client, a, req, a.max_tokens) for _ in range(11)]
    return {
        "cold_ttft_ms": got[0]["ttft_ms"],
        "warm_ttft_p50_ms": percentile([g["ttft_ms"] for g in got[1:]], 50),
        "num_prompt": got[0]["num_prompt"],
        "cached": [g["cached"] for g in got],
        "same_text": len({g["text"] for g in got}) == 1,
    }


async def run_single(client: httpx.AsyncClient, a: argparse.Namespace) -> Row:
    """Cold prefill of three unrelated prompts, then decode."""
    cold = []
    for k in range(3):
        req = make_requests(900 + k, 1, a.zipf, a.passages)[0]
        req["system"] = f"{7 * k + 3} cold start number {k}. " + SYSTEM
        req["docs"] = [(f"cold{k}-{i}", f"{k}{i} {t}") for i, t in req["docs"]]
        cold.append(await send(client, a, req, 1))
    story = {"docs": [], "question": "Write a long story about a lighthouse keeper.", "system": "You tell stories."}
    decode = [await send(client, a, story, 128) for _ in range(2)]
    return {
        "cold_ttft_ms": [g["ttft_ms"] for g in cold],
        "prefill_tok_s": statistics.mean(g["num_prompt"] / g["ttft_ms"] * 1e3 for g in cold),
        "decode_tok_s": [1e3 / g["tpot_ms"] for g in decode if g["tpot_ms"]],
    }


async def run_rag(client: httpx.AsyncClient, a: argparse.Namespace) -> Row:
    """n requests by c clients in a closed loop."""
    queue = list(enumerate(make_requests(a.seed, a.n, a.zipf, a.passages)))[::-1]
    got: list[Row] = [{}] * a.n

    async def worker() -> None:
        while queue:
            i, req = queue.pop()
            got[i] = await send(client, a, req, a.max_tokens)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(a.c)))
    return summarise(got, time.perf_counter() - start, a.max_tokens)


def summarise(got: list[Row], wall_s: float, max_tokens: int) -> Row:
    """One row over all requests."""
    ttft, prompt = [g["ttft_ms"] for g in got], sum(g["num_prompt"] for g in got)
    cached = None if any(g["cached"] is None for g in got) else sum(g["cached"] for g in got)
    return {
        "ttft_mean_ms": statistics.mean(ttft),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p95_ms": percentile(ttft, 95),
        "tpot_mean_ms": statistics.mean(g["tpot_ms"] for g in got),
        "req_s": len(got) / wall_s,
        "prompt_tok_s": prompt / wall_s,
        "out_tok_s": sum(g["num_out"] for g in got) / wall_s,
        "short_answers": sum(g["num_out"] < max_tokens for g in got),
        "texts_sha": hashlib.sha256("\0".join(g["text"] for g in got).encode()).hexdigest()[:12],
        "cached_pct": None if cached is None else 100 * cached / max(1, prompt),
        "last_details": got[-1]["details"],
    }


async def run(a: argparse.Namespace) -> Row:
    """Warm up, then the mode asked for."""
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        await send(client, a, {"docs": [], "question": "Good morning.", "system": "A short warm-up."}, 8)
        return await {"repeat": run_repeat, "single": run_single, "rag": run_rag}[a.mode](client, a)


def main() -> None:
    """Entry point."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--model", default="default")
    p.add_argument("--api-key", default="")
    p.add_argument("--mode", choices=["rag", "repeat", "single"], default="rag")
    p.add_argument("--layout", choices=["inline", "documents"], default="inline")
    p.add_argument("-c", type=int, default=1, help="concurrent clients")
    p.add_argument("-n", type=int, default=60, help="requests")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--zipf", type=float, default=1.0)
    p.add_argument("--passages", type=int, default=5, help="5, 15, 30 give about 1,330, 3,400, 6,500 prompt tokens")
    p.add_argument("--max-tokens", type=int, default=32)
    p.add_argument("--extra", default="{}", help="JSON merged into every request body")
    p.add_argument("--pid", type=int, help="server process, for its peak memory")
    p.add_argument("--label", default="")
    a = p.parse_args()
    row = {"label": a.label, "mode": a.mode, "layout": a.layout, "c": a.c, "n": a.n, **asyncio.run(run(a))}
    if a.pid:
        row["peak_mib"] = peak_memory_mib(a.pid)
    row = {k: _rounded(v) for k, v in row.items()}
    print("  ".join(f"{k}={v}" for k, v in row.items()))
    print(json.dumps(row))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, list):
        return [round(x, 1) if isinstance(x, float) else x for x in value]
    return value


if __name__ == "__main__":
    main()
