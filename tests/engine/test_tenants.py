"""What one scope has computed spares no other scope a token, and a counter says nothing of it (I6)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import VOCAB, make_tiny_model

from engine import LLM, SamplingParams, Segment, SegmentKind

KINDS = (SegmentKind.SYSTEM, SegmentKind.PASSAGE, SegmentKind.PASSAGE, SegmentKind.TAIL)
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(str(make_tiny_model(tmp_path / "tiny")), dtype="float32", kv_cache_tokens=4096, pinned_tokens=256)


def prompt(scope: str, tail: int = 0) -> list[Segment]:
    lengths = (40, 50, 33, 20)
    texts = [tuple((7 * i + n + tail * (kind is SegmentKind.TAIL)) % (VOCAB - 3) for i in range(n))
             for n, kind in zip(lengths, KINDS, strict=True)]  # fmt: skip
    return [Segment(ids, kind, scope) for ids, kind in zip(texts, KINDS, strict=True)]


def test_a_tenant_that_sends_anothers_prompt_finds_nothing_and_its_own_again(llm: LLM) -> None:
    first, again = (llm.generate(prompt("tenant/a"), GREEDY)[0] for _ in range(2))
    other = llm.generate(prompt("tenant/b"), GREEDY)[0]
    other_again = llm.generate(prompt("tenant/b"), GREEDY)[0]
    assert [c.stats.counts.cached for c in (first, other)] == [0, 0]
    assert again.stats.counts == other_again.stats.counts
    assert again.stats.counts.cached >= 123
    assert other.stats.segments == first.stats.segments
    assert other.token_ids == first.token_ids == again.token_ids


def test_in_one_batch_tenants_neither_wait_for_nor_share_with_each_other(llm: LLM) -> None:
    done = llm.generate([prompt("tenant/a"), prompt("tenant/b"), prompt("tenant/a", tail=1)], GREEDY)
    assert done[0].stats.counts.cached == done[1].stats.counts.cached == 0
    assert done[2].stats.counts.cached >= 123, "the same tenant waits for what it has under way"
    llm.core.cache.check_integrity()


def test_what_both_share_is_only_what_was_marked_so(llm: LLM) -> None:
    def mixed(scope: str) -> list[Segment]:
        head, *rest = prompt(scope)
        return [Segment(head.token_ids, head.kind), *rest]

    first, other = (llm.generate(mixed(scope), GREEDY)[0] for scope in ("tenant/a", "tenant/b"))
    assert first.stats.counts.cached == 0
    assert [c.cached for c in other.stats.segments] == [40, 0, 0, 0]
