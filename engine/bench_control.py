"""Cost of the control plane, without a model: `python -m engine.bench_control`.

Prints the time of one step's schedule + update with 64 running requests over a tree of 100,000 cached blocks, then what
match, insert and evict cost as the tree grows to a million tokens; ends with one JSON line. Medians; times in µs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.api import BLOCK_SIZE, EngineRequest, SamplingParams, Segment
from engine.cache import CacheManager
from engine.layout import BlockLayout
from engine.scheduler import Scheduler
from engine.step import StepResult

PASSAGE = 20
"""Blocks of one passage: 320 tokens."""
PASSAGES = 5
"""Passages of one prompt, behind one system text."""


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64, help="running requests")
    parser.add_argument("--blocks", type=int, default=100_000, help="cached blocks during the steps")
    parser.add_argument("--steps", type=int, default=400, help="steps that are timed")
    args = parser.parse_args(argv)
    steps = bench_steps(args.running, args.blocks, args.steps)
    print(f"{args.running} running requests of {1616 + 64} tokens, {args.blocks} cached blocks, {args.steps} steps")
    print(f"{'part':12}{'p50 µs':>10}{'p99 µs':>10}")
    for name, (p50, p99) in steps.items():
        print(f"{name:12}{p50:10.0f}{p99:10.0f}")
    tree = bench_tree()
    print(f"\n{'tokens in tree':>14}{'match':>10}{'insert':>10}{'evict':>10}   µs for a prompt of 1,616 tokens")
    for row in tree:
        print(f"{row['tokens']:14}{row['match_us']:10.1f}{row['insert_us']:10.1f}{row['evict_us']:10.1f}")
    print(json.dumps({"steps_us": steps, "tree": tree}))


def prompt(rng: random.Random, vocabulary: int = 49_000) -> tuple[Segment, ...]:
    """A RAG prompt: one of a few system texts, passages of its own, and a tail."""
    system = [i % vocabulary for i in range(BLOCK_SIZE)]
    system[0] = rng.randrange(4)
    passages = [
        tuple(rng.randrange(vocabulary) for _ in range(PASSAGE * BLOCK_SIZE - rng.randrange(BLOCK_SIZE)))
        for _ in range(PASSAGES)
    ]
    return (Segment(tuple(system)), *(Segment(p) for p in passages), Segment((1,) * 8))


def fill(cache: CacheManager, num_blocks: int, rng: random.Random) -> None:
    """Put prompts into the tree until it holds `num_blocks` blocks."""
    while cache.counts().evictable < num_blocks:
        store(cache, *laid_out(prompt(rng)))


def laid_out(segments: tuple[Segment, ...]) -> tuple[BlockLayout, list[int]]:
    """Layout and tokens of a prompt."""
    return BlockLayout(segments), [t for s in segments for t in s.token_ids]


def store(cache: CacheManager, layout: BlockLayout, tokens: list[int]) -> None:
    """Compute a prompt, as far as the cache knows."""
    allocation, _ = cache.open(layout, tokens)
    assert cache.reserve(allocation, len(tokens))
    cache.commit(allocation, tokens, len(tokens))
    cache.close(allocation)


def bench_steps(running: int, blocks: int, steps: int) -> dict[str, tuple[float, float]]:
    """(median, 99th percentile) µs of schedule, update and both, while all requests decode."""
    rng = random.Random(0)
    cache = CacheManager(blocks + running * 400)
    fill(cache, blocks, rng)
    scheduler = Scheduler(
        cache, max_model_len=16384, max_num_seqs=running, max_num_batched_tokens=8 * running, clock=time.monotonic
    )
    params = SamplingParams(max_tokens=steps + 2000, temperature=0.0)
    for i in range(running):
        scheduler.add(EngineRequest(str(i), prompt(rng), params))
    while any(r.num_output_tokens < 64 for r in scheduler.requests()):
        out = scheduler.schedule()
        scheduler.update(out, {r.key: StepResult(5) for r in out.requests if r.needs_token})
    gc.collect()
    times: dict[str, list[float]] = {"schedule": [], "update": [], "step": []}
    for _ in range(steps):
        start = time.perf_counter()
        out = scheduler.schedule()
        middle = time.perf_counter()
        results = {r.key: StepResult(5) for r in out.requests}
        ready = time.perf_counter()
        scheduler.update(out, results)
        end = time.perf_counter()
        assert len(out.requests) == running
        for name, value in (
            ("schedule", middle - start),
            ("update", end - ready),
            ("step", middle - start + end - ready),
        ):
            times[name].append(value * 1e6)
    return {name: (statistics.median(v), statistics.quantiles(v, n=100)[98]) for name, v in times.items()}


def bench_tree() -> list[dict[str, float]]:
    """Median µs of match, insert and evict for one prompt, at growing sizes of the tree."""
    rng = random.Random(1)
    cache = CacheManager(80_000)
    rows: list[dict[str, float]] = []
    for tokens in (10_000, 100_000, 1_000_000):
        fill(cache, tokens // BLOCK_SIZE, rng)
        known = prompt(rng)
        store(cache, *laid_out(known))
        match, insert, evict = [], [], []
        for _ in range(100):
            layout, ids = laid_out(known)
            layout.make_keys(ids, layout.num_sealed(len(ids) - 1), cache._scope_ids)
            spent, (allocation, _) = timed(partial(cache.open, layout, ids))
            match.append(spent)
            cache.close(allocation)
            layout, ids = laid_out(prompt(rng))
            allocation, _ = cache.open(layout, ids)
            cache.reserve(allocation, len(ids))
            layout.make_keys(ids, layout.num_sealed(len(ids)), cache._scope_ids)
            spent, _ = timed(partial(cache.commit, allocation, ids, len(ids)))
            insert.append(spent)
            cache.close(allocation)
            spent, blocks = timed(partial(cache._tree.evict, PASSAGE * PASSAGES))
            evict.append(spent)
            cache._allocator.free(blocks)
        medians = [statistics.median(x) for x in (match, insert, evict)]
        rows.append(dict(zip(("tokens", "match_us", "insert_us", "evict_us"), (tokens, *medians), strict=True)))
    return rows


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """µs that a call took, and what it returned."""
    start = time.perf_counter()
    out = work()
    return (time.perf_counter() - start) * 1e6, out


if __name__ == "__main__":
    main()
