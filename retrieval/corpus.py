"""What keeps and finds passages: the interface that SQLite with FAISS (local.py) and PostgreSQL (postgres.py) share.

`Retriever` makes passages and ranks hits; a corpus stores them and finds candidates. One suite of tests runs over both.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from retrieval.api import Document, Job, Passage, SearchRequest, SourceFile
from retrieval.dense import Vectors

MAX_JOBS = 1000
"""Ended jobs that can still be asked about."""


class StoreLocked(Exception):
    """Another process owns this data folder."""


class EmbedderMismatch(Exception):
    """The stored vectors were made by another embedder."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A passage that one of the indexes found."""

    key: int
    cosine: float
    lexical: float
    """BM25; 0 where the lexical index did not find it."""
    text_sum: bytes
    """Digest of its text: equal texts are shown once."""


class View(Protocol):
    """One consistent state of a corpus: whole documents only, and the same ones for every call."""

    def candidates(self, request: SearchRequest, vector: Vectors, limit: int) -> list[Candidate]:
        """The `limit` nearest and the `limit` best by words, as the request's mode, filters and tenant say."""

    def vectors(self, keys: Sequence[int]) -> Vectors:
        """Vectors [n, dim] of passages."""

    def passages(self, keys: Sequence[int]) -> list[tuple[Passage, Document]]:
        """Passages with their documents, in the order of the keys."""


class Corpus(Protocol):
    """Owner of all that was ingested. Thread-safe. Every method that writes raises `StorageFailed`."""

    def close(self) -> None:
        """Give it back."""

    def view(self) -> AbstractContextManager[View]:
        """Look at one state of the corpus."""

    def put(self, document: Document, text: str, passages: Sequence[tuple[Passage, str]], vectors: Vectors) -> None:
        """Store a document in place of any of the same tenant and id; at once searchable, whole.

        Args: passages, each with the text that is indexed (title, headings and text); vectors [n, dim], normalised.
        """

    def delete(self, tenant: str, document_id: str) -> bool:
        """Delete a document everywhere; False if there was none."""

    def document(self, tenant: str, document_id: str) -> Document | None:
        """A document's record."""

    def documents(self, tenant: str, collections: Set[str] | None, limit: int, offset: int) -> list[Document]:
        """A tenant's records in the order of ingest, of some collections or of all. A negative limit is none."""

    def passages_of(self, tenant: str, document_id: str) -> list[Passage]:
        """A document's passages, in order."""

    def collections(self, tenant: str | None) -> dict[str, int]:
        """Documents in each collection, of one tenant or of all."""

    def size(self) -> tuple[int, int]:
        """Documents and passages of all tenants."""

    def checkpoint(self) -> None:
        """Called after much was ingested: time to write what makes the next start fast."""

    def add_job(self, job: Job, sources: Sequence[SourceFile]) -> None:
        """Keep a job and what it has to ingest, so that it outlives this process."""

    def advance_job(self, job: Job, done: Sequence[int]) -> None:
        """Keep a job's new state and forget its sources at these positions.

        Beyond `MAX_JOBS` the oldest ended jobs are forgotten.
        """

    def job(self, tenant: str, job_id: str) -> Job | None:
        """A job as it stands."""

    def job_sources(self, job_id: str) -> list[tuple[int, SourceFile]]:
        """What a job has not dealt with, and after its end what can be retried."""

    def unfinished_jobs(self) -> list[Job]:
        """Jobs that no other living process is at, oldest first: left behind, or this one's own."""
