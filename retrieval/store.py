"""Documents, passages and vectors in SQLite. One transaction makes a document wholly there, or not at all (I7)."""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from retrieval.api import Document, Passage
from retrieval.dense import Vectors

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (document_id TEXT PRIMARY KEY, collection TEXT NOT NULL, record BLOB NOT NULL,
    text TEXT NOT NULL, serial INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS documents_by_collection ON documents (collection, serial);
CREATE TABLE IF NOT EXISTS passages (key INTEGER PRIMARY KEY AUTOINCREMENT,
    document_id TEXT NOT NULL REFERENCES documents (document_id) ON DELETE CASCADE,
    record BLOB NOT NULL, context TEXT NOT NULL, vector BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS passages_by_document ON passages (document_id);
"""


class StoreLocked(Exception):
    """Another process owns this data folder."""


class EmbedderMismatch(Exception):
    """The stored vectors were made by another embedder."""


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage as it is kept: with its key in the indexes, the text that was indexed, and its vector."""

    key: int
    collection: str
    passage: Passage
    context: str
    """Title, headings and text: what the indexes read."""
    vector: Vectors


class Store:
    """Owner of all that was ingested. Not thread-safe: `Retriever` holds a lock around it."""

    def __init__(self, data_dir: Path, embedder: str) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._lock_file = (data_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._lock_file.close()
            raise StoreLocked(f"{data_dir} is in use by another process") from e
        self._db = sqlite3.connect(data_dir / "foreword.sqlite", check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        self._check_embedder(embedder)

    def close(self) -> None:
        """Give the folder back."""
        self._db.close()
        self._lock_file.close()

    def put(
        self, document: Document, text: str, passages: Sequence[tuple[Passage, str]], vectors: Vectors
    ) -> list[int]:
        """Store a document in place of any of the same id; returns the new passages' keys."""
        encode = msgspec.msgpack.encode
        with _transaction(self._db) as db:
            db.execute("DELETE FROM documents WHERE document_id = ?", (document.document_id,))
            (serial,) = db.execute("SELECT coalesce(max(serial), 0) + 1 FROM documents").fetchone()
            row = (document.document_id, document.collection, encode(document), text, serial)
            db.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?)", row)
            keys: list[int] = []
            for (passage, context), vector in zip(passages, vectors, strict=True):
                values = (document.document_id, encode(passage), context, vector.astype("<f4").tobytes())
                cursor = db.execute(
                    "INSERT INTO passages (document_id, record, context, vector) VALUES (?, ?, ?, ?)", values
                )
                assert cursor.lastrowid is not None
                keys.append(cursor.lastrowid)
        return keys

    def delete(self, document_id: str) -> list[int]:
        """Delete a document; returns its passages' keys."""
        keys = self.keys_of(document_id)
        with _transaction(self._db) as db:
            db.execute("DELETE FROM documents WHERE document_id = ?", (document_id,))
        return keys

    def keys_of(self, document_id: str) -> list[int]:
        """Keys of a document's passages."""
        rows = self._db.execute("SELECT key FROM passages WHERE document_id = ? ORDER BY key", (document_id,))
        return [key for (key,) in rows]

    def document(self, document_id: str) -> Document | None:
        """A document's record."""
        row = self._db.execute("SELECT record FROM documents WHERE document_id = ?", (document_id,)).fetchone()
        return msgspec.msgpack.decode(row[0], type=Document) if row else None

    def documents(self, collection: str | None, limit: int, offset: int) -> list[Document]:
        """Records in the order of ingest."""
        where, args = ("WHERE collection = ?", [collection]) if collection is not None else ("", [])
        sql = f"SELECT record FROM documents {where} ORDER BY serial LIMIT ? OFFSET ?"
        return [msgspec.msgpack.decode(r, type=Document) for (r,) in self._db.execute(sql, [*args, limit, offset])]

    def passage(self, key: int) -> Passage:
        """The passage under a key. Raises `KeyError`."""
        row = self._db.execute("SELECT record FROM passages WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise KeyError(key)
        return msgspec.msgpack.decode(row[0], type=Passage)

    def all_passages(self) -> Iterator[StoredPassage]:
        """Everything the indexes are made of."""
        sql = (
            "SELECT p.key, d.collection, p.record, p.context, p.vector"
            " FROM passages p JOIN documents d USING (document_id) ORDER BY p.key"
        )
        for key, collection, record, context, vector in self._db.execute(sql):
            passage = msgspec.msgpack.decode(record, type=Passage)
            yield StoredPassage(key, collection, passage, context, np.frombuffer(vector, "<f4"))

    def collections(self) -> dict[str, int]:
        """Documents in each collection."""
        rows: list[tuple[str, int]] = self._db.execute(
            "SELECT collection, count(*) FROM documents GROUP BY collection ORDER BY collection"
        ).fetchall()
        return dict(rows)

    def num_passages(self) -> int:
        """Passages in all collections."""
        (n,) = self._db.execute("SELECT count(*) FROM passages").fetchone()
        return int(n)

    def _check_embedder(self, embedder: str) -> None:
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('embedder', ?)", (embedder,))
        (stored,) = self._db.execute("SELECT value FROM meta WHERE key = 'embedder'").fetchone()
        if stored != embedder:
            self.close()
            raise EmbedderMismatch(
                f"the index was made with the embedder {stored}, not {embedder}; ingest into a new folder"
            )


class _transaction:
    """BEGIN IMMEDIATE ... COMMIT, or ROLLBACK if the body raises."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        self._db.execute("BEGIN IMMEDIATE")
        return self._db

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")
