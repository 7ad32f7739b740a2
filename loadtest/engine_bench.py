"""Engine bench in this process: `foreword bench engine MODEL [--lengths 1300 3400] [--ways none auto] [--runs 3]`.

Compares ways to keep and run the weights, in turn, by length and batch, with what this machine can do, measured first:
the rate at which it reads memory bounds decode, the rate of its float32 products prefill (products in whole numbers may
pass that). `mixed` is what four running answers feel while a prompt is computed. Prints a table of medians, then one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "none, torch only": {"quantization": "none"},
    "none": {"quantization": "none"},
    "deterministic": {"quantization": "none", "deterministic": True},
    "auto": {"quantization": "auto"},
    "auto, int8 KV": {"quantization": "auto", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Name -> settings."""
DECODED, CROWD, ANSWERS = 24, 8, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    p = argparse.ArgumentParser(
        "bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", help="GGUF file or Hugging Face folder")
    p.add_argument("--lengths", type=int, nargs="+", default=[1300], help="prompt tokens")
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--ways", nargs="+", choices=WAYS, default=["none", "auto"])
    p.add_argument("--mixed-token-budget", type=int, help="setting of the engines")
    args = p.parse_args(argv)
    limits = {"read_gb_s": read_gb_s(), "float32_gflop_s": float32_gflop_s()}
    print(f"this machine: reads {limits['read_gb_s']:.1f} GB/s, {limits['float32_gflop_s']:.0f} GFLOP/s float32")
    engines = {way: make(args.model, way, max(args.lengths), args.mixed_token_budget) for way in args.ways}
    seen: dict[str, dict[str, list[float]]] = {way: {} for way in engines}
    for run in range(args.runs):
        for way, llm in engines.items():
            for name, value in measure(llm, args.lengths, run).items():
                seen[way].setdefault(name, []).append(value)
    rows = {way: {name: statistics.median(v) for name, v in values.items()} for way, values in seen.items()}
    for way, llm in engines.items():
        rows[way] |= shares(llm, rows[way], args.lengths, limits)
    print(f"{'':22}" + "".join(f"{w:>18}" for w in rows))
    for name in next(iter(rows.values())):
        print(f"{name:22}" + "".join(f"{row[name]:18.2f}" for row in rows.values()))
    print(json.dumps({"lengths": args.lengths, "runs": args.runs, "rows": rows, "limits": limits}))
    return 0


def make(model: str, way: str, longest: int, mixed_token_budget: int | None) -> LLM:
    """An engine without a cache, whose every prompt is cold."""
    room = longest + 256
    pool = max(CROWD * (min(longest, 1300) + 256), (ANSWERS + 1) * room)
    settings = {"max_model_len": room, "kv_cache_tokens": pool, "mixed_token_budget": mixed_token_budget, **WAYS[way]}
    llm = LLM(model, enable_prefix_caching=False, **settings)
    if way == "none, torch only":
        llm.core.runner._decoder = None
        llm.core.runner._model.use_torch_products()
    return llm


def prompt(llm: LLM, seed: int, n: int) -> list[int]:
    """n tokens that nothing else begins with."""
    vocab_size = llm.core.runner.model_config.vocab_size
    return [(seed * 7919 + i * 37) % vocab_size for i in range(n)]


def measure(llm: LLM, lengths: Sequence[int], run: int) -> dict[str, float]:
    """Tokens per second, and milliseconds between tokens, of one run."""
    params = SamplingParams(max_tokens=DECODED + 1, temperature=0.0, ignore_eos=True)
    (short,) = llm.generate(prompt(llm, run, 32), params)
    out = {"decode tok/s @32": DECODED / short.stats.decode_s}
    for n in lengths:
        (long,) = llm.generate(prompt(llm, run, n), params)
        out[f"prefill tok/s @{n}"] = n / long.stats.prefill_s
        out[f"decode tok/s @{n}"] = DECODED / long.stats.decode_s
    n = min(lengths)
    out[f"{CROWD} x decode tok/s @{n}"] = crowd(llm, [prompt(llm, CROWD * run + i, min(n, 1300)) for i in range(CROWD)])
    gaps, tok_s = mixed(llm, n, run)
    out["mixed gap p99 ms"] = sorted(gaps)[round(0.99 * (len(gaps) - 1))] * 1e3
    out["mixed prefill tok/s"] = tok_s
    return out


def crowd(llm: LLM, prompts: list[list[int]]) -> float:
    """Tokens per second of several that decode together, timed from where all have begun to answer."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    core = start(llm, prompts, params)
    began = time.perf_counter()
    for _ in range(DECODED):
        core.step()
    spent = time.perf_counter() - began
    stop(core)
    return DECODED * len(prompts) / spent


def mixed(llm: LLM, n: int, run: int) -> tuple[list[float], float]:
    """Seconds between running answers' tokens while a prompt of n tokens is computed, and its tokens per second."""
    params = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True)
    core = start(llm, [prompt(llm, 100 + ANSWERS * run + i, 64) for i in range(ANSWERS)], params)
    new = llm.request(prompt(llm, 300 + run, n), params)
    core.add(new)
    gaps, began = [], time.perf_counter()
    while not next(r for r in core.scheduler.requests() if r.request_id == new.request_id).num_output_tokens:
        before = time.perf_counter()
        core.step()
        gaps.append(time.perf_counter() - before)
    spent = time.perf_counter() - began
    stop(core)
    return gaps, n / spent


def start(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Any:
    """The engine, with all of them answering."""
    core = llm.core
    for p in prompts:
        core.add(llm.request(p, params))
    while min(r.num_output_tokens for r in core.scheduler.requests()) < 1:
        core.step()
    return core


def stop(core: Any) -> None:
    """End all requests."""
    for request in list(core.scheduler.requests()):
        core.abort(request.request_id)


def shares(llm: LLM, row: dict[str, float], lengths: Sequence[int], limits: dict[str, float]) -> dict[str, float]:
    """Weights, and what share of the machine's limits prefill and decode reach."""
    runner = llm.core.runner
    c, num_bytes = runner.model_config, runner._model.num_weight_bytes
    qkv = (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim
    layer = c.hidden_size * (qkv + c.num_q_heads * c.head_dim + 3 * c.intermediate_size)
    out = {"weights MB": num_bytes / 1e6}
    for n in lengths:
        operations = (
            2 * c.num_layers * (layer + n * c.num_q_heads * c.head_dim)
        )  # a token: products, attention (causal)
        rate = row[f"prefill tok/s @{n}"] * operations / 1e9
        out[f"% of float32 @{n}"] = 100 * rate / limits["float32_gflop_s"]
        kv = 2 * c.num_layers * n * c.num_kv_heads * c.head_dim * runner.kv_dtype.itemsize
        out[f"% of reading @{n}"] = 100 * row[f"decode tok/s @{n}"] * (num_bytes + kv) / 1e9 / limits["read_gb_s"]
    return out


def best(work: Callable[[], object], times: int = 7) -> float:
    """Least seconds of a call: limits are what the machine does undisturbed."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return min(spent)


def read_gb_s() -> float:
    """Memory read by a sum over 512 MB."""
    data = torch.ones(1 << 27)
    return data.numel() * 4 / best(data.sum) / 1e9


def float32_gflop_s(n: int = 1536) -> float:
    """Square matrix products."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    return float(2 * n**3 / best(lambda: a @ b) / 1e9)


if __name__ == "__main__":
    raise SystemExit(main())
