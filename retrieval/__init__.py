"""Text in, passages out: parsing, embedding, hybrid search. Importing this package brings records only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrieval.api import (
    DEFAULT_COLLECTION,
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
)
from retrieval.wire import METHODS, Call, DocumentsRequest, Failed, FromWorker, Ready, Reply

if TYPE_CHECKING:
    from retrieval.retriever import Retriever

__all__ = [
    "DEFAULT_COLLECTION",
    "METHODS",
    "Call",
    "Document",
    "DocumentsRequest",
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
]


def __getattr__(name: str) -> Any:
    if name != "Retriever":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from retrieval.retriever import Retriever

    return Retriever
