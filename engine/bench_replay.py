"""What the cache finds on real traffic: `python -m engine.bench_replay TRACE_DIR [--tokens 50000 100000 200000]`.

A RAGPulse trace's requests, of which the ids and lengths are known, go one after the other through the scheduler and
the cache, no model behind them: a constant system text, the passages in the recorded order, and all else in the tail.
Counted are the passage tokens that were not computed, by exact prefix alone and with linked passages, at several sizes
of the KV pool; beside it the offline optimum for linked passages: the same tokens where the passage to go is always the
one needed last (Belady 1966), with the whole pool for passages. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.api import BLOCK_SIZE, CacheMode, EngineRequest, SamplingParams, Segment, SegmentKind
from engine.cache import CacheManager
from engine.scheduler import Scheduler
from engine.step import StepResult

SYSTEM_TOKENS, MAX_PASSAGE = 512, 1024
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


class Recorded(NamedTuple):
    """A request of the trace."""

    passages: tuple[int, ...]
    tail_tokens: int


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="folder with 0_trace.jsonl.gz and 2_passages.jsonl.gz")
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 100_000, 200_000], help="of the KV pool")
    parser.add_argument("--recomputed", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10**9)
    args = parser.parse_args(argv)
    sizes, requests = read_trace(args.trace, args.requests)
    report = {}
    for tokens in args.tokens:
        row = {mode.value: replay(requests, sizes, tokens, mode, args.recomputed) for mode in MODES}
        row["optimum"] = optimum(requests, sizes, tokens, args.recomputed)
        report[tokens] = row
        print(f"pool of {tokens:7} tokens: ", "  ".join(f"{name} {share:.1%}" for name, share in row.items()))
    print(json.dumps({"requests": len(requests), "recomputed": args.recomputed, "shares": report}))


MODES = (CacheMode.EXACT, CacheMode.LINKED)


def read_trace(folder: Path, num: int) -> tuple[dict[int, int], list[Recorded]]:
    """Tokens of each passage, and the requests; what no prompt shares counts to the tail."""
    sizes = {r["passage_id"]: min(r["token_length"], MAX_PASSAGE) for r in _lines(folder / "2_passages.jsonl.gz")}
    out = []
    for r, _ in zip(_lines(folder / "0_trace.jsonl.gz"), range(num), strict=False):
        passages = tuple(r["hash_ids"]["passages_ids"])
        rest = int(r["input_length"]) - SYSTEM_TOKENS - sum(sizes[p] for p in passages)
        out.append(Recorded(passages, max(1, rest)))
    return sizes, out


def replay(
    requests: Sequence[Recorded], sizes: dict[int, int], pool_tokens: int, mode: CacheMode, num_recomputed: int
) -> float:
    """Share of passage tokens that were not computed."""
    longest = max(SYSTEM_TOKENS + sum(sizes[p] for p in r.passages) + r.tail_tokens for r in requests) + 2
    cache = CacheManager(pool_tokens // BLOCK_SIZE, pin_budget=pool_tokens // BLOCK_SIZE // 4)
    scheduler = Scheduler(
        cache,
        max_model_len=longest,
        max_num_seqs=64,
        max_num_batched_tokens=longest,
        link_recompute_tokens=num_recomputed,
        clock=time.monotonic,
    )
    system = Segment(tuple(range(SYSTEM_TOKENS)), SegmentKind.SYSTEM)
    found = total = 0
    for i, recorded in enumerate(requests):
        passages = [
            Segment(tuple(range(p << 11, (p << 11) + sizes[p])), SegmentKind.PASSAGE) for p in recorded.passages
        ]
        tail = Segment((2**30 + i, *range(1, recorded.tail_tokens)), SegmentKind.TAIL)
        source = EngineRequest(str(i), (system, *passages, tail), ONE_TOKEN, cache=mode)
        (request,) = scheduler.add(source)
        while scheduler.has_work:
            out = scheduler.schedule()
            scheduler.update(out, {r.key: StepResult(7) for r in out.requests if r.needs_token})
        counts = request.stats().segments[1:-1]
        found += sum(c.cached for c in counts)
        total += sum(len(s.token_ids) for s in passages)
    return found / max(1, total)


def optimum(requests: Sequence[Recorded], sizes: dict[int, int], capacity: int, num_recomputed: int) -> float:
    """The same share where what is kept is chosen knowing the future."""
    later = _next_uses(requests)
    kept: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    used = found = total = 0
    for recorded, nexts in zip(requests, later, strict=True):
        for at, (passage, next_use) in enumerate(zip(recorded.passages, nexts, strict=True)):
            total += sizes[passage]
            if passage in kept:
                found += max(0, sizes[passage] - (num_recomputed if at else 0))
            else:
                used += sizes[passage]
            kept[passage] = next_use
            heapq.heappush(heap, (-next_use, passage))
        while used > capacity:
            negative, passage = heapq.heappop(heap)
            if kept.get(passage) == -negative:
                del kept[passage]
                used -= sizes[passage]
    return found / max(1, total)


def _next_uses(requests: Sequence[Recorded]) -> list[list[float]]:
    """For each passage of each request the number of the request that uses it next."""
    seen: dict[int, float] = {}
    out: list[list[float]] = []
    for i in range(len(requests) - 1, -1, -1):
        out.append([seen.get(p, math.inf) for p in requests[i].passages])
        seen.update(dict.fromkeys(requests[i].passages, float(i)))
    return out[::-1]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


if __name__ == "__main__":
    main()
