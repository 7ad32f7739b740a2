"""What linked passages lose and gain: `python -m engine.bench_linking MODEL --data DIR [--set musique xquad_en]`.

Each question stands behind a system text and some passages, one of which holds the answer. Full prefill is compared
with linked passages at several numbers of recomputed tokens: over the gold answer, given to the model token by token,
how often both have the same best next token and how far their distributions are apart (KL); how often a greedy answer
contains the gold answer; and the time of the forward pass once all passages were computed before. Intervals are 95 %
bootstrap intervals over questions. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.api import CacheMode, EngineRequest, SamplingParams, Segment, SegmentKind
from engine.llm import LLM

SYSTEM = "You answer questions from the passages you are given, in a few words."
ANSWER = SamplingParams(max_tokens=24, temperature=0.0)
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its gold answer and the passages that stand before it."""

    text: str
    answer: str
    passages: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """What one way gave for one question."""

    logits: torch.Tensor
    """Over the gold answer's tokens, [tokens, vocab]."""
    forward_s: float
    contains: bool
    num_computed: int


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file or Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the question sets")
    parser.add_argument("--set", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--recomputed", type=int, nargs="+", default=[0, 16, 32, 64])
    args = parser.parse_args(argv)
    report = {name: run_set(args, name) for name in args.set}
    print(json.dumps({"model": Path(args.model).name, "passages": args.passages, "sets": report}))


def run_set(args: Any, name: str) -> dict[str, Any]:
    """The table of one set of questions."""
    questions = [q for q, _ in zip(READERS[name](args.data / name, args.passages), range(args.questions), strict=False)]
    settings = {"max_num_batched_tokens": 8192, "kv_cache_tokens": 32768, "dtype": args.dtype}
    full, linked = LLM(args.model, **settings), LLM(args.model, **settings)
    base: list[Result] = []
    ways: dict[int, list[Result]] = {k: [] for k in args.recomputed}
    for question in questions:
        segments, gold = prompt(full, question), full.core.tokenizer.encode(" " + question.answer)
        base.append(measure(full, segments, gold, question, CacheMode.EXACT))
        linked.generate([segments], SamplingParams(max_tokens=1), CacheMode.LINKED)
        for k, results in ways.items():
            linked.core.scheduler.link_recompute_tokens = k
            results.append(measure(linked, segments, gold, question, CacheMode.LINKED))
    print(
        f"{name}: {len(questions)} questions, {args.passages} passages; median prompt "
        f"{statistics.median(r.num_computed for r in base):.0f} tokens"
    )
    rows = {"full": row(base, base)} | {f"k={k}": row(base, results) for k, results in ways.items()}
    for label, r in rows.items():
        cells = [f"{key} {r[key][0]:.3f} [{r[key][1]:.3f}, {r[key][2]:.3f}]" for key in ("agreement", "kl", "contains")]
        print(f"  {label:6}", "  ".join(cells), f" forward {r['forward_s']:.3f} s, {r['computed']:.0f} tokens computed")
    return rows


def prompt(llm: LLM, question: Question) -> list[Segment]:
    """[system][passage]...[tail], as the gateway makes it."""
    tokenizer, mark = llm.core.tokenizer, "\ue0f1"
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": mark}]
    before, _, after = tokenizer.render_chat(chat).partition(mark)
    passages = [Segment(tuple(tokenizer.encode(f"{p}\n\n")), SegmentKind.PASSAGE) for p in question.passages]
    tail = tokenizer.encode_template(question.text + after)
    head = Segment(tuple(tokenizer.encode_template(before)), SegmentKind.SYSTEM)
    return [head, *passages, Segment(tuple(tail), SegmentKind.TAIL)]


def measure(llm: LLM, segments: list[Segment], gold: list[int], question: Question, cache: CacheMode) -> Result:
    """Run one question one way."""
    logits, seconds, computed = teacher_forced(llm, segments, gold, cache)
    (answer,) = llm.generate([segments], ANSWER, cache)
    return Result(logits, seconds, question.answer.lower() in answer.text.lower(), computed)


def teacher_forced(
    llm: LLM, segments: list[Segment], gold: list[int], cache: CacheMode
) -> tuple[torch.Tensor, float, int]:
    """Logits at each token of the gold answer, the seconds of the prompt's forward pass and the tokens it computed."""
    core, name = llm.core, f"forced-{time.monotonic_ns()}"
    tail = Segment((*segments[-1].token_ids, *gold[:-1]), SegmentKind.TAIL)
    core.scheduler.add(EngineRequest(name, (*segments[:-1], tail), SamplingParams(max_tokens=1), cache=cache))
    seconds, computed = 0.0, 0
    while True:
        out = core.scheduler.schedule()
        last, started = out.requests[-1], time.perf_counter()
        rows = [(last, len(last.token_ids) - len(gold) + i) for i in range(len(gold))] if last.needs_token else []
        logits = core.runner.logits(out, rows)
        seconds += time.perf_counter() - started
        computed += out.num_tokens
        if last.needs_token:
            core.scheduler.abort(name)
            return logits.float(), seconds, computed
        core.scheduler.update(out, {})


def row(base: Sequence[Result], results: Sequence[Result]) -> dict[str, Any]:
    """One way's figures, each with its interval."""
    agreement, kl = [], []
    for a, b in zip(base, results, strict=True):
        p, q = a.logits.log_softmax(-1), b.logits.log_softmax(-1)
        agreement.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
        kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return {
        "agreement": interval(agreement),
        "kl": interval(kl),
        "contains": interval([float(r.contains) for r in results]),
        "forward_s": statistics.median(r.forward_s for r in results),
        "computed": statistics.median(r.num_computed for r in results),
    }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the 95 % bootstrap interval of it."""
    x = np.asarray(values)
    means = x[np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(x.mean()), float(low), float(high)


def read_musique(folder: Path, num_passages: int) -> Iterator[Question]:
    """Questions whose answer stands in one of their own contexts; the others are contexts of the same question."""
    rng = random.Random(0)
    for item in json.loads(gzip.decompress((folder / "musique_dev50.json.gz").read_bytes())):
        answer, texts = item["answers"][0], [c["text"] for c in item["ctxs"]]
        gold = [t for t in texts if answer.lower() in t.lower()]
        if gold:
            yield Question(item["question"], answer, mixed(rng, gold[0], texts, num_passages))


def read_xquad(folder: Path, num_passages: int) -> Iterator[Question]:
    """Questions in random order, each with its paragraph and others of the same article."""
    rng = random.Random(0)
    lines = [gzip.decompress((folder / f"{n}.jsonl.gz").read_bytes()).splitlines() for n in ("corpus", "queries")]
    corpus, queries = ([json.loads(line) for line in of_one] for of_one in lines)
    qrels = dict(line.split("\t")[:2] for line in (folder / "qrels.tsv").read_text().splitlines()[1:])
    texts = {p["_id"]: p["text"] for p in corpus}
    for query in rng.sample(queries, len(queries)):
        at = qrels[query["_id"]]
        near = [t for i, t in texts.items() if i.split("p")[0] == at.split("p")[0]]
        others = near if len(near) >= num_passages else list(texts.values())
        yield Question(query["text"], query["metadata"]["answers"][0], mixed(rng, texts[at], others, num_passages))


def mixed(rng: random.Random, gold: str, others: Sequence[str], num: int) -> tuple[str, ...]:
    """The gold passage among others, at a random place."""
    rest = [t for t in others if t != gold]
    chosen = [gold, *rng.sample(rest, min(num - 1, len(rest)))]
    rng.shuffle(chosen)
    return tuple(chosen)


READERS = {"musique": read_musique, "xquad_en": read_xquad}


if __name__ == "__main__":
    main()
