"""How well retrieval finds: `foreword eval retrieval DATASET [--mode dense|lexical|hybrid] [--json]`.

A dataset is a folder in BEIR's layout: corpus.jsonl and queries.jsonl, plain or .gz, and qrels.tsv or qrels/test.tsv.
Its documents are ingested once into the user's cache folder and reused while dataset and embedder stay the same.

Metrics are BEIR's, over documents (a document ranks where its best passage does): nDCG@10 with graded gains, recall@10
and @100, MRR@10. A document whose id is the query's is left out, as BEIR does. `--no-split` embeds each document as one
text cut to what the model reads, as MTEB does, by dense search alone: a check against published numbers.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval import ranking as fusion
from retrieval.api import IngestRequest, SearchMode, SearchRequest, SourceFile
from retrieval.dense import DenseIndex
from retrieval.embed import Embedder, make_embedder
from retrieval.lexical import fold
from retrieval.retriever import Retriever

Qrels = dict[str, dict[str, int]]
Search = Callable[[str], list[str]]
DEPTH = 100
"""Documents looked at."""
BATCH = 256


@dataclass(frozen=True, slots=True)
class Dataset:
    """Texts, questions, and which document answers which question."""

    name: str
    corpus: Path
    queries: dict[str, str]
    qrels: Qrels

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Id, title and text of each."""
        for row in _lines(self.corpus):
            yield str(row["_id"]), str(row.get("title") or ""), str(row["text"])


def load_dataset(folder: Path) -> Dataset:
    """Raises `ValueError` that names what the folder lacks."""
    corpus, queries = _find(folder, "corpus.jsonl"), _find(folder, "queries.jsonl")
    qrels = _qrels(_find(folder, "qrels.tsv", "qrels/test.tsv"))
    texts = {str(q["_id"]): str(q["text"]) for q in _lines(queries) if str(q["_id"]) in qrels}
    if missing := qrels.keys() - texts.keys():
        raise ValueError(f"{queries}: no text of the query {sorted(missing)[0]!r}, which qrels name")
    return Dataset(folder.name, corpus, texts, qrels)


def evaluate(queries: dict[str, str], qrels: Qrels, search: Search) -> dict[str, float]:
    """Metrics and latency of a search that returns document ids, best first."""
    rows: dict[str, list[float]] = defaultdict(list)
    for query_id, text in queries.items():
        started = time.perf_counter()
        found = search(text)
        rows["ms"].append((time.perf_counter() - started) * 1e3)
        found = [d for d in dict.fromkeys(found) if d != query_id][:DEPTH]
        for name, value in scores(found, qrels[query_id]).items():
            rows[name].append(value)
    ms = sorted(rows.pop("ms"))
    out = {name: statistics.mean(values) for name, values in rows.items()}
    return {**out, "p50_ms": ms[len(ms) // 2], "p99_ms": ms[round(0.99 * (len(ms) - 1))], "queries": len(ms)}


def scores(found: Sequence[str], relevant: dict[str, int]) -> dict[str, float]:
    """nDCG@10 (Jaervelin and Kekaelaeinen 2002), recall and reciprocal rank of one query."""
    dcg = sum(relevant.get(d, 0) / math.log2(i + 2) for i, d in enumerate(found[:10]))
    ideal = sum(g / math.log2(i + 2) for i, g in enumerate(sorted(relevant.values(), reverse=True)[:10]))
    wanted = {d for d, gain in relevant.items() if gain > 0}
    first = next((i + 1 for i, d in enumerate(found[:10]) if d in wanted), None)
    return {
        "ndcg@10": dcg / ideal if ideal else 0.0,
        "recall@10": len(wanted & set(found[:10])) / max(1, len(wanted)),
        "recall@100": len(wanted & set(found[:100])) / max(1, len(wanted)),
        "mrr@10": 1 / first if first else 0.0,
    }


def half_of(queries: dict[str, str], half: str) -> dict[str, str]:
    """All queries, or those whose id's sum is even (`even`) or odd (`odd`): one to choose weights on, one to report."""
    if half == "all":
        return queries
    parity = int(half == "odd")
    return {i: t for i, t in queries.items() if hashlib.sha256(i.encode()).digest()[0] % 2 == parity}


def searcher(r: Retriever, mode: SearchMode) -> Search:
    """Documents by their best passages."""

    def search(text: str) -> list[str]:
        hits = r.search(SearchRequest(text, top_k=fusion.MAX_TOP_K, mode=mode)).hits
        return [h.document_id for h in hits]

    return search


def whole_documents(dataset: Dataset, embedder: Embedder) -> Search:
    """Dense search over documents that are not split but cut, title first."""
    ids: list[str] = []
    index = DenseIndex(embedder.dim)
    for batch in _batches(dataset.documents(), BATCH):
        vectors = embedder.embed_cut([f"{title} {text}".strip() for _, title, text in batch])
        index.add(range(len(ids), len(ids) + len(batch)), vectors)
        ids += [i for i, _, _ in batch]

    def search(text: str) -> list[str]:
        return [ids[k] for k, _ in index.search(embedder.embed_queries([text])[0], DEPTH + 1)]

    return search


def open_dataset(
    dataset: Dataset, embedder: str, cache: Path, threads: int, say: Callable[[str], None], reranker: Path | None = None
) -> Retriever:
    """A retriever that holds the dataset's documents."""
    identity = make_embedder(embedder).identity
    mark = f"{_file_sum(dataset.corpus)} {identity}"
    folder = cache / f"{dataset.name}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    r = Retriever(folder, embedder, threads, reranker=reranker)
    done = 0
    for batch in _batches(dataset.documents(), BATCH):
        sources = tuple(
            SourceFile(f"{i}.txt", text.encode(), i, title or i) for i, title, text in batch if text.strip()
        )
        job = r.ingest(IngestRequest(sources))
        if job.errors:
            raise ValueError(f"{job.errors[0].name}: {job.errors[0].message}")
        done += len(batch)
        say(f"{done} documents")
    return r


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        "eval retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--embedder", help="as the setting of that name")
    p.add_argument("--reranker", type=Path, metavar="FOLDER", help="a cross-encoder that orders the 30 best")
    p.add_argument("dataset", type=Path, nargs="+", metavar="DATASET", help="folders in BEIR's layout")
    p.add_argument("--mode", choices=[m.value for m in SearchMode], help="Default: all three.")
    p.add_argument("--half", choices=["all", "even", "odd"], default="all", help="of the queries, by their ids' sums")
    p.add_argument("--no-split", action="store_true", help="whole documents, cut as MTEB does; dense only")
    p.add_argument("--plain", action="store_true", help="take the questions' diacritics away")
    p.add_argument("--lexical-weight", type=float, nargs="+", help="of the hybrid mode. Default: the built-in one.")
    p.add_argument("--threads", type=int, default=2, help="for embedding")
    p.add_argument("--json", action="store_true", help="end with one JSON line")
    return p


def run_evaluation(
    argv: Sequence[str], resolve: Callable[[str | None], str], cache: Path, say: Callable[[str], None]
) -> int:
    """The command. Args: resolve, what `make_embedder` takes for the embedder asked for; cache, folder of the indexes.

    Raises `ValueError` for a folder that is no dataset.
    """
    args = make_parser().parse_args(argv)
    embedder = resolve(args.embedder)
    rows: list[dict[str, Any]] = []
    head = f"{'ndcg@10':>9}{'recall@10':>11}{'recall@100':>12}{'mrr@10':>8}{'p50 ms':>8}"
    print(f"{'dataset':16}{'mode':10}{'weight':>7}{head}")
    for folder in args.dataset:
        dataset = load_dataset(folder)
        queries = half_of(dataset.queries, args.half)
        if args.plain:
            queries = {i: fold(t) for i, t in queries.items()}
        for mode, weight, search, close in _searches(args, dataset, embedder, cache, say):
            row: dict[str, Any] = {"dataset": dataset.name, "mode": mode, "lexical_weight": weight, "half": args.half}
            row |= evaluate(queries, dataset.qrels, search)
            rows.append(row)
            numbers = "".join(f"{row[k]:{w}.3f}" for k, w in (("ndcg@10", 9), ("recall@10", 11), ("recall@100", 12)))
            print(f"{dataset.name:16}{mode:10}{weight:7.2f}{numbers}{row['mrr@10']:8.3f}{row['p50_ms']:8.1f}")
            close()
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"ndcg@10": rows[-1]["ndcg@10"], "rows": rows}))
    return 0


def _searches(
    args: argparse.Namespace, dataset: Dataset, embedder: str, cache: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, float, Search, Callable[[], None]]]:
    if args.no_split:
        if args.mode not in (None, "dense"):
            raise ValueError(f"--no-split is a dense search, not {args.mode}")
        yield "no-split", 0.0, whole_documents(dataset, make_embedder(embedder, args.threads)), lambda: None
        return
    r = open_dataset(dataset, embedder, cache, args.threads, say, args.reranker)
    modes = [SearchMode(args.mode)] if args.mode else [SearchMode.DENSE, SearchMode.LEXICAL, SearchMode.HYBRID]
    before = fusion.LEXICAL_WEIGHT
    try:
        for mode in modes:
            weights = (
                args.lexical_weight or [before] if mode is SearchMode.HYBRID else [float(mode is SearchMode.LEXICAL)]
            )
            for weight in weights:
                fusion.LEXICAL_WEIGHT = weight
                yield mode.value, weight, searcher(r, mode), lambda: None
    finally:
        fusion.LEXICAL_WEIGHT = before
        r.close()


def _find(folder: Path, *names: str) -> Path:
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise ValueError(f"{folder} holds no {' or '.join(names)} (plain or .gz)")


def _open(file: Path) -> Any:
    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with _open(file) as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as e:
                    raise ValueError(f"{file}, line {number}: no JSON: {e}") from e


def _qrels(file: Path) -> Qrels:
    out: Qrels = defaultdict(dict)
    with _open(file) as f:
        for number, line in enumerate(f, 1):
            parts = line.split()
            if len(parts) != 3 or (number == 1 and not parts[2].lstrip("-").isdigit()):
                if number == 1 or not parts:
                    continue
                raise ValueError(f"{file}, line {number}: not query, document, gain: {line[:80]!r}")
            out[parts[0]][parts[1]] = int(parts[2])
    return {q: gains for q, gains in out.items() if any(g > 0 for g in gains.values())}


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _file_sum(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
