"""Attention of one layer on the CPU: our torch backend against one masked SDPA call, side by side.

`python -m kernels.bench` prints milliseconds (medians) and the ratio by shape, then one JSON line. 9 query heads, 3
key-value heads, head size 64, float32, all threads.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from kernels.batch import AttentionBatch, Sequence, flat_slots
from kernels.dispatch import make_attention

HEADS = (9, 3, 64)
SHAPES = ((512, 0), (512, 1024), (64, 1400), (16, 1400), (1, 1400))
REPEATS = 15


def main() -> None:
    """Entry point."""
    rows = [measure(*shape) for shape in SHAPES]
    print(f"{'new':>6}{'cached':>8}{'ours ms':>10}{'sdpa ms':>10}{'sdpa/ours':>11}")
    for r in rows:
        print(f"{r['new']:6.0f}{r['cached']:8.0f}{r['ours_ms']:10.2f}{r['sdpa_ms']:10.2f}{r['ratio']:11.2f}")
    print(json.dumps(rows))


def measure(num_new: int, start: int) -> dict[str, float]:
    """One shape: a sequence with blocks in random order."""
    hq, hkv, d = HEADS
    total = num_new + start
    num_blocks = -(-total // 16)
    rng = np.random.default_rng(0)
    starts = np.arange(0, total, 16, dtype=np.int32)
    valids = np.minimum(total - starts, 16).astype(np.int32)
    ids = rng.permutation(num_blocks).astype(np.int32)
    s = Sequence(num_new, start, ids, starts, valids, np.zeros(num_blocks, np.int32))
    k_cache, v_cache = (torch.randn(num_blocks, 16, hkv, d) for _ in range(2))
    slots = torch.from_numpy(flat_slots(s, total)[0])
    k, v = (c.flatten(0, 1)[slots] for c in (k_cache, v_cache))
    q = torch.randn(num_new, hq, d)
    backend, _ = make_attention(torch.device("cpu"), *HEADS)
    plan = backend.plan(AttentionBatch((s,)))
    mask = torch.arange(total)[None, :] <= start + torch.arange(num_new)[:, None]

    def ours() -> torch.Tensor:
        return backend.forward(q, k[start:], v[start:], k_cache, v_cache, plan)

    def sdpa() -> torch.Tensor:
        kk, vv = (c.flatten(0, 1)[slots].transpose(0, 1)[None] for c in (k_cache, v_cache))
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], kk, vv, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    assert torch.allclose(ours(), sdpa(), atol=1e-5)
    mine, theirs = median_ms(ours), median_ms(sdpa)
    return {"new": num_new, "cached": start, "ours_ms": mine, "sdpa_ms": theirs, "ratio": round(theirs / mine, 2)}


def median_ms(f: Callable[[], torch.Tensor]) -> float:
    """Median wall time of one call."""
    times = []
    for _ in range(REPEATS):
        at = time.perf_counter()
        f()
        times.append((time.perf_counter() - at) * 1e3)
    return round(statistics.median(times), 3)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
