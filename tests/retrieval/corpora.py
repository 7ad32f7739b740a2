"""Small documents with vectors that words decide, for tests of what keeps and finds passages."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.api import Document, Passage, SearchMode, SearchRequest
from retrieval.corpus import Corpus
from retrieval.dense import Vectors
from retrieval.local import LocalCorpus

DIM = 48


def vector_of(text: str) -> Vectors:
    """Sum of a fixed random direction per word, normalised: texts that share words are near."""
    total = np.zeros(DIM, np.float32)
    for word in text.lower().split():
        total += np.random.default_rng(zlib.crc32(word.strip(".,?").encode())).normal(size=DIM).astype(np.float32)
    return total / max(float(np.linalg.norm(total)), 1e-9)


def put(
    corpus: Corpus, document_id: str, *texts: str, collection: str = "default", tenant: str = "", **metadata: Any
) -> Document:
    passages = [
        (Passage(f"{document_id}#{i}", document_id, text, 0, len(text)), f"{document_id}\n{text}")
        for i, text in enumerate(texts)
    ]
    document = Document(
        document_id,
        collection,
        document_id.title(),
        f"{document_id}.txt",
        metadata,
        len(texts),
        9,
        "0" * 64,
        1.5,
        tenant=tenant,
    )
    vectors = np.stack([vector_of(t) for t in texts]) if texts else np.zeros((0, DIM), np.float32)
    corpus.put(document, "\n".join(texts), passages, vectors)
    return document


def found(corpus: Corpus, query: str, limit: int = 50, **request: Any) -> list[str]:
    """Texts of the candidates, nearest first, of equal cosine by BM25."""
    with corpus.view() as view:
        candidates = view.candidates(SearchRequest(query, **request), vector_of(query), limit)
        if request.get("mode") is SearchMode.LEXICAL:
            candidates.sort(key=lambda c: (-c.lexical, c.key))
        else:
            candidates.sort(key=lambda c: (-c.cosine, c.key))
        return [p.text for p, _ in view.passages([c.key for c in candidates])]


def open_local(folder: Path, embedder: str = "words") -> LocalCorpus:
    return LocalCorpus(folder, embedder, DIM)
