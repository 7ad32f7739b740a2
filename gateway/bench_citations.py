"""Precision and recall of citations on real questions: `python -m gateway.bench_citations --data FOLDER`.

For each question of a set, the sentence of the gold paragraph that holds the answer, shortened as a model would say it,
is offered together with its paragraph and four others (a citation must point into the gold paragraph), and once with
five other paragraphs only (there any citation is wrong). Prints a table by threshold, then one JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

from gateway.citations import cite, sentences
from retrieval import Passage

SETS = ("xquad_en", "xquad_vi")
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    rows = [row for name in SETS for row in measure(args.data / name, name)]
    print(f"{'set':10}{'threshold':>10}{'recall':>8}{'precision':>11}{'false, no gold':>16}")
    for r in rows:
        print(f"{r['set']:10}{r['threshold']:10.1f}{r['recall']:8.3f}{r['precision']:11.3f}{r['false_share']:16.3f}")
    print(json.dumps(rows))


def measure(folder: Path, name: str) -> list[dict[str, Any]]:
    """A row for each threshold."""
    corpus = {str(d["_id"]): d["text"] for d in lines(folder / "corpus.jsonl.gz")}
    qrels = dict(line.split("\t")[:2] for line in (folder / "qrels.tsv").read_text("utf-8").splitlines()[1:])
    rng, cases = random.Random(0), []
    for q in lines(folder / "queries.jsonl.gz"):
        gold = qrels.get(str(q["_id"]))
        answer = q["metadata"]["answers"][0]
        if gold is None or answer not in corpus[gold]:
            continue
        others = rng.sample([i for i in corpus if i != gold], 5)
        cases.append((q["text"], said(corpus[gold], answer, rng), gold, others))
    return [score(name, corpus, cases, t) for t in THRESHOLDS]


def said(paragraph: str, answer: str, rng: random.Random) -> str:
    """The sentence that holds the answer, with a quarter of its other words left out."""
    sentence = next((paragraph[a:b] for a, b in sentences(paragraph) if answer in paragraph[a:b]), answer)
    before, _, after = sentence.partition(answer)
    kept = [" ".join(w for w in part.split() if rng.random() > 0.25) for part in (before, after)]
    return f"{kept[0]} {answer} {kept[1]}".strip()


def score(name: str, corpus: dict[str, str], cases: list[Any], threshold: float) -> dict[str, Any]:
    """Recall, precision, and how often something is cited although the gold paragraph is not there."""
    right = wrong = false = 0
    for question, answer, gold, others in cases:
        with_gold = [Passage(i, i, corpus[i], 0, len(corpus[i])) for i in (*others[:2], gold, *others[2:4])]
        found = {c.passage.passage_id for c in cite(answer, question, with_gold, threshold)}
        right += gold in found
        wrong += bool(found - {gold})
        without = [Passage(i, i, corpus[i], 0, len(corpus[i])) for i in others]
        false += bool(cite(answer, question, without, threshold))
    n = len(cases)
    precision = right / (right + wrong) if right + wrong else 1.0
    return {
        "set": name,
        "threshold": threshold,
        "n": n,
        "recall": round(right / n, 4),
        "precision": round(precision, 4),
        "false_share": round(false / n, 4),
    }


def lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a .jsonl.gz file."""
    with gzip.open(file, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


if __name__ == "__main__":
    main()
