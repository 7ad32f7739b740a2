"""Retrieval quality on real question sets: `python -m retrieval.bench --data FOLDER --embedder FOLDER [--sets ...]`.

Each set is a folder with corpus.jsonl.gz, queries.jsonl.gz and qrels.tsv (BEIR's layout). Prints a table of nDCG@10 and
hit@1 by search mode and lexical weight, then one JSON line. `+plain`: the questions' diacritics are removed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from retrieval import retriever
from retrieval.api import IngestRequest, SearchMode, SearchRequest, SourceFile
from retrieval.lexical import fold
from retrieval.retriever import Retriever

Qrels = dict[str, dict[str, int]]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["xquad_en", "xquad_vi", "scifact"])
    parser.add_argument("--weights", nargs="+", type=float, default=[retriever.LEXICAL_WEIGHT])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sets:
            with Retriever(Path(folder) / name, args.embedder) as r:
                _ingest(r, args.data / name)
                rows += _measure(r, args.data / name, name, args.weights)
    print(f"{'set':18}{'mode':10}{'weight':>8}{'nDCG@10':>10}{'hit@1':>8}")
    for row in rows:
        print(f"{row['set']:18}{row['mode']:10}{row['weight']:8.2f}{row['ndcg']:10.3f}{row['hit1']:8.3f}")
    print(json.dumps(rows))


def _ingest(r: Retriever, folder: Path) -> None:
    docs = _lines(folder / "corpus.jsonl.gz")
    sources = tuple(
        SourceFile(f"{d['_id']}.txt", d["text"].encode(), str(d["_id"]), d.get("title") or str(d["_id"])) for d in docs
    )
    job = r.ingest(IngestRequest(sources))
    assert not job.errors, job.errors[:3]


def _measure(r: Retriever, folder: Path, name: str, weights: list[float]) -> list[dict[str, Any]]:
    qrels = _qrels(folder / "qrels.tsv")
    queries = {str(q["_id"]): q["text"] for q in _lines(folder / "queries.jsonl.gz") if str(q["_id"]) in qrels}
    rows = []
    for label, texts in ((name, queries), (f"{name}+plain", {i: fold(t) for i, t in queries.items()})):
        if label.endswith("+plain") and not name.endswith("_vi"):
            continue
        runs = [(SearchMode.DENSE, 0.0), (SearchMode.LEXICAL, 1.0), *((SearchMode.HYBRID, w) for w in weights)]
        for mode, weight in runs:
            retriever.LEXICAL_WEIGHT = weight
            ndcg, hit1 = _score(r, mode, texts, qrels)
            rows.append({"set": label, "mode": mode.value, "weight": weight, "ndcg": ndcg, "hit1": hit1})
    return rows


def _score(r: Retriever, mode: SearchMode, queries: dict[str, str], qrels: Qrels) -> tuple[float, float]:
    gains, firsts = [], []
    ids = list(queries)
    for at in range(0, len(ids), 64):
        batch = ids[at : at + 64]
        results = r.search_many([SearchRequest(queries[i], top_k=30, mode=mode) for i in batch])
        for query_id, result in zip(batch, results, strict=True):
            found = list(dict.fromkeys(h.document_id for h in result.hits))[:10]
            gains.append(_ndcg(found, qrels[query_id]))
            firsts.append(bool(found) and qrels[query_id].get(found[0], 0) > 0)
    return sum(gains) / len(gains), sum(firsts) / len(firsts)


def _ndcg(found: list[str], relevant: dict[str, int]) -> float:
    dcg = sum(relevant.get(d, 0) / math.log2(i + 2) for i, d in enumerate(found))
    ideal = sum(g / math.log2(i + 2) for i, g in enumerate(sorted(relevant.values(), reverse=True)[:10]))
    return dcg / ideal if ideal else 0.0


def _lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def _qrels(file: Path) -> Qrels:
    out: Qrels = defaultdict(dict)
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        query, doc, gain = line.split("\t")
        out[query][doc] = int(gain)
    return out


if __name__ == "__main__":
    main()
