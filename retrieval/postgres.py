"""A corpus in PostgreSQL with pgvector, shared by several gateways: one truth, searched there (postgres_view.py).

Its tables live in the schema `foreword`. A document is replaced in one transaction; which process is at which job is
said by advisory locks, which end with the process.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import LiteralString

import msgspec
from psycopg.sql import SQL, Identifier

from retrieval.api import Document, Job, JobState, Passage, SourceFile, StorageFailed
from retrieval.corpus import MAX_JOBS, EmbedderMismatch
from retrieval.dense import Vectors
from retrieval.filters_sql import clean_text, jsonb
from retrieval.lexical import passage_terms
from retrieval.local import text_sum
from retrieval.postgres_db import Connection, Database
from retrieval.postgres_view import ALL_WORDS_LIMIT, EXACT_LIMIT, PostgresView, quoted, vector_text

MAX_HNSW_DIM = 2000
"""Most dimensions that pgvector's graph takes."""
_SCHEMA: LiteralString = """
CREATE EXTENSION IF NOT EXISTS vector;
CREATE SCHEMA IF NOT EXISTS foreword;
CREATE TABLE IF NOT EXISTS foreword.meta (key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE IF NOT EXISTS foreword.documents (serial bigserial PRIMARY KEY, tenant text NOT NULL,
    collection text NOT NULL, document_id text NOT NULL, record bytea NOT NULL, metadata jsonb NOT NULL,
    text bytea NOT NULL, UNIQUE (tenant, document_id));
CREATE INDEX IF NOT EXISTS documents_of_collection ON foreword.documents (tenant, collection, serial);
CREATE TABLE IF NOT EXISTS foreword.passages (key bigserial PRIMARY KEY,
    serial bigint NOT NULL REFERENCES foreword.documents ON DELETE CASCADE,
    tenant text NOT NULL, collection text NOT NULL, record bytea NOT NULL, text_sum bytea NOT NULL,
    length integer NOT NULL, words tsvector NOT NULL, vector vector({dim}) NOT NULL);
CREATE INDEX IF NOT EXISTS passages_of_document ON foreword.passages (serial);
CREATE INDEX IF NOT EXISTS passages_of_collection ON foreword.passages (tenant, collection);
CREATE INDEX IF NOT EXISTS passages_by_word ON foreword.passages USING gin (words);
CREATE TABLE IF NOT EXISTS foreword.totals (tenant text, collection text, documents bigint NOT NULL,
    passages bigint NOT NULL, length bigint NOT NULL, PRIMARY KEY (tenant, collection));
CREATE TABLE IF NOT EXISTS foreword.jobs (serial bigserial PRIMARY KEY, job_id text NOT NULL UNIQUE,
    tenant text NOT NULL, state text NOT NULL, record bytea NOT NULL);
CREATE TABLE IF NOT EXISTS foreword.job_sources (
    job_id text NOT NULL REFERENCES foreword.jobs (job_id) ON DELETE CASCADE,
    position integer NOT NULL, source bytea NOT NULL, PRIMARY KEY (job_id, position));
"""


class PostgresCorpus:
    """`Corpus` in a database, whose URL is `postgresql://user:password@host:port/database`.

    Raises `ValueError` if that is no such URL, `EmbedderMismatch` if its vectors are another model's, `StorageFailed`
    if it cannot be reached or lacks pgvector.
    """

    def __init__(self, url: str, embedder: str, dim: int) -> None:
        self._db = Database(url)
        self._dim = dim
        try:
            self._prepare(embedder)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close all connections, which lets go of the jobs."""
        self._db.close()

    @contextmanager
    def view(self) -> Iterator[PostgresView]:
        """One snapshot of the database."""
        with self._db.transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY") as db:
            db.execute("SET LOCAL hnsw.iterative_scan = relaxed_order")
            yield PostgresView(db, self._dim)

    def put(self, document: Document, text: str, passages: Sequence[tuple[Passage, str]], vectors: Vectors) -> None:
        """Store a document in place of any of the same tenant and id."""
        encode = msgspec.msgpack.encode
        d = document
        with self._db.transaction() as db:
            _lock_document(db, d.tenant, d.document_id)
            _remove(db, d.tenant, d.document_id)
            row = (d.tenant, d.collection, d.document_id, encode(d), jsonb(d.metadata), text.encode())
            sql: LiteralString = (
                "INSERT INTO foreword.documents (tenant, collection, document_id, record, metadata, text)"
                " VALUES (%s, %s, %s, %s, %s, %s) RETURNING serial"
            )
            (serial,) = db.execute(sql, row).fetchone() or (0,)
            rows, total = [], 0
            for (passage, context), vector in zip(passages, vectors, strict=True):
                counts, length = passage_terms(context)
                total += length
                about = (encode(passage), text_sum(passage.text), length, _words(counts), vector_text(vector))
                rows.append((serial, d.tenant, d.collection, *about))
            sql = (
                "INSERT INTO foreword.passages (serial, tenant, collection, record, text_sum, length, words, vector)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s::tsvector, %s::vector)"
            )
            with db.cursor() as cursor:
                cursor.executemany(sql, rows)
            _count(db, d.tenant, d.collection, 1, len(rows), total)

    def delete(self, tenant: str, document_id: str) -> bool:
        """Delete a document everywhere; False if there was none."""
        with self._db.transaction() as db:
            _lock_document(db, tenant, document_id)
            return _remove(db, tenant, document_id)

    def document(self, tenant: str, document_id: str) -> Document | None:
        """A document's record."""
        with self._db.transaction() as db:
            sql: LiteralString = "SELECT record FROM foreword.documents WHERE tenant = %s AND document_id = %s"
            row = db.execute(sql, (tenant, clean_text(document_id))).fetchone()
        return msgspec.msgpack.decode(row[0], type=Document) if row else None

    def documents(self, tenant: str, collections: Set[str] | None, limit: int, offset: int) -> list[Document]:
        """A tenant's records in the order of ingest."""
        sql: LiteralString = (
            "SELECT record FROM foreword.documents WHERE tenant = %s AND (%s::text[] IS NULL OR collection = ANY (%s))"
            " ORDER BY serial LIMIT %s OFFSET %s"
        )
        names = None if collections is None else [clean_text(c) for c in collections]
        with self._db.transaction() as db:
            rows = db.execute(sql, (tenant, names, names, None if limit < 0 else limit, offset)).fetchall()
        return [msgspec.msgpack.decode(record, type=Document) for (record,) in rows]

    def passages_of(self, tenant: str, document_id: str) -> list[Passage]:
        """A document's passages, in order."""
        sql: LiteralString = (
            "SELECT p.record FROM foreword.passages p JOIN foreword.documents d USING (serial)"
            " WHERE d.tenant = %s AND d.document_id = %s ORDER BY p.key"
        )
        with self._db.transaction() as db:
            rows = db.execute(sql, (tenant, clean_text(document_id))).fetchall()
        return [msgspec.msgpack.decode(record, type=Passage) for (record,) in rows]

    def collections(self, tenant: str | None) -> dict[str, int]:
        """Documents in each collection."""
        sql: LiteralString = (
            "SELECT collection, sum(documents)::bigint FROM foreword.totals"
            " WHERE (%s::text IS NULL OR tenant = %s) GROUP BY collection HAVING sum(documents) > 0 ORDER BY collection"
        )
        with self._db.transaction() as db:
            return dict(db.execute(sql, (tenant, tenant)).fetchall())

    def size(self) -> tuple[int, int]:
        """Documents and passages."""
        sql: LiteralString = "SELECT sum(documents)::bigint, sum(passages)::bigint FROM foreword.totals"
        with self._db.transaction() as db:
            documents, passages = db.execute(sql).fetchone() or (0, 0)
        return documents or 0, passages or 0

    def checkpoint(self) -> None:
        """Bring the planner's statistics up to date; a large collection gets its graph, writes wait meanwhile."""
        with self._db.transaction() as db:
            (most,) = db.execute("SELECT coalesce(max(passages), 0) FROM foreword.totals").fetchone() or (0,)
            if most > ALL_WORDS_LIMIT:
                db.execute("ANALYZE foreword.passages")
            if most <= EXACT_LIMIT or self._dim > MAX_HNSW_DIM:
                return
            db.execute("SELECT pg_advisory_xact_lock(hashtextextended('foreword schema', 0))")
            large: LiteralString = "SELECT tenant, collection FROM foreword.totals WHERE passages > %s"
            for tenant, collection in db.execute(large, (EXACT_LIMIT,)).fetchall():
                # A graph each: in one for all, the nearest would mostly be other collections' and be thrown away.
                name = hashlib.sha256(msgspec.msgpack.encode((tenant, collection))).hexdigest()[:16]
                db.execute(
                    SQL(
                        "CREATE INDEX IF NOT EXISTS {} ON foreword.passages USING hnsw (vector vector_ip_ops)"
                        " WHERE tenant = {} AND collection = {}"
                    ).format(Identifier(f"passages_by_vector_{name}"), tenant, collection)
                )

    def add_job(self, job: Job, sources: Sequence[SourceFile]) -> None:
        """Keep a job and what it has to ingest; it is this process's until it ends."""
        with self._db.transaction() as db:
            values = (job.job_id, job.tenant, job.state, msgspec.msgpack.encode(job))
            db.execute("INSERT INTO foreword.jobs (job_id, tenant, state, record) VALUES (%s, %s, %s, %s)", values)
            rows = [(job.job_id, i, msgspec.msgpack.encode(s)) for i, s in enumerate(sources)]
            with db.cursor() as cursor:
                cursor.executemany("INSERT INTO foreword.job_sources VALUES (%s, %s, %s)", rows)
            self._db.take(job.job_id)

    def advance_job(self, job: Job, done: Sequence[int]) -> None:
        """Keep a job's new state and forget sources."""
        if not self._db.holds(job.job_id) and not self._db.take(job.job_id):
            raise StorageFailed(f"another process has taken over the job {job.job_id}")
        with self._db.transaction() as db:
            values = (job.state, msgspec.msgpack.encode(job), job.job_id)
            db.execute("UPDATE foreword.jobs SET state = %s, record = %s WHERE job_id = %s", values)
            sql: LiteralString = "DELETE FROM foreword.job_sources WHERE job_id = %s AND position = ANY (%s)"
            db.execute(sql, (job.job_id, list(done)))
            if job.has_ended:
                sql = (
                    "DELETE FROM foreword.jobs WHERE serial IN (SELECT serial FROM foreword.jobs"
                    " WHERE state = ANY (%s) ORDER BY serial DESC OFFSET %s)"
                )
                db.execute(sql, ([JobState.DONE.value, JobState.FAILED.value], MAX_JOBS))
        if job.has_ended:
            self._db.release(job.job_id)

    def job(self, tenant: str, job_id: str) -> Job | None:
        """A job as it stands."""
        sql: LiteralString = "SELECT record FROM foreword.jobs WHERE tenant = %s AND job_id = %s"
        with self._db.transaction() as db:
            row = db.execute(sql, (tenant, clean_text(job_id))).fetchone()
        return msgspec.msgpack.decode(row[0], type=Job) if row else None

    def job_sources(self, job_id: str) -> list[tuple[int, SourceFile]]:
        """What a job has not dealt with, and after its end what can be retried."""
        sql: LiteralString = "SELECT position, source FROM foreword.job_sources WHERE job_id = %s ORDER BY position"
        with self._db.transaction() as db:
            rows = db.execute(sql, (job_id,)).fetchall()
        return [(at, msgspec.msgpack.decode(source, type=SourceFile)) for at, source in rows]

    def unfinished_jobs(self) -> list[Job]:
        """Jobs that no other living process is at; they are this one's now."""
        sql: LiteralString = "SELECT tenant, job_id FROM foreword.jobs WHERE state <> ALL (%s) ORDER BY serial"
        with self._db.transaction() as db:
            left = db.execute(sql, ([JobState.DONE.value, JobState.FAILED.value],)).fetchall()
        taken = []
        for tenant, job_id in left:
            if self._db.holds(job_id) or self._db.take(job_id):
                job = self.job(tenant, job_id)
                if job is None or job.has_ended:  # between the question and the lock
                    self._db.release(job_id)
                else:
                    taken.append(job)
        return taken

    def _prepare(self, embedder: str) -> None:
        with self._db.transaction() as db:
            db.execute("SELECT pg_advisory_xact_lock(hashtextextended('foreword schema', 0))")
            db.execute(_SCHEMA.replace("{dim}", str(int(self._dim))).encode())
            for key, value in (("embedder", embedder), ("dim", str(self._dim))):
                db.execute("INSERT INTO foreword.meta VALUES (%s, %s) ON CONFLICT DO NOTHING", (key, value))
            (stored,) = db.execute("SELECT value FROM foreword.meta WHERE key = 'embedder'").fetchone() or ("",)
        if stored != embedder:
            raise EmbedderMismatch(
                f"the index was made with the embedder {stored}, not {embedder}; ingest into a new database"
            )


def _lock_document(db: Connection, tenant: str, document_id: str) -> None:
    db.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 2))", (clean_text(f"{tenant}/{document_id}"),))


def _remove(db: Connection, tenant: str, document_id: str) -> bool:
    sql: LiteralString = (
        "SELECT d.collection, d.serial, count(p.key), coalesce(sum(p.length), 0)::bigint FROM foreword.documents d"
        " LEFT JOIN foreword.passages p USING (serial) WHERE d.tenant = %s AND d.document_id = %s"
        " GROUP BY d.collection, d.serial"
    )
    row = db.execute(sql, (tenant, clean_text(document_id))).fetchone()
    if row is None:
        return False
    collection, serial, num_passages, length = row
    db.execute("DELETE FROM foreword.documents WHERE serial = %s", (serial,))
    _count(db, tenant, collection, -1, -num_passages, -length)
    return True


def _count(db: Connection, tenant: str, collection: str, documents: int, passages: int, length: int) -> None:
    sql: LiteralString = (
        "INSERT INTO foreword.totals AS t VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, collection) DO UPDATE SET"
        " documents = t.documents + excluded.documents, passages = t.passages + excluded.passages,"
        " length = t.length + excluded.length"
    )
    db.execute(sql, (tenant, collection, documents, passages, length))


def _words(counts: Counter[str]) -> str:
    """A `tsvector` whose positions are numbers of occurrences."""
    return " ".join(f"{quoted(term)}:{min(n, 16383)}" for term, n in counts.items())
