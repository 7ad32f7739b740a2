"""Ingest and search over one data folder, in this process. Thread-safe."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from retrieval.api import (
    Document,
    Hit,
    IngestRequest,
    Job,
    JobState,
    Passage,
    RetrievalStats,
    Scores,
    SearchMode,
    SearchRequest,
    SearchResult,
    SourceError,
    SourceFile,
    Twin,
)
from retrieval.dense import FlatIndex, Vectors
from retrieval.embed import make_embedder
from retrieval.filters import compile_filter
from retrieval.lexical import BM25
from retrieval.parse import parse
from retrieval.parsed import Parsed, ParseError
from retrieval.split import Span, split
from retrieval.store import Store

log = logging.getLogger("foreword")

TARGET_TOKENS = 190
"""Length that passages are filled to."""
CONTEXT_TOKENS = 56
"""Most tokens of title and headings that are embedded in front of a passage."""
CANDIDATES = 50
"""Hits taken from each index before they are fused."""
LEXICAL_WEIGHT = 0.25
"""Share of BM25 in the fused score; see README.md, Fusion."""
MAX_TOP_K = 100

Progress = Callable[[int], None]


@dataclass(slots=True)
class _Entry:
    """What a search needs of a passage without asking the store."""

    document_id: str
    text_sum: bytes


@dataclass(slots=True)
class _Index:
    """Both indexes of one collection."""

    dense: FlatIndex
    lexical: BM25 = field(default_factory=BM25)


class Retriever:
    """Documents in, hits out. Use as a context manager.

    Raises `StoreLocked` if another process owns the folder, `EmbedderMismatch` if its vectors are another model's.
    """

    def __init__(self, data_dir: Path, embedder: str | Path, num_threads: int | None = None) -> None:
        self.embedder = make_embedder(embedder, num_threads)
        self._store = Store(data_dir, self.embedder.identity)
        self._lock = threading.RLock()
        self._indexes: dict[str, _Index] = {}
        self._entries: dict[int, _Entry] = {}
        self._documents: dict[str, Document] = {}
        for d in self._store.documents(None, -1, 0):
            self._documents[d.document_id] = d
        for stored in self._store.all_passages():
            self._index(stored.collection, [stored.key], [(stored.passage, stored.context)], stored.vector[None])

    def __enter__(self) -> Retriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back."""
        with self._lock:
            self._store.close()

    def search(self, request: SearchRequest) -> SearchResult:
        """Best passages for a question. Raises `ValueError` naming what is wrong with the request."""
        return self.search_many([request])[0]

    def search_many(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Several searches whose questions are embedded together."""
        for request in requests:
            check_search(request)
        started = time.perf_counter()
        vectors = self.embedder.embed_queries([r.query for r in requests])
        embed_ms = (time.perf_counter() - started) * 1e3
        out = []
        for request, vector in zip(requests, vectors, strict=True):
            started = time.perf_counter()
            hits = self._search(request, vector)
            out.append(SearchResult(tuple(hits), embed_ms, (time.perf_counter() - started) * 1e3))
        return out

    def ingest(self, request: IngestRequest, progress: Progress | None = None, job_id: str = "local") -> Job:
        """Ingest sources one after the other; a bad one is reported and does not sink the others."""
        check_collection(request.collection)
        documents: list[Document] = []
        errors: list[SourceError] = []
        for i, source in enumerate(request.sources):
            try:
                documents.append(self._ingest_one(source, request.collection))
            except ParseError as e:
                errors.append(SourceError(display_name(source.name), e.code, str(e)))
            except Exception as e:  # a fault of ours, or of the embedder, with one source must not lose the others
                log.exception("%s was not ingested", display_name(source.name))
                errors.append(SourceError(display_name(source.name), "internal_error", f"{type(e).__name__}: {e}"))
            if progress:
                progress(i + 1)
        state = JobState.DONE if documents or not errors else JobState.FAILED
        n = len(request.sources)
        return Job(job_id, state, request.collection, n, n, tuple(documents), tuple(errors))

    def documents(self, collection: str | None = None, limit: int = 100, offset: int = 0) -> list[Document]:
        """Records in the order of ingest, of one collection or of all."""
        with self._lock:
            return self._store.documents(collection, limit, offset)

    def document(self, document_id: str) -> Document | None:
        """A document's record."""
        with self._lock:
            return self._documents.get(document_id)

    def passages(self, document_id: str) -> list[Passage]:
        """A document's passages, in order."""
        with self._lock:
            return [self._store.passage(k) for k in self._store.keys_of(document_id)]

    def delete(self, document_id: str) -> bool:
        """Delete a document everywhere; False if there was none."""
        with self._lock:
            document = self._documents.pop(document_id, None)
            if document is None:
                return False
            self._unindex(document.collection, self._store.delete(document_id))
            return True

    def stats(self) -> RetrievalStats:
        """Gauges for metrics."""
        with self._lock:
            collections = self._store.collections()
            return RetrievalStats(len(self._documents), len(self._entries), self.embedder.identity, collections)

    def _ingest_one(self, source: SourceFile, collection: str) -> Document:
        name = display_name(source.name)
        document_id = source.document_id or _derived_id(collection, name)
        check_document_id(document_id)
        content = hashlib.sha256(
            msgspec.msgpack.encode((source.data, name, source.title, source.metadata), order="sorted")
        )
        with self._lock:
            known = self._documents.get(document_id)
        if known is not None and known.collection != collection:
            raise ParseError("invalid_id", f"the id {document_id!r} is taken by a document of {known.collection!r}")
        if known is not None and known.content_sha256 == content.hexdigest():
            return known
        parsed = parse(name, source.data, source.media_type)
        title = source.title or parsed.title or PurePosixPath(name).stem
        passages = self._passages(document_id, title, parsed)
        vectors = self.embedder.embed_passages([context for _, context in passages])
        document = Document(
            document_id=document_id,
            collection=collection,
            title=title,
            source=name,
            metadata=source.metadata,
            num_passages=len(passages),
            num_tokens=sum(self.embedder.count(p.text) for p, _ in passages),
            content_sha256=content.hexdigest(),
            created_s=time.time(),
            notes=parsed.notes,
        )
        with self._lock:
            old = self._store.keys_of(document_id)
            keys = self._store.put(document, parsed.text, passages, vectors)
            self._unindex(collection, old)
            self._documents[document_id] = document
            self._index(collection, keys, passages, vectors)
        return document

    def _passages(self, document_id: str, title: str, parsed: Parsed) -> list[tuple[Passage, str]]:
        room = self.embedder.max_tokens - CONTEXT_TOKENS
        spans = split(parsed, self.embedder.offsets, min(TARGET_TOKENS, room))
        out = []
        for i, span in enumerate(spans):
            text = parsed.text[span.start : span.end]
            passage = Passage(f"{document_id}#{i}", document_id, text, span.start, span.end, span.page, span.heading)
            out.append((passage, self._context(title, span) + text))
        return out

    def _context(self, title: str, span: Span) -> str:
        """Title and headings in the room set aside for them; the outer ones go first, the innermost says most."""
        parts = span.heading.split(" > ") if span.heading else []
        parts = parts if parts and parts[0].startswith(title) else [title, *parts]
        while len(parts) > 1 and self.embedder.count(" > ".join(parts)) > CONTEXT_TOKENS - 4:
            parts.pop(0)
        label = " > ".join(parts)
        offsets = self.embedder.offsets(label)
        if len(offsets) > CONTEXT_TOKENS - 4:
            label = label[: offsets[CONTEXT_TOKENS - 4][0]]
        return label + "\n"

    def _index(
        self, collection: str, keys: list[int], passages: Sequence[tuple[Passage, str]], vectors: Vectors
    ) -> None:
        if collection not in self._indexes:
            self._indexes[collection] = _Index(FlatIndex(self.embedder.dim))
        index = self._indexes[collection]
        index.dense.add(keys, vectors)
        for key, (passage, context) in zip(keys, passages, strict=True):
            index.lexical.add(key, context)
            self._entries[key] = _Entry(passage.document_id, hashlib.sha256(passage.text.encode()).digest())

    def _unindex(self, collection: str, keys: list[int]) -> None:
        if keys:
            self._indexes[collection].dense.remove(keys)
            self._indexes[collection].lexical.remove(keys)
        for key in keys:
            del self._entries[key]

    def _search(self, request: SearchRequest, vector: Vectors) -> list[Hit]:
        with self._lock:
            index = self._indexes.get(request.collection)
            if index is None:
                return []
            allowed = self._allowed(request.collection, request.filters) if request.filters else None
            if allowed is not None and not allowed:
                return []
            limit = max(CANDIDATES, request.top_k)
            lexical, dense = {}, {}
            if request.mode is not SearchMode.DENSE:
                lexical = dict(
                    index.lexical.search(request.query, limit, frozenset(allowed) if allowed is not None else None)
                )
            if request.mode is not SearchMode.LEXICAL:
                dense = dict(index.dense.search(vector, limit, allowed))
            found = list(dict.fromkeys([*dense, *lexical]))
            cosine = dict(zip(found, index.dense.cosines(vector, found), strict=True))
            scores = {
                k: _fuse(request.mode, cosine[k], lexical.get(k, 0.0), max(lexical.values(), default=0)) for k in found
            }
            fits = [k for k in found if _is_good(scores[k], request.min_score or {})]
            twins = self._twins(sorted(fits, key=lambda k: (-scores[k].fused, k)))
            ranked = list(twins)
            if request.diversity and len(ranked) > request.top_k:
                ranked = _diverse(ranked, scores, index.dense.vectors(ranked), request.top_k, request.diversity)
            return [self._hit(k, scores[k], twins[k]) for k in ranked[: request.top_k]]

    def _allowed(self, collection: str, filters: dict[str, Any]) -> list[int]:
        """Keys of passages whose document has every one of these metadata values."""
        test = compile_filter(filters)
        fits = {d.document_id for d in self._documents.values() if d.collection == collection and test(d.metadata)}
        return [key for key, entry in self._entries.items() if entry.document_id in fits]

    def _twins(self, keys: list[int]) -> dict[int, list[int]]:
        """Of passages with equal text the best, in order, with the others."""
        best: dict[bytes, int] = {}
        out: dict[int, list[int]] = {}
        for key in keys:
            first = best.setdefault(self._entries[key].text_sum, key)
            out.setdefault(first, []).extend([key] if key != first else [])
        return out

    def _hit(self, key: int, scores: Scores, twins: list[int]) -> Hit:
        passage = self._store.passage(key)
        d = self._documents[passage.document_id]
        others = [self._store.passage(k) for k in twins]
        also_in = tuple(
            Twin(p.document_id, self._documents[p.document_id].title, p.passage_id)
            for p in others
            if p.document_id != d.document_id
        )
        return Hit(passage, d.document_id, d.title, d.source, scores.dense, scores, d.metadata, also_in)


def _fuse(mode: SearchMode, cosine: float, lexical: float, best_lexical: float) -> Scores:
    dense = min(max(cosine, 0.0), 1.0)
    relative = lexical / best_lexical if best_lexical else 0.0
    fused = {
        SearchMode.DENSE: dense,
        SearchMode.LEXICAL: relative,
        SearchMode.HYBRID: (1 - LEXICAL_WEIGHT) * dense + LEXICAL_WEIGHT * relative,
    }[mode]
    return Scores(dense, lexical, fused)


def _is_good(scores: Scores, least: dict[str, float]) -> bool:
    return all(getattr(scores, name) >= value for name, value in least.items())


def _diverse(ranked: list[int], scores: dict[int, Scores], vectors: Vectors, top_k: int, diversity: float) -> list[int]:
    """Maximal marginal relevance (Carbonell and Goldstein 1998): relevance less likeness to what is taken already."""
    relevance = np.array([scores[k].fused for k in ranked])
    likeness = np.zeros(len(ranked))
    left, taken = list(range(len(ranked))), list[int]()
    while left and len(taken) < top_k:
        at = max(left, key=lambda i: ((1 - diversity) * relevance[i] - diversity * likeness[i], -i))
        left.remove(at)
        taken.append(ranked[at])
        likeness = np.maximum(likeness, vectors @ vectors[at])
    return taken


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
            raise ValueError(f"min_score: there is no score {name!r}; there are dense, lexical and fused")
        if not math.isfinite(least):
            raise ValueError(f"min_score.{name} must be a finite number, got {least}")
    if not 0 <= request.diversity <= 1:
        raise ValueError(f"diversity must be between 0 and 1, got {request.diversity}")


def check_collection(name: str) -> None:
    """Raise `ValueError` unless the name has 1 to 64 letters, digits, dots, dashes or underscores."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(f"collection must have 1 to 64 characters of A-Z a-z 0-9 . _ -, got {name[:80]!r}")


def check_document_id(document_id: str) -> None:
    """Raise `ParseError` (invalid_id) for an id that is empty, over 200 long, or holds a slash or control character."""
    if not 1 <= len(document_id) <= 200 or re.search(r"[\x00-\x1f\x7f/\\]", document_id):
        raise ParseError(
            "invalid_id", f"document id {document_id[:80]!r} is empty, too long, or holds / \\ or control characters"
        )


def display_name(name: str) -> str:
    """The last part of a file name, without control characters: a label, never a path."""
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[\x00-\x1f\x7f]", "", last)[:200] or "unnamed"


def _derived_id(collection: str, name: str) -> str:
    return hashlib.sha256(f"{collection}\0{name}".encode()).hexdigest()[:16]
