"""Text in, passages out: parsing, embedding, hybrid search. Importing this package brings records only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrieval.api import (
    DEFAULT_COLLECTION,
    Document,
    Embeddings,
    EmbedRequest,
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
    StorageFailed,
    StoreUnavailable,
    Twin,
)
from retrieval.wire import METHODS, STORE, ById, Call, DocumentsRequest, Failed, FromWorker, Ready, Reply

if TYPE_CHECKING:
    from retrieval.bench import run_bench
    from retrieval.evaluate import run_evaluation
    from retrieval.lexical import fold
    from retrieval.parse import SUPPORTED
    from retrieval.retriever import Retriever

_LAZY = {
    "Retriever": "retrieval.retriever",
    "fold": "retrieval.lexical",
    "SUPPORTED": "retrieval.parse",
    "run_bench": "retrieval.bench",
    "run_evaluation": "retrieval.evaluate",
}

__all__ = [
    "DEFAULT_COLLECTION",
    "METHODS",
    "STORE",
    "SUPPORTED",
    "ById",
    "Call",
    "Document",
    "DocumentsRequest",
    "EmbedRequest",
    "Embeddings",
    "Failed",
    "FromWorker",
    "Hit",
    "IngestRequest",
    "Job",
    "JobState",
    "Passage",
    "Ready",
    "Reply",
    "RetrievalStats",
    "Retriever",
    "Scores",
    "SearchMode",
    "SearchRequest",
    "SearchResult",
    "SourceError",
    "SourceFile",
    "StorageFailed",
    "StoreUnavailable",
    "Twin",
    "fold",
    "run_bench",
    "run_evaluation",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
