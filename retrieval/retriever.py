"""Ingest and search over one corpus, in this process. Thread-safe."""

from __future__ import annotations

import logging
import time
import unicodedata
import uuid
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import msgspec

from retrieval.api import (
    Document,
    Embeddings,
    EmbedRequest,
    Hit,
    IngestRequest,
    Job,
    JobState,
    Passage,
    RetrievalStats,
    SearchMode,
    SearchRequest,
    SearchResult,
    SourceError,
    StorageFailed,
)
from retrieval.corpus import Corpus
from retrieval.dense import Vectors
from retrieval.embed import Embedder, make_embedder, unrelated_cosine
from retrieval.ingest import MAX_OVERLAP, Ingest, Outcome
from retrieval.local import LocalCorpus
from retrieval.ranking import check_collection, check_search, diversify, fuse, group_twins, is_good, make_hits
from retrieval.rerank import CrossEncoderReranker, Reranker, text_of
from retrieval.stages import Stages

log = logging.getLogger("foreword")

CANDIDATES = 50
"""Hits taken from each index before they are fused."""
RERANKED = 30
"""Hits that a reranker reads: half a second of a small cross-encoder on a CPU."""


class Retriever:
    """Documents in, hits out. Use as a context manager.

    The corpus is one of the folder, or of the database whose URL is `store`. Raises `StoreLocked` if another process
    owns the folder, `EmbedderMismatch` if its vectors are another model's, `StorageFailed` if it cannot be written or
    reached, `ValueError` if the URL is none, the reranker's folder holds none, or the overlap
    (tokens of the passage before that a passage repeats) is out of range.
    """

    def __init__(
        self,
        data_dir: Path,
        embedder: str | Path,
        num_threads: int | None = None,
        store: str = "",
        reranker: Path | None = None,
        overlap: int = 0,
    ) -> None:
        if not 0 <= overlap <= MAX_OVERLAP:
            raise ValueError(f"passage_overlap must be between 0 and {MAX_OVERLAP} tokens, got {overlap}")
        self.embedder = make_embedder(embedder, num_threads)
        self.reranker: Reranker | None = None if reranker is None else CrossEncoderReranker(reranker, num_threads)
        self._baseline: float | None = None
        self._overlap = overlap
        self.is_shared = bool(store)
        """Whether other processes use the same corpus."""
        self._corpus = _open_corpus(data_dir, store, self.embedder)

    def __enter__(self) -> Retriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the corpus back."""
        self._corpus.close()

    def load(self) -> None:
        """Load the models now instead of on first use."""
        self.embedder.load()
        try:
            self._unrelated_cosine()
        except ValueError as e:  # an endpoint that does not answer now may answer the first question
            log.warning("%s", e)
        if self.reranker is not None:
            self.reranker.load()

    def search(self, request: SearchRequest) -> SearchResult:
        """Best passages for a question. Raises `ValueError` naming what is wrong with the request."""
        return self.search_many([request])[0]

    def search_many(self, requests: Sequence[SearchRequest]) -> list[SearchResult]:
        """Several searches whose questions are embedded together."""
        for request in requests:
            self.check(request)
        started = time.perf_counter()
        # As passages are: some tokenizers take composed and decomposed letters for different ones.
        requests = [msgspec.structs.replace(r, query=unicodedata.normalize("NFC", r.query)) for r in requests]
        vectors = self.embedder.embed_queries([r.query for r in requests])
        embed_ms = (time.perf_counter() - started) * 1e3
        return [msgspec.structs.replace(r, embed_ms=embed_ms) for r in self.search_vectors(requests, vectors)]

    def search_vectors(self, requests: Sequence[SearchRequest], vectors: Vectors) -> list[SearchResult]:
        """Several searches whose questions' vectors [n, dim] are known."""
        for request in requests:
            self.check(request)
        return [self._search(request, vector) for request, vector in zip(requests, vectors, strict=True)]

    def check(self, request: SearchRequest) -> None:
        """Raise `ValueError`, whose message begins with the field's name, for a search that makes no sense here."""
        check_search(request)
        if request.rerank and self.reranker is None:
            raise ValueError("rerank: this server has no reranker (setting `reranker`)")
        if "rerank" in (request.min_score or {}) and not self._is_reranked(request):
            raise ValueError("min_score.rerank: this search is not reranked, so no hit has that score")

    def embed(self, request: EmbedRequest) -> Embeddings:
        """Vectors of texts; none of them where one is longer than the model reads, so nothing is cut unseen."""
        e, texts = self.embedder, request.texts
        counts = tuple(e.num_tokens(t, request.is_query) for t in texts)
        if not all(0 < n <= e.max_tokens for n in counts):
            return Embeddings(counts, e.max_tokens, e.dim, b"")
        vectors = e.embed_queries(texts) if request.is_query else e.embed_passages(texts)
        return Embeddings(counts, e.max_tokens, e.dim, vectors.astype("<f4").tobytes())

    def ingest(self, request: IngestRequest) -> Job:
        """Ingest sources at once, as a job that is not kept; a bad one is reported and does not sink the others."""
        check_collection(request.collection)
        job = _new_job(request)
        for outcomes in self._ingest(job).run(request.sources):
            job = _advance(job, outcomes)
        self._corpus.checkpoint()
        return _end(job)

    def submit(self, request: IngestRequest) -> Job:
        """Keep a job for `run_job`; it outlives this process. Raises `StorageFailed` if it cannot be kept."""
        check_collection(request.collection)
        job = _new_job(request)
        self._corpus.add_job(job, request.sources)
        return job

    def run_job(self, job: Job, on_change: Callable[[Job], None]) -> Job:
        """Do what is left of a kept job. Raises `StorageFailed` if it cannot be begun: it stays as it was."""
        job = self._corpus.job(job.tenant, job.job_id) or job
        if job.has_ended:  # between the caller's knowing of it and now
            return job
        sources = self._corpus.job_sources(job.job_id)
        job = msgspec.structs.replace(job, state=JobState.RUNNING)
        at = 0
        for outcomes in self._ingest(job).run(source for _, source in sources):
            positions = [position for position, _ in sources[at : at + len(outcomes)]]
            at += len(outcomes)
            job = _advance(job, outcomes)
            done = [p for p, o in zip(positions, outcomes, strict=True) if isinstance(o, Document) or not o.can_retry]
            self._keep(job, done)
            on_change(job)
        job = _end(job)
        self._keep(job, [])
        on_change(job)
        try:
            self._corpus.checkpoint()
        except StorageFailed as e:  # it only makes later searches and starts faster
            log.error("no checkpoint after job %s: %s", job.job_id, e)
        return job

    def retry_job(self, tenant: str, job_id: str) -> Job:
        """Make an ended job pending again, for the sources that failed for no fault of theirs.

        Raises `ValueError` if there is nothing to retry.
        """
        job = self._corpus.job(tenant, job_id)
        if job is None:
            raise ValueError(f"job_id: there is no job {job_id[:80]!r}")
        left = self._corpus.job_sources(job_id)
        if not job.has_ended or not left:
            why = "has failed in a way that a retry could mend" if job.has_ended else "can be retried while it runs"
            raise ValueError(f"job_id: no source of the job {job_id!r} {why}")
        errors = tuple(e for e in job.errors if not e.can_retry)
        job = msgspec.structs.replace(job, state=JobState.PENDING, num_done=job.num_sources - len(left), errors=errors)
        self._corpus.advance_job(job, [])
        return job

    def job(self, tenant: str, job_id: str) -> Job | None:
        """A kept job as it stands."""
        return self._corpus.job(tenant, job_id)

    def unfinished_jobs(self) -> list[Job]:
        """Jobs that no living process is at."""
        return self._corpus.unfinished_jobs()

    def documents(
        self, collections: Set[str] | None = None, limit: int = 100, offset: int = 0, tenant: str = ""
    ) -> list[Document]:
        """Records in the order of ingest, of some collections or of all."""
        return self._corpus.documents(tenant, collections, limit, offset)

    def document(self, document_id: str, tenant: str = "") -> Document | None:
        """A document's record."""
        return self._corpus.document(tenant, document_id)

    def passages(self, document_id: str, tenant: str = "") -> list[Passage]:
        """A document's passages, in order."""
        return self._corpus.passages_of(tenant, document_id)

    def delete(self, document_id: str, tenant: str = "") -> bool:
        """Delete a document everywhere; False if there was none."""
        return self._corpus.delete(tenant, document_id)

    def collections(self, tenant: str = "") -> dict[str, int]:
        """Documents in each of a tenant's collections."""
        return self._corpus.collections(tenant)

    def stats(self) -> RetrievalStats:
        """Gauges for metrics, over all tenants."""
        num_documents, num_passages = self._corpus.size()
        return RetrievalStats(num_documents, num_passages, self.embedder.identity, self._corpus.collections(None))

    def _ingest(self, job: Job) -> Ingest:
        return Ingest(self._corpus, self.embedder, job.tenant, job.collection, self._overlap)

    def _keep(self, job: Job, done: Sequence[int]) -> None:
        try:
            self._corpus.advance_job(job, done)
        except StorageFailed as e:  # its sources stay, so a later start goes on with it
            log.error("the state of job %s was not kept: %s", job.job_id, e)

    def _search(self, request: SearchRequest, vector: Vectors) -> SearchResult:
        started, stages = time.perf_counter(), Stages()
        least = request.min_score or {}
        baseline = self._unrelated_cosine() if request.mode is SearchMode.HYBRID else 0.0
        with self._corpus.view() as view:
            candidates = view.candidates(request, vector, max(CANDIDATES, request.top_k), stages)
            with stages.time("fuse"):
                scores = fuse(request.mode, candidates, baseline)
                fits = [k for k in scores if is_good(scores[k], least)]
                ranked = sorted(fits, key=lambda k: (-scores[k].fused, k))
                twins = group_twins(ranked, {c.key: c.text_sum for c in candidates})
            ranked = list(twins)[: self._depth(request)]
            hits = make_hits(view, ranked, scores, twins)
            vectors = view.vectors(ranked) if request.diversity else None
        search_ms = (time.perf_counter() - started) * 1e3
        order: Sequence[int] = range(len(hits))
        rerank_ms = 0.0
        if self._is_reranked(request):
            hits = self._rerank(request.query, hits)
            order = sorted(order, key=lambda i: (-_relevance(hits[i]), i))
            order = [i for i in order if is_good(hits[i].scores, least)]
            rerank_ms = (time.perf_counter() - started) * 1e3 - search_ms
        if vectors is not None:
            taken = diversify([_relevance(hits[i]) for i in order], vectors[order], request.top_k, request.diversity)
            order = [order[i] for i in taken]
        return SearchResult(tuple(hits[i] for i in order[: request.top_k]), 0.0, search_ms, rerank_ms, stages.ms)

    def _depth(self, request: SearchRequest) -> int | None:
        """Hits that are looked at after the fusion; None for all."""
        if self._is_reranked(request):
            return max(RERANKED, request.top_k)
        return None if request.diversity else request.top_k

    def _unrelated_cosine(self) -> float:
        if self._baseline is None:
            self._baseline = unrelated_cosine(self.embedder)
        return self._baseline

    def _is_reranked(self, request: SearchRequest) -> bool:
        return self.reranker is not None and request.rerank is not False

    def _rerank(self, query: str, hits: list[Hit]) -> list[Hit]:
        """The hits with the reranker's scores. Outside the view: others may search and write meanwhile."""
        assert self.reranker is not None
        given = self.reranker.scores(query, [text_of(h) for h in hits]) if hits else []
        replace = msgspec.structs.replace
        return [replace(h, scores=replace(h.scores, rerank=s)) for h, s in zip(hits, given, strict=True)]


def _relevance(hit: Hit) -> float:
    return hit.scores.fused if hit.scores.rerank is None else hit.scores.rerank


def _open_corpus(data_dir: Path, store: str, embedder: Embedder) -> Corpus:
    if not store:
        return LocalCorpus(data_dir, embedder.identity, embedder.dim)
    try:
        from retrieval.postgres import PostgresCorpus
    except ImportError as e:
        raise ValueError("store: PostgreSQL needs psycopg: pip install 'foreword[postgres]'") from e
    return PostgresCorpus(store, embedder.identity, embedder.dim)


def _new_job(request: IngestRequest) -> Job:
    n = len(request.sources)
    return Job(uuid.uuid4().hex, JobState.PENDING, request.collection, n, 0, tenant=request.tenant)


def _advance(job: Job, outcomes: Sequence[Outcome]) -> Job:
    documents = tuple(o for o in outcomes if isinstance(o, Document))
    errors = tuple(o for o in outcomes if isinstance(o, SourceError))
    return msgspec.structs.replace(
        job,
        num_done=job.num_done + len(outcomes),
        documents=job.documents + documents,
        errors=job.errors + errors,
    )


def _end(job: Job) -> Job:
    state = JobState.DONE if job.documents or not job.errors else JobState.FAILED
    return msgspec.structs.replace(job, state=state)
