"""From sources to stored documents: parse, split, embed many at once, store each whole."""

from __future__ import annotations

import hashlib
import logging
import re
import time
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

import msgspec
import numpy as np

from retrieval.api import Document, Passage, SourceError, SourceFile, StorageFailed
from retrieval.corpus import Corpus
from retrieval.embed import Embedder
from retrieval.parse import parse
from retrieval.parsed import Parsed, ParseError
from retrieval.split import Span, split

log = logging.getLogger("foreword")

TARGET_TOKENS = 190
"""Length that passages are filled to, overlap included."""
MAX_OVERLAP = 64
"""Most tokens of the passage before that a passage may repeat."""
CONTEXT_TOKENS = 56
"""Most tokens of title and headings that are embedded in front of a passage."""
GROUP = 64
"""Passages, and sources, that are embedded and reported together: small documents fill the embedder's batches too."""

Outcome = Document | SourceError


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document that lacks its vectors."""

    document: Document
    text: str
    passages: list[tuple[Passage, str]]


class Ingest:
    """Ingests into one collection of one tenant."""

    def __init__(self, corpus: Corpus, embedder: Embedder, tenant: str, collection: str, overlap: int = 0) -> None:
        self._corpus = corpus
        self._embedder = embedder
        self._tenant = tenant
        self._collection = collection
        self._overlap = overlap

    def run(self, sources: Iterable[SourceFile]) -> Iterator[list[Outcome]]:
        """Outcomes of the sources, in order, a group at a time. A bad source does not sink the others."""
        group: list[tuple[str, _Prepared | Outcome]] = []
        room = GROUP
        for source in sources:
            item = self._prepare(source)
            group.append((display_name(source.name), item))
            room -= len(item.passages) if isinstance(item, _Prepared) else 1
            if room <= 0:
                yield self._store(group)
                group, room = [], GROUP
        if group:
            yield self._store(group)

    def _prepare(self, source: SourceFile) -> _Prepared | Outcome:
        name = display_name(source.name)
        try:
            return self._parse(source, name)
        except ParseError as e:
            return SourceError(name, e.code, str(e))
        except RecursionError:
            return SourceError(name, "bad_document", f"{name} is nested too deeply")
        except Exception as e:  # a fault of ours with one source must not lose the others
            return _internal_error(name, e)

    def _parse(self, source: SourceFile, name: str) -> _Prepared | Document:
        document_id = derived_id(self._collection, name) if source.document_id is None else source.document_id
        check_document_id(document_id)
        content = hashlib.sha256(
            msgspec.msgpack.encode((source.data, name, source.title, source.metadata), order="sorted")
            + (msgspec.msgpack.encode(self._overlap) if self._overlap else b"")
        )
        known = self._corpus.document(self._tenant, document_id)
        if known is not None and known.collection != self._collection:
            raise ParseError("invalid_id", f"the id {document_id!r} is taken by a document of another collection")
        if known is not None and known.content_sha256 == content.hexdigest():
            return known
        parsed = parse(name, source.data, source.media_type)
        title = unicodedata.normalize("NFC", source.title or parsed.title or PurePosixPath(name).stem)
        passages = self._passages(document_id, title, parsed)
        document = Document(
            document_id=document_id,
            collection=self._collection,
            title=title,
            source=name,
            metadata=source.metadata,
            num_passages=len(passages),
            num_tokens=sum(self._embedder.count(p.text) for p, _ in passages),
            content_sha256=content.hexdigest(),
            created_s=time.time(),
            notes=parsed.notes,
            tenant=self._tenant,
        )
        return _Prepared(document, parsed.text, passages)

    def _store(self, group: list[tuple[str, _Prepared | Outcome]]) -> list[Outcome]:
        waiting = [p for _, p in group if isinstance(p, _Prepared)]
        try:
            contexts = [context for p in waiting for _, context in p.passages]
            vectors = self._embedder.embed_passages(contexts) if contexts else np.zeros((0, self._embedder.dim), "f4")
        except Exception as e:  # the embedder failed: find out with which of them
            if len(group) == 1:
                return [_internal_error(group[0][0], e)]
            return [outcome for item in group for outcome in self._store([item])]
        out: list[Outcome] = []
        at = 0
        for name, item in group:
            if not isinstance(item, _Prepared):
                out.append(item)
                continue
            part, at = vectors[at : at + len(item.passages)], at + len(item.passages)
            try:
                self._corpus.put(item.document, item.text, item.passages, part)
                out.append(item.document)
            except StorageFailed as e:
                out.append(SourceError(name, "storage_failed", str(e)))
        return out

    def _passages(self, document_id: str, title: str, parsed: Parsed) -> list[tuple[Passage, str]]:
        room = self._embedder.max_tokens - CONTEXT_TOKENS
        spans = split(parsed, self._embedder.offsets, min(TARGET_TOKENS, room), self._overlap)
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
        while len(parts) > 1 and self._embedder.count(" > ".join(parts)) > CONTEXT_TOKENS - 4:
            parts.pop(0)
        label = " > ".join(parts)
        offsets = self._embedder.offsets(label)
        if len(offsets) > CONTEXT_TOKENS - 4:
            label = label[: offsets[CONTEXT_TOKENS - 4][0]]
        return label + "\n"


def check_document_id(document_id: str) -> None:
    """Raise `ParseError` (invalid_id) for an id that could not stand in a URL, or is empty or over 200 long."""
    is_step = document_id in (".", "..")  # which clients take out of a URL
    if is_step or not 1 <= len(document_id) <= 200 or re.search(r"[\x00-\x1f\x7f/\\]", document_id):
        raise ParseError(
            "invalid_id",
            f"document id {document_id[:80]!r} is empty, too long, . or .., or holds / \\ or control characters",
        )


def display_name(name: str) -> str:
    """The last part of a file name, without control characters: a label, never a path."""
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[\x00-\x1f\x7f]", "", last)[:200] or "unnamed"


def derived_id(collection: str, name: str) -> str:
    """Id of a document that was given none."""
    return hashlib.sha256(f"{collection}\0{name}".encode()).hexdigest()[:16]


def _internal_error(name: str, e: Exception) -> SourceError:
    # Neither the name, which may be a title, nor the fault's own words: they may hold text of the document.
    log.error("a source was not ingested: %s\n%s", type(e).__name__, "".join(traceback.format_tb(e.__traceback__)))
    return SourceError(name, "internal_error", f"{type(e).__name__}: {e}")
