"""Passages that begin with the end of the one before them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import IngestRequest, Retriever, SourceFile
from retrieval.embed import Embedder, SentenceTransformerEmbedder
from retrieval.parse import parse
from retrieval.split import split


@pytest.fixture(scope="module")
def embedder(embedder_path: Path) -> Embedder:
    return SentenceTransformerEmbedder(embedder_path, 1)


def passages(embedder: Embedder, source: str, limit: int, overlap: int) -> list[str]:
    parsed = parse("a.md", source.encode())
    return [parsed.text[s.start : s.end] for s in split(parsed, embedder.offsets, limit, overlap)]


SENTENCES = "One is red. Two is blue. Three is pink. Four is grey. Five is gold. Six is lime."


def test_a_passage_begins_with_the_last_sentences_of_the_one_before(embedder: Embedder) -> None:
    assert passages(embedder, SENTENCES, 15, 5) == [
        "One is red. Two is blue.",
        "Two is blue. Three is pink. Four is grey.",
        "Four is grey. Five is gold. Six is lime.",
    ]


def test_where_no_sentence_fits_it_begins_with_the_last_words(embedder: Embedder) -> None:
    assert passages(embedder, "one two three four five six seven eight nine ten", 6, 2) == [
        "one two three four",
        "three four five six seven eight",
        "seven eight nine ten",
    ]


def test_nothing_is_repeated_below_another_heading(embedder: Embedder) -> None:
    found = passages(embedder, f"# One\n\n{SENTENCES}\n\n# Two\n\nSeven is teal. Eight is tan.", 40, 8)
    assert found[-1].startswith("# Two")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab. \nđ中", max_size=120), max_size=8), st.integers(5, 40), st.data())
def test_repeating_loses_nothing_and_keeps_the_limit(
    embedder: Embedder, parts: list[str], limit: int, data: st.DataObject
) -> None:
    source = "\n\n".join(parts)
    if not source.strip():
        return
    overlap = data.draw(st.integers(1, limit // 2))
    parsed = parse("a.txt", source.encode())
    spans = split(parsed, embedder.offsets, limit, overlap)
    assert all(s.num_tokens <= limit and embedder.count(parsed.text[s.start : s.end]) == s.num_tokens for s in spans)
    assert all(a.start <= b.start and a.end < b.end for a, b in pairwise(spans))
    gaps = [parsed.text[a.end : b.start] for a, b in pairwise(spans) if a.end < b.start]
    assert not "".join(gaps).strip()
    plain = split(parsed, embedder.offsets, limit - overlap)
    assert [s.end for s in spans] == [s.end for s in plain]


def test_the_setting_takes_hold_when_a_document_is_ingested_again(tmp_path: Path, embedder_path: Path) -> None:
    request = IngestRequest((SourceFile("a.txt", (SENTENCES * 12).encode(), "a"),))
    counts = []
    for overlap in (0, 40, 40):
        with Retriever(tmp_path, embedder_path, 1, overlap=overlap) as r:
            r.ingest(request)
            (document,) = r.documents()
            counts.append((document.num_tokens, document.created_s))
    assert counts[1][0] > counts[0][0]
    assert counts[2] == counts[1]


@pytest.mark.parametrize("overlap", [-1, 65])
def test_a_senseless_overlap_is_refused(tmp_path: Path, embedder_path: Path, overlap: int) -> None:
    with pytest.raises(ValueError, match=f"passage_overlap must be between 0 and 64 tokens, got {overlap}"):
        Retriever(tmp_path, embedder_path, 1, overlap=overlap)
