"""Prefill and decode of the engine in this process: `python -m engine.bench MODEL [--context 1300] [--runs 3]`.

Compares ways to keep and run the weights, in turn, with what this machine can do: the rate at which memory is read
bounds decode, the rate of float32 products prefill. Prints a table of medians and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from engine.api import SamplingParams
from engine.llm import LLM

WAYS = {
    "none, torch only": ("none", False),
    "none": ("none", True),
    "auto": ("auto", True),
    "int8": ("int8", True),
    "int4": ("int4", True),
}
"""Name -> quantization, and whether small steps run in C++."""
DECODED = 24


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file or Hugging Face folder")
    parser.add_argument("--context", type=int, default=1300, help="prompt tokens")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["none, torch only", "none", "auto"])
    args = parser.parse_args(argv)
    engines = {way: make(args.model, way, args.context) for way in args.ways}
    seen: dict[str, dict[str, list[float]]] = {way: {} for way in engines}
    for run in range(args.runs):
        for way, llm in engines.items():
            for name, value in measure(llm, args.context, run).items():
                seen[way].setdefault(name, []).append(value)
    rows = {way: {name: statistics.median(v) for name, v in values.items()} for way, values in seen.items()}
    for way, llm in engines.items():
        rows[way]["weights_mb"] = llm.core.runner._model.num_weight_bytes / 1e6
    limits = {"read_gb_s": read_gb_s(), "float32_gflop_s": float32_gflop_s()}
    names = list(next(iter(rows.values())))
    print(f"{'tok/s':20}" + "".join(f"{n:>16}" for n in names))
    for way, row in rows.items():
        print(f"{way:20}" + "".join(f"{row[n]:16.1f}" for n in names))
    print(f"this machine: reads {limits['read_gb_s']:.1f} GB/s, {limits['float32_gflop_s']:.0f} GFLOP/s float32")
    print(json.dumps({"context": args.context, "runs": args.runs, "rows": rows, "limits": limits}))


def make(model: str, way: str, context: int) -> LLM:
    """An engine without a cache, whose every prompt is cold."""
    quantization, has_cpp = WAYS[way]
    llm = LLM(
        model,
        quantization=quantization,
        enable_prefix_caching=False,
        max_model_len=context + 256,
        kv_cache_tokens=8 * (context + 256),
    )
    if not has_cpp:
        llm.core.runner._decoder = None
    return llm


def measure(llm: LLM, context: int, run: int) -> dict[str, float]:
    """Tokens per second of one run."""
    params = SamplingParams(max_tokens=DECODED + 1, temperature=0.0, ignore_eos=True)
    vocab_size = llm.core.runner.model_config.vocab_size

    def prompt(seed: int, n: int) -> list[int]:
        return [(seed * 7919 + i * 37) % vocab_size for i in range(n)]

    (short,) = llm.generate(prompt(run, 32), params)
    (long,) = llm.generate(prompt(run, context), params)
    return {
        "prefill": context / long.stats.prefill_s,
        "decode": DECODED / short.stats.decode_s,
        f"decode@{context}": DECODED / long.stats.decode_s,
        f"8 x decode@{context}": crowd(llm, [prompt(8 * run + i, context) for i in range(8)]),
    }


def crowd(llm: LLM, prompts: list[list[int]]) -> float:
    """Tokens per second of eight that decode together, timed from where all have begun to answer."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    core = llm.core
    for prompt in prompts:
        core.add(llm.request(prompt, params))
    while min(r.num_output_tokens for r in core.scheduler.requests()) < 1:
        core.step()
    start = time.perf_counter()
    for _ in range(DECODED):
        core.step()
    spent = time.perf_counter() - start
    for request in core.scheduler.requests():
        core.abort(request.request_id)
    return DECODED * len(prompts) / spent


def best(work: Callable[[], object], times: int = 7) -> float:
    """Least seconds of a call: limits are what the machine does undisturbed."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
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
    main()
