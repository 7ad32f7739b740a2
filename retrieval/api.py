"""Records that cross retrieval's boundary: documents in, hits out. Nothing here imports torch or faiss."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

DEFAULT_COLLECTION = "default"


class StorageFailed(Exception):
    """The disk is full, or the folder or the database cannot be written. Nothing was changed."""


class StoreUnavailable(StorageFailed):
    """The database cannot be reached, or broke off. Nothing was changed; later it may go."""


class Document(msgspec.Struct, frozen=True):
    """One ingested source. It is fully searchable or not there at all."""

    document_id: str
    collection: str
    title: str
    source: str
    """File name or label it came from; never used as a path."""
    metadata: dict[str, Any]
    """The caller's own fields, JSON values."""
    num_passages: int
    num_tokens: int
    """Tokens of all passages, counted by the embedder's tokenizer."""
    content_sha256: str
    created_s: float
    """Unix time of ingest."""
    notes: tuple[str, ...] = ()
    """What the reader should know, such as a page without text."""
    tenant: str = ""
    """Whose it is; no other tenant finds, lists or deletes it."""


class Passage(msgspec.Struct, frozen=True):
    """One stretch of a document that is embedded, found and cited as a whole."""

    passage_id: str
    document_id: str
    text: str
    """The passage itself, exactly as it stands in the document's extracted text."""
    start: int
    """First character in the extracted text of the document."""
    end: int
    """One past the last character."""
    page: int | None = None
    """Page it begins on, from 1, where the source has pages."""
    heading: str = ""
    """Headings above it, outermost first, joined by ' > '."""


class Scores(msgspec.Struct, frozen=True):
    """Where a hit's rank comes from. `dense` is cosine clamped to [0, 1], computed for every fused candidate."""

    dense: float
    lexical: float
    """BM25, 0 where the passage shares no word with the query."""
    fused: float
    rerank: float | None = None
    """The reranker's, 0 to 1; None where no reranker looked at the passage."""


class Twin(msgspec.Struct, frozen=True):
    """Where the same text stands too."""

    document_id: str
    title: str
    passage_id: str


class Hit(msgspec.Struct, frozen=True):
    """A passage found for a query."""

    passage: Passage
    document_id: str
    title: str
    source: str
    score: float
    """Cosine of query and passage, clamped to [0, 1]."""
    scores: Scores
    metadata: dict[str, Any]
    also_in: tuple[Twin, ...] = ()
    """Other candidates with exactly this text, which are not returned themselves."""


class SearchMode(StrEnum):
    """Which index answers."""

    HYBRID = "hybrid"
    DENSE = "dense"
    LEXICAL = "lexical"


class SearchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question to the index."""

    query: str
    collection: str = DEFAULT_COLLECTION
    top_k: int = 5
    filters: dict[str, Any] | None = None
    """Which documents may be found, by their metadata: see filters.py."""
    mode: SearchMode = SearchMode.HYBRID
    min_score: dict[str, float] | None = None
    """Least values of `dense` (cosine), `lexical` (BM25), `fused` or `rerank`; hits below one are not returned."""
    diversity: float = 0.0
    """0: by score alone. Towards 1: a passage counts less the more it resembles one that is returned already."""
    rerank: bool | None = None
    """Let the reranker order the candidates. None: where there is one. True without one is an error."""
    tenant: str = ""
    """Whose documents are searched."""


class SearchResult(msgspec.Struct, frozen=True):
    """Hits, best first, and what each stage took."""

    hits: tuple[Hit, ...]
    embed_ms: float
    search_ms: float
    rerank_ms: float = 0.0
    stages_ms: dict[str, float] = {}
    """Parts of the search that were run: `lexical`, `dense`, `fuse`."""


class EmbedRequest(msgspec.Struct, frozen=True):
    """Texts to turn into vectors, as questions or as passages are."""

    texts: tuple[str, ...]
    is_query: bool = False


class Embeddings(msgspec.Struct, frozen=True):
    """Vectors of texts, or why there are none."""

    num_tokens: tuple[int, ...]
    """Tokens of each text that the model is given, special tokens left out."""
    max_tokens: int
    """Most tokens of one text. Where a text has more, or none at all, nothing was embedded."""
    dim: int
    vectors: bytes
    """Normalised, float32, little-endian, [number of texts, dim]; empty where nothing was embedded."""


class SourceFile(msgspec.Struct, frozen=True):
    """One thing to ingest: a file's bytes with its name, or plain text."""

    name: str
    """File name (its suffix decides the parser) or a label."""
    data: bytes
    document_id: str | None = None
    """Chosen by the caller, else derived from collection and name. Ingesting an id again replaces it."""
    title: str | None = None
    metadata: dict[str, Any] = {}
    media_type: str | None = None
    """Where given, wins over the suffix: `text/plain`, `text/markdown`, `text/html`, `application/pdf`."""


class IngestRequest(msgspec.Struct, frozen=True):
    """A batch of sources for one collection. One bad source does not sink the others."""

    sources: tuple[SourceFile, ...]
    collection: str = DEFAULT_COLLECTION
    tenant: str = ""


class JobState(StrEnum):
    """Where an ingest job stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """Nothing was ingested."""


class SourceError(msgspec.Struct, frozen=True):
    """Why one source was not ingested."""

    name: str
    code: str
    """`unsupported_type`, `no_text`, `bad_encoding`, `bad_document`, `invalid_id`, `storage_failed` or
    `internal_error`."""
    message: str

    @property
    def can_retry(self) -> bool:
        """Whether the source itself may be sound: its bytes are kept for a retry then."""
        return self.code in ("storage_failed", "internal_error")


class Job(msgspec.Struct, frozen=True):
    """An ingest job, as it stands now."""

    job_id: str
    state: JobState
    collection: str
    num_sources: int
    num_done: int
    """Sources finished, well or not."""
    documents: tuple[Document, ...] = ()
    errors: tuple[SourceError, ...] = ()
    tenant: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.state in (JobState.DONE, JobState.FAILED)


class RetrievalStats(msgspec.Struct, frozen=True):
    """Gauges for metrics."""

    num_documents: int
    num_passages: int
    embedder: str
    collections: dict[str, int]
    """Documents in each collection."""
