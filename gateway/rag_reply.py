"""What a reply says about passages: sources, citations, what was dropped, and what each kind of text cost."""

from __future__ import annotations

from typing import Any

from engine import RequestStats, SegmentKind
from gateway.citations import Citation
from gateway.prompt import Prompt
from gateway.usage import counts_dict
from retrieval import Hit


def source_dict(hit: Hit, prompt: Prompt, stats: RequestStats | None) -> dict[str, Any]:
    """A hit; without `stats`, before the end, nothing is known of the cache."""
    rerank = hit.scores.rerank
    return {
        "document_id": hit.document_id,
        "passage_id": hit.passage.passage_id,
        "title": hit.title,
        "source": hit.source,
        "page": hit.passage.page,
        "heading": hit.passage.heading,
        "text": hit.passage.text,
        "span": [hit.passage.start, hit.passage.end],
        "score": round(hit.score, 4),
        "scores": {
            "dense": round(hit.scores.dense, 4),
            "lexical": round(hit.scores.lexical, 4),
            "fused": round(hit.scores.fused, 4),
            "rerank": None if rerank is None else round(rerank, 4),
        },
        "metadata": hit.metadata,
        "also_in": [{"document_id": t.document_id, "title": t.title} for t in hit.also_in],
        "used": hit.passage.passage_id in prompt.passage_ids,
        "cache": _cache_of(hit, prompt, stats),
    }


def citation_dict(c: Citation, hits: tuple[Hit, ...]) -> dict[str, Any]:
    """A citation, numbered as its source is."""
    number, hit = next((i + 1, h) for i, h in enumerate(hits) if h.passage.passage_id == c.passage.passage_id)
    return {
        "number": number,
        "document_id": hit.document_id,
        "passage_id": c.passage.passage_id,
        "title": hit.title,
        "page": c.passage.page,
        "span": [c.start, c.end],
        "text": c.text,
        "score": round(c.score, 4),
        "answer_span": [c.answer_start, c.answer_end],
    }


def dropped_dicts(prompt: Prompt) -> list[dict[str, Any]]:
    """Passages that were found and are not in the prompt, and why."""
    return [{"passage_id": d.passage_id, "reason": "token_budget", "num_tokens": d.num_tokens} for d in prompt.dropped]


def tokens_by_kind(prompt: Prompt, stats: RequestStats | None) -> dict[str, dict[str, int]]:
    """How the tokens of each kind of segment were had."""
    out: dict[str, dict[str, int]] = {}
    for segment, counts in zip(prompt.segments, stats.segments if stats else (), strict=False):
        of_kind = out.setdefault(segment.kind.value, {})
        for name, n in counts_dict(counts).items():
            of_kind[name] = of_kind.get(name, 0) + n
    return out


def _cache_of(hit: Hit, prompt: Prompt, stats: RequestStats | None) -> dict[str, int] | None:
    """What the cache did for a passage; None before the end, and for a passage that is not in the prompt."""
    ids = prompt.passage_ids
    if stats is None or hit.passage.passage_id not in ids:
        return None
    # A kept conversation holds passages of earlier turns as well; this turn's are the last ones.
    own = [c for c, s in zip(stats.segments, prompt.segments, strict=True) if s.kind is SegmentKind.PASSAGE]
    return counts_dict(own[-len(ids) :][ids.index(hit.passage.passage_id)])
