"""What a way to keep weights and KV loses: `python -m engine.bench_quality MODEL TEXT [--tokens 16384] [--ways ...]`.

Perplexity of a text file (plain or .gz) in windows of 1,024 tokens, and how many greedy answers to questions about its
passages differ from the first way's, each way beside the first. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from pathlib import Path

from engine.api import SamplingParams
from engine.llm import LLM

WAYS: dict[str, dict[str, str]] = {
    "float32": {"quantization": "none", "dtype": "float32"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "auto": {"quantization": "auto"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "auto, int8 KV": {"quantization": "auto", "kv_cache_dtype": "int8"},
}
WINDOW, PASSAGE, ANSWER = 1024, 200, 32


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file or Hugging Face folder")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=16384, help="of the text")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["float32", "auto", "int8", "int4", "auto, int8 KV"])
    args = parser.parse_args(argv)
    raw = args.text.read_bytes()
    text = (gzip.decompress(raw) if args.text.suffix == ".gz" else raw).decode()
    rows: dict[str, dict[str, float]] = {}
    first: list[tuple[int, ...]] = []
    for way in args.ways:
        llm = LLM(args.model, max_model_len=2048, enable_prefix_caching=False, **WAYS[way])
        ids = llm.core.tokenizer.encode(text[: 8 * args.tokens])[: args.tokens]
        found = answers(llm, ids, args.questions)
        first = first or found
        changed = sum(a != b for a, b in zip(first, found, strict=True))
        rows[way] = {"perplexity": perplexity(llm, ids), "answers_changed": changed, "of": len(found)}
        rows[way]["loss"] = rows[way]["perplexity"] / rows[args.ways[0]]["perplexity"] - 1
        r = rows[way]
        print(
            f"{way:16} perplexity {r['perplexity']:8.4f} ({r['loss']:+.2%})  answers changed {changed} of {len(found)}"
        )
    print(json.dumps({"model": Path(args.model).name, "tokens": args.tokens, "ways": rows}))


def perplexity(llm: LLM, ids: list[int]) -> float:
    """exp of the mean negative log-probability of every token but each window's first."""
    windows = [w for at in range(0, len(ids), WINDOW) if len(w := ids[at : at + WINDOW]) > 1]
    values: list[float] = []
    for window in windows:
        (done,) = llm.generate(window, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        values += [x.logprob for x in done.prompt_logprobs]
    return math.exp(-sum(values) / len(values))


def answers(llm: LLM, ids: list[int], num: int) -> list[tuple[int, ...]]:
    """Greedy answers to a question about each of `num` passages of the text."""
    out = []
    for at in range(0, min(len(ids), num * PASSAGE), PASSAGE):
        passage = llm.core.tokenizer.decode(ids[at : at + PASSAGE])
        chat = [{"role": "user", "content": f"{passage}\n\nWhat is this passage about?"}]
        prompt = llm.core.tokenizer.render_chat(chat)
        (done,) = llm.generate(prompt, SamplingParams(max_tokens=ANSWER, temperature=0.0))
        out.append(tuple(done.token_ids))
    return out


if __name__ == "__main__":
    main()
