"""From candidates to hits: one score of two, equal texts once, diversity; and what a search may ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from retrieval.api import Hit, Scores, SearchMode, SearchRequest, Twin
from retrieval.corpus import Candidate, View
from retrieval.dense import Vectors
from retrieval.filters import compile_filter

LEXICAL_WEIGHT = 0.25
"""Share of BM25 in the fused score; see README.md, Fusion."""
MAX_TOP_K = 100


def fuse(mode: SearchMode, candidates: Sequence[Candidate], baseline: float = 0.0) -> dict[int, Scores]:
    """Scores by key. BM25 is taken relative to the best of the candidates, in hybrid search cosines to `baseline`.

    Args: baseline, the embedder's cosine of texts that have nothing to do with each other.
    """
    best = max((c.lexical for c in candidates), default=0.0)
    return {c.key: _fused(mode, c, c.lexical / best if best else 0.0, baseline) for c in candidates}


def _fused(mode: SearchMode, c: Candidate, relative: float, baseline: float) -> Scores:
    dense = min(max(c.cosine, 0.0), 1.0)
    likeness = max(dense - baseline, 0.0) / (1 - baseline)
    fused = {
        SearchMode.DENSE: dense,
        SearchMode.LEXICAL: relative,
        SearchMode.HYBRID: (1 - LEXICAL_WEIGHT) * likeness + LEXICAL_WEIGHT * relative,
    }[mode]
    return Scores(dense, c.lexical, fused)


def is_good(scores: Scores, least: dict[str, float]) -> bool:
    """Whether every score that a threshold names and that there is already reaches it."""
    values = {name: getattr(scores, name) for name in least}
    return all(v is None or v >= least[name] for name, v in values.items())


def group_twins(keys: Sequence[int], text_sums: dict[int, bytes]) -> dict[int, list[int]]:
    """Of passages with equal text the first, in order, with the others."""
    best: dict[bytes, int] = {}
    out: dict[int, list[int]] = {}
    for key in keys:
        first = best.setdefault(text_sums[key], key)
        out.setdefault(first, []).extend([key] if key != first else [])
    return out


def diversify(relevance: Sequence[float], vectors: Vectors, top_k: int, diversity: float) -> list[int]:
    """Maximal marginal relevance (Carbonell and Goldstein 1998): relevance less likeness to what is taken already.

    Args: relevance, of n passages, the most relevant first; vectors [n, dim]. Returns positions, in the order taken.
    """
    likeness = np.zeros(len(relevance))
    left, taken = list(range(len(relevance))), list[int]()
    while left and len(taken) < top_k:
        at = max(left, key=lambda i: ((1 - diversity) * relevance[i] - diversity * likeness[i], -i))
        left.remove(at)
        taken.append(at)
        likeness = np.maximum(likeness, vectors @ vectors[at])
    return taken


def make_hits(view: View, keys: Sequence[int], scores: dict[int, Scores], twins: dict[int, list[int]]) -> list[Hit]:
    """Hits of passages, with the other documents that hold the same text."""
    wanted = [k for key in keys for k in (key, *twins[key])]
    found = dict(zip(wanted, view.passages(wanted), strict=True))
    out = []
    for key in keys:
        passage, d = found[key]
        others = [found[k] for k in twins[key]]
        also_in = tuple(Twin(o.document_id, o.title, p.passage_id) for p, o in others if o.document_id != d.document_id)
        s = scores[key]
        out.append(Hit(passage, d.document_id, d.title, d.source, s.dense, s, d.metadata, also_in))
    return out


def check_search(request: SearchRequest) -> None:
    """Raise `ValueError`, whose message begins with the field's name, for a search that makes no sense."""
    if not request.query.strip():
        raise ValueError("query must not be empty")
    if not 1 <= request.top_k <= MAX_TOP_K:
        raise ValueError(f"top_k must be between 1 and {MAX_TOP_K}, got {request.top_k}")
    check_collection(request.collection)
    compile_filter(request.filters or {})
    for name, least in (request.min_score or {}).items():
        if name not in Scores.__struct_fields__:
            raise ValueError(f"min_score: there is no score {name!r}; there are dense, lexical, fused and rerank")
        if not math.isfinite(least):
            raise ValueError(f"min_score.{name} must be a finite number, got {least}")
    if not 0 <= request.diversity <= 1:
        raise ValueError(f"diversity must be between 0 and 1, got {request.diversity}")


def check_collection(name: str) -> None:
    """Raise `ValueError` unless the name has 1 to 64 letters, digits, dots, dashes or underscores."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(f"collection must have 1 to 64 characters of A-Z a-z 0-9 . _ -, got {name[:80]!r}")
