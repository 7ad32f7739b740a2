"""What the order of passages saves: `python -m gateway.bench_order TRACE_DIR`, on ids and lengths of a RAGPulse trace.

Every request is given its passages in the recorded order, then ordered along earlier prompts within a bound. Counted
are the passage tokens that stand behind the same passages as in some earlier prompt: what an exact prefix cache without
a limit finds, the system text being the same for all. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.order import PassageOrder


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="folder with 0_trace.jsonl.gz and 2_passages.jsonl.gz")
    parser.add_argument("--shifts", type=int, nargs="+", default=[0, 1, 2, 4, 8, 100])
    parser.add_argument("--tokens", type=int, default=10**9, help="passages' tokens that the orders remember")
    args = parser.parse_args(argv)
    sizes = {r["passage_id"]: r["token_length"] for r in read(args.trace / "2_passages.jsonl.gz")}
    prompts = [tuple(r["hash_ids"]["passages_ids"]) for r in read(args.trace / "0_trace.jsonl.gz")]
    shares = {shift: reused(prompts, sizes, shift, args.tokens) for shift in args.shifts}
    for shift, (share, moved) in shares.items():
        print(f"at most {shift:3} places: {share:6.1%} of passage tokens found, a passage moves {moved:.2f} places")
    print(json.dumps({"prompts": len(prompts), "shares": {str(k): v[0] for k, v in shares.items()}}))


def reused(
    prompts: list[tuple[int, ...]], sizes: dict[int, int], max_shift: int, max_tokens: int
) -> tuple[float, float]:
    """Share of the passage tokens that a prefix cache finds, and how many places a passage moves on average."""
    order, seen = PassageOrder(max_tokens), dict[int, Any]()
    found = total = moves = num = 0
    for prompt in prompts:
        indices = order.propose("", prompt, max_shift)
        moves += sum(abs(i - at) for at, i in enumerate(indices))
        sent = [prompt[i] for i in indices]
        order.record("", sent, [sizes[p] for p in sent])
        node, is_prefix = seen, True
        for passage in sent:
            is_prefix = is_prefix and passage in node
            found += sizes[passage] if is_prefix else 0
            total += sizes[passage]
            num += 1
            node = node.setdefault(passage, {})
    return found / max(1, total), moves / max(1, num)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


if __name__ == "__main__":
    main()
