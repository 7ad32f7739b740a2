"""Documents, passages, vectors and jobs in SQLite. A transaction makes a document wholly there, or not at all (I7)."""

from __future__ import annotations

import fcntl
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from retrieval.api import Document, Job, JobState, Passage, SourceFile, StorageFailed
from retrieval.corpus import MAX_JOBS, EmbedderMismatch, StoreLocked
from retrieval.dense import Vectors

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (serial INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL,
    collection TEXT NOT NULL, document_id TEXT NOT NULL, record BLOB NOT NULL, text TEXT NOT NULL,
    UNIQUE (tenant, document_id));
CREATE INDEX IF NOT EXISTS documents_of_collection ON documents (tenant, collection, serial);
CREATE TABLE IF NOT EXISTS passages (key INTEGER PRIMARY KEY AUTOINCREMENT,
    serial INTEGER NOT NULL REFERENCES documents (serial) ON DELETE CASCADE,
    record BLOB NOT NULL, context TEXT NOT NULL, vector BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS passages_of_document ON passages (serial);
CREATE TABLE IF NOT EXISTS jobs (serial INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL, state TEXT NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS job_sources (job_id TEXT NOT NULL REFERENCES jobs (job_id) ON DELETE CASCADE,
    position INTEGER NOT NULL, source BLOB NOT NULL, PRIMARY KEY (job_id, position));
"""

_FROM_1 = """
ALTER TABLE documents RENAME TO documents_1;
ALTER TABLE passages RENAME TO passages_1;
DROP INDEX documents_by_collection;
DROP INDEX passages_by_document;
"""
_FROM_1_COPY = """
INSERT INTO documents SELECT serial, '', collection, document_id, record, text FROM documents_1;
INSERT INTO passages SELECT p.key, d.serial, p.record, p.context, p.vector
    FROM passages_1 p JOIN documents_1 d USING (document_id);
DROP TABLE passages_1;
DROP TABLE documents_1;
"""
"""Schema 1 had no tenants and no jobs."""


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage as it is kept: with its key in the indexes, the text that was indexed, and its vector."""

    key: int
    serial: int
    """Its document's."""
    passage: Passage
    context: str
    """Title, headings and text: what the indexes read."""
    vector: Vectors


class Store:
    """The SQLite file of a data folder. Not thread-safe: `LocalCorpus` holds a lock around it.

    Raises `StoreLocked` if another process owns the folder, `EmbedderMismatch` if its vectors are another model's,
    `StorageFailed` if it cannot be written.
    """

    def __init__(self, data_dir: Path, embedder: str) -> None:
        self.data_dir = data_dir
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._lock_file = (data_dir / "lock").open("w")
        except OSError as e:
            raise StorageFailed(f"cannot write in {data_dir}: {e.strerror}") from e
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._lock_file.close()
            raise StoreLocked(f"{data_dir} is in use by another process") from e
        self._db = sqlite3.connect(data_dir / "foreword.sqlite", check_same_thread=False, isolation_level=None)
        try:
            with self._failures():
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._make_schema()
                self._db.execute("PRAGMA foreign_keys = ON")
                self.store_id = self._meta("store_id", uuid.uuid4().hex)
                stored = self._meta("embedder", embedder)
        except StorageFailed:
            self.close()
            raise
        if stored != embedder:
            self.close()
            raise EmbedderMismatch(
                f"the index was made with the embedder {stored}, not {embedder}; ingest into a new folder"
            )

    def close(self) -> None:
        """Give the folder back."""
        self._db.close()
        self._lock_file.close()

    def put(
        self, document: Document, text: str, passages: Sequence[tuple[Passage, str]], vectors: Vectors
    ) -> tuple[int, list[int]]:
        """Store a document in place of any of the same id; returns its serial and the passages' keys."""
        encode = msgspec.msgpack.encode
        with self._transaction() as db:
            where = (document.tenant, document.document_id)
            db.execute("DELETE FROM documents WHERE tenant = ? AND document_id = ?", where)
            row = (document.tenant, document.collection, document.document_id, encode(document), text)
            sql = "INSERT INTO documents (tenant, collection, document_id, record, text) VALUES (?, ?, ?, ?, ?)"
            serial = db.execute(sql, row).lastrowid
            assert serial is not None
            keys: list[int] = []
            for (passage, context), vector in zip(passages, vectors, strict=True):
                values = (serial, encode(passage), context, vector.astype("<f4").tobytes())
                cursor = db.execute(
                    "INSERT INTO passages (serial, record, context, vector) VALUES (?, ?, ?, ?)", values
                )
                assert cursor.lastrowid is not None
                keys.append(cursor.lastrowid)
        return serial, keys

    def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document, if there is one."""
        with self._transaction() as db:
            db.execute("DELETE FROM documents WHERE tenant = ? AND document_id = ?", (tenant, document_id))

    def all_documents(self) -> Iterator[tuple[int, Document]]:
        """Serial and record of each, in the order of ingest."""
        for serial, tenant, record in self._db.execute("SELECT serial, tenant, record FROM documents ORDER BY serial"):
            yield serial, msgspec.structs.replace(msgspec.msgpack.decode(record, type=Document), tenant=tenant)

    def passage(self, key: int) -> Passage:
        """The passage under a key. Raises `KeyError`."""
        row = self._db.execute("SELECT record FROM passages WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise KeyError(key)
        return msgspec.msgpack.decode(row[0], type=Passage)

    def keys(self) -> list[int]:
        """Keys of all passages."""
        return [key for (key,) in self._db.execute("SELECT key FROM passages ORDER BY key")]

    def last_key(self) -> int:
        """The greatest key ever given; none is given twice."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'passages'").fetchone()
        return int(row[0]) if row else 0

    def stored_passages(self, keys: Sequence[int]) -> Iterator[StoredPassage]:
        """What the indexes are made of."""
        sql = "SELECT p.serial, p.record, p.context, p.vector FROM passages p WHERE p.key = ?"
        for key in keys:
            serial, record, context, vector = self._db.execute(sql, (key,)).fetchone()
            passage = msgspec.msgpack.decode(record, type=Passage)
            yield StoredPassage(key, serial, passage, context, np.frombuffer(vector, "<f4"))

    def add_job(self, job: Job, sources: Sequence[SourceFile]) -> None:
        """Keep a job and what it has to ingest."""
        rows = [(job.job_id, i, msgspec.msgpack.encode(s)) for i, s in enumerate(sources)]
        with self._transaction() as db:
            values = (job.job_id, job.tenant, job.state, msgspec.msgpack.encode(job))
            db.execute("INSERT INTO jobs (job_id, tenant, state, record) VALUES (?, ?, ?, ?)", values)
            db.executemany("INSERT INTO job_sources VALUES (?, ?, ?)", rows)

    def advance_job(self, job: Job, done: Sequence[int]) -> None:
        """Keep a job's new state and forget its sources at these positions."""
        with self._transaction() as db:
            values = (job.state, msgspec.msgpack.encode(job), job.job_id)
            db.execute("UPDATE jobs SET state = ?, record = ? WHERE job_id = ?", values)
            where = [(job.job_id, position) for position in done]
            db.executemany("DELETE FROM job_sources WHERE job_id = ? AND position = ?", where)
            if job.has_ended:
                ended = f"state IN ('{JobState.DONE}', '{JobState.FAILED}')"
                old = f"SELECT serial FROM jobs WHERE {ended} ORDER BY serial DESC LIMIT -1 OFFSET {MAX_JOBS}"
                db.execute(f"DELETE FROM jobs WHERE serial IN ({old})")

    def jobs(self, tenant: str | None = None, job_id: str | None = None) -> list[Job]:
        """Jobs, oldest first: one tenant's of this id, or all that have not ended."""
        if job_id is not None:
            found = self._db.execute("SELECT record FROM jobs WHERE tenant = ? AND job_id = ?", (tenant, job_id))
        else:
            ended = (JobState.DONE, JobState.FAILED)
            found = self._db.execute("SELECT record FROM jobs WHERE state NOT IN (?, ?) ORDER BY serial", ended)
        return [msgspec.msgpack.decode(record, type=Job) for (record,) in found.fetchall()]

    def job_sources(self, job_id: str) -> list[tuple[int, SourceFile]]:
        """What is left of a job's sources."""
        rows = self._db.execute(
            "SELECT position, source FROM job_sources WHERE job_id = ? ORDER BY position", (job_id,)
        )
        return [(at, msgspec.msgpack.decode(source, type=SourceFile)) for at, source in rows.fetchall()]

    def _meta(self, key: str, default: str) -> str:
        self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, default))
        (value,) = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(value)

    def _make_schema(self) -> None:
        columns = {name for _, name, *_ in self._db.execute("PRAGMA table_info(documents)")}
        is_old = bool(columns) and "tenant" not in columns
        script = (_FROM_1 if is_old else "") + _SCHEMA + (_FROM_1_COPY if is_old else "")
        self._db.executescript(f"BEGIN IMMEDIATE; {script} COMMIT;")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK if anything in it fails, the commit too."""
        with self._failures():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # after some failures SQLite has rolled back by itself
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as e:
            raise StorageFailed(f"cannot write in {self.data_dir}: {e}") from e
