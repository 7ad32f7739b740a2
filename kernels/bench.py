"""Attention of one layer on the CPU: our torch backend, one masked SDPA call a sequence, and plain matrix products.

`python -m kernels.bench` prints milliseconds (the best of several rounds in which the three take turns, so that another
process on the machine disturbs all alike) and one JSON line; it takes about half a minute. 9 query heads, 3 key-value
heads, head size 64, all threads. All three pay for gathering the keys of a layer by their slots.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kernels.batch import AttentionBatch, Sequence, flat_slots
from kernels.dispatch import make_attention

HEADS = (9, 3, 64)
SHAPES = ((1, 512, 0), (1, 512, 1024), (1, 64, 1336), (1, 16, 1384), (1, 1, 1399), (8, 1, 1399), (8, 1, 199))
"""Sequences, new tokens of each, cached tokens of each."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
ROUND_S = 1.2
"""Seconds spent on a shape."""
MIN_ROUNDS = 3

Call = Callable[[], torch.Tensor]


def main() -> None:
    """Entry point."""
    rows = []
    print(f"{'dtype':10}{'seqs':>5}{'new':>6}{'cached':>8}{'ours ms':>10}{'sdpa ms':>10}{'naive ms':>10}")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            r = measure(dtype, *shape)
            rows.append(r)
            counts = f"{r['dtype']:10}{r['sequences']:5}{r['new']:6}{r['cached']:8}"
            print(f"{counts}{r['ours_ms']:10.3f}{r['sdpa_ms']:10.3f}{r['naive_ms']:10.3f}", flush=True)
    print(json.dumps(rows))


def measure(dtype: torch.dtype, num_sequences: int, num_new: int, start: int) -> dict[str, Any]:
    """One shape, its blocks in random order. Raises `AssertionError` if the three disagree."""
    hq, hkv, d = HEADS
    torch.manual_seed(0)
    batch, num_blocks = make_batch(num_sequences, num_new, start)
    k_cache, v_cache = (torch.randn(num_blocks, 16, hkv, d).to(dtype) for _ in range(2))
    slots = [torch.from_numpy(flat_slots(s, start + num_new)[0]) for s in batch.sequences]
    new = torch.cat([s[start:] for s in slots])
    k_new, v_new = (c.flatten(0, 1)[new] for c in (k_cache, v_cache))
    q = torch.randn(num_sequences * num_new, hq, d).to(dtype)
    backend, _ = make_attention(torch.device("cpu"), *HEADS)
    plan = backend.plan(batch)
    mask = torch.arange(start + num_new)[None, :] <= start + torch.arange(num_new)[:, None]

    def each(attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = []
        for one, at in zip(q.view(-1, num_new, hq, d), slots, strict=True):
            k, v = (c.flatten(0, 1).index_select(0, at).transpose(0, 1)[None] for c in (k_cache, v_cache))
            out.append(attend(one.transpose(0, 1)[None], k, v, mask)[0].transpose(0, 1))
        return torch.cat(out)

    calls: tuple[Call, ...] = (
        lambda: backend.forward(q, k_new, v_new, k_cache, v_cache, plan),
        lambda: each(sdpa),
        lambda: each(naive),
    )
    first, *others = [f().float() for f in calls]
    assert all(torch.allclose(first, x, atol=TOLERANCE[dtype]) for x in others)
    names = ("ours_ms", "sdpa_ms", "naive_ms")
    counts = {"sequences": num_sequences, "new": num_new, "cached": start}
    return {"dtype": str(dtype).removeprefix("torch."), **counts, **dict(zip(names, best_ms(calls), strict=True))}


def make_batch(num_sequences: int, num_new: int, start: int) -> tuple[AttentionBatch, int]:
    """Sequences of one shape over one pool, and the pool's blocks."""
    total = start + num_new
    starts = np.arange(0, total, 16, dtype=np.int32)
    valids = np.minimum(total - starts, 16).astype(np.int32)
    ids = np.random.default_rng(0).permutation(num_sequences * len(starts)).astype(np.int32)
    zeros = np.zeros(len(starts), np.int32)
    parts = np.split(ids, num_sequences)
    return AttentionBatch(tuple(Sequence(num_new, start, part, starts, valids, zeros) for part in parts)), len(ids)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch's own grouped-query attention."""
    out: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Two matrix products with all scores in memory, keys repeated for each query head."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.matmul(scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype), v)


def best_ms(calls: tuple[Call, ...]) -> list[float]:
    """Shortest wall time of each call, taking turns until the time is up."""
    best = [float("inf")] * len(calls)
    end, rounds = time.perf_counter() + ROUND_S, 0
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        for i, f in enumerate(calls):
            at = time.perf_counter()
            f()
            best[i] = min(best[i], (time.perf_counter() - at) * 1e3)
        rounds += 1
    return [round(b, 3) for b in best]


if __name__ == "__main__":
    with torch.inference_mode():
        main()
