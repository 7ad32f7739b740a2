"""Messages between a gateway and a retrieval worker, as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from retrieval.api import (
    Document,
    Embeddings,
    EmbedRequest,
    IngestRequest,
    Job,
    Passage,
    RetrievalStats,
    SearchRequest,
    SearchResult,
)

STORE = "FOREWORD_STORE"
"""Variable that tells a worker the URL of a shared store."""


class DocumentsRequest(msgspec.Struct, frozen=True):
    """Which records to list."""

    collections: frozenset[str] | None = None
    """None: all of the tenant's."""
    limit: int = 100
    offset: int = 0
    tenant: str = ""


class ById(msgspec.Struct, frozen=True):
    """A document or a job of a tenant."""

    id: str
    tenant: str = ""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Gateway: run a method; `payload` is its argument, MessagePack."""

    call_id: int
    method: str
    payload: bytes


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker: calls can be made now."""

    stats: RetrievalStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker: it cannot start, and why. It exits after this."""

    error: str


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Worker: a call's result, MessagePack, or its fault."""

    call_id: int
    payload: bytes = b""
    error_type: str | None = None
    """`ValueError` for a bad argument, `StorageFailed`, `StoreUnavailable`; anything else is the worker's own fault."""
    error: str = ""


FromWorker = Ready | Failed | Reply

METHODS: dict[str, tuple[Any, Any]] = {
    "search": (SearchRequest, SearchResult),
    "embed": (EmbedRequest, Embeddings),
    "ingest": (IngestRequest, Job),
    "retry": (ById, Job),
    "job": (ById, Job | None),
    "wait": (ById, Job),
    "documents": (DocumentsRequest, list[Document]),
    "collections": (str, dict[str, int]),
    "document": (ById, Document | None),
    "passages": (ById, list[Passage]),
    "delete": (ById, bool),
    "stats": (type(None), RetrievalStats),
}
"""Method -> type of its argument and of its result."""
