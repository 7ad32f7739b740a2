"""What a reply says about tokens and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine import CacheMode, RequestStats, TokenCounts


def counts_dict(c: TokenCounts) -> dict[str, int]:
    """How tokens were had."""
    return {"prefix_tokens": c.prefix, "linked_tokens": c.linked, "computed_tokens": c.computed}


def usage_dict(stats: Sequence[RequestStats], siblings: Sequence[RequestStats] = ()) -> dict[str, Any]:
    """OpenAI's usage object over all choices of a reply, with what the cache did.

    Args: stats, of the first continuation of each prompt; siblings, of further ones, whose prompt is counted already.
    """
    prompt = sum(s.num_prompt_tokens for s in stats)
    output = sum(s.num_output_tokens for s in (*stats, *siblings))
    counts = TokenCounts(*(sum(getattr(s.counts, k) for s in stats) for k in ("prefix", "linked", "computed")))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": counts.cached, **counts_dict(counts)},
    }


def certified_dict(cache: CacheMode | None) -> dict[str, bool]:
    """What a reply says of an answer that may rest on linked passages: no certificate covers it. Else nothing."""
    return {"certified": False} if cache is CacheMode.LINKED else {}


def timings_dict(stats: RequestStats) -> dict[str, float]:
    """Engine stages in milliseconds."""
    return {
        "queue_ms": round(stats.queue_s * 1e3, 2),
        "prefill_ms": round(stats.prefill_s * 1e3, 2),
        "decode_ms": round(stats.decode_s * 1e3, 2),
    }
