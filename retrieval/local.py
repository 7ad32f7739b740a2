"""A corpus in one folder: SQLite keeps it, FAISS and BM25 in memory find in it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from retrieval.api import Document, Job, Passage, SearchMode, SearchRequest, SourceFile
from retrieval.corpus import Candidate
from retrieval.dense import DenseIndex, Vectors
from retrieval.filters import compile_filter
from retrieval.lexical import BM25
from retrieval.snapshot import IndexSnapshot, Snapshot, read_snapshot, write_snapshot
from retrieval.store import Store

Keys = npt.NDArray[np.int64]
SNAPSHOT_AFTER = 1000
"""Passages changed since the last snapshot that make a new one worth its time: indexing them takes half a second."""
FILTERS_KEPT = 32
"""Filters whose passages are remembered until something changes."""


@dataclass(slots=True)
class _Entry:
    """What a search needs of a passage without asking the store."""

    serial: int
    text_sum: bytes


@dataclass(slots=True)
class _Index:
    """Both indexes of one collection."""

    dense: DenseIndex
    lexical: BM25 = field(default_factory=BM25)


class LocalCorpus:
    """`Corpus` and `View` of one data folder, which it owns alone.

    Raises `StoreLocked` if another process owns the folder, `EmbedderMismatch` if its vectors are another model's,
    `StorageFailed` if it cannot be written.
    """

    def __init__(self, data_dir: Path, embedder: str, dim: int) -> None:
        self._store = Store(data_dir, embedder)
        self._dim = dim
        self._lock = threading.RLock()
        self._snapshot_lock = threading.Lock()
        self._snapshot_file = data_dir / "index.snapshot"
        self._indexes: dict[tuple[str, str], _Index] = {}
        self._entries: dict[int, _Entry] = {}
        self._documents: dict[int, Document] = {}
        self._serials: dict[tuple[str, str], int] = {}
        self._keys: dict[int, list[int]] = {}
        self._filtered: OrderedDict[bytes, Keys] = OrderedDict()
        self._num_changed = 0
        for serial, document in self._store.all_documents():
            self._documents[serial] = document
            self._serials[document.tenant, document.document_id] = serial
            self._keys[serial] = []
        self._restore()

    def close(self) -> None:
        """Give the folder back."""
        self.checkpoint()
        with self._lock:
            self._store.close()

    @contextmanager
    def view(self) -> Iterator[LocalCorpus]:
        """Keep everything as it is."""
        with self._lock:
            yield self

    def candidates(self, request: SearchRequest, vector: Vectors, limit: int) -> list[Candidate]:
        """The nearest by each index."""
        index = self._indexes.get((request.tenant, request.collection))
        if index is None:
            return []
        allowed = self._allowed(request) if request.filters else None
        if allowed is not None and not len(allowed):
            return []
        lexical, dense = dict[int, float](), dict[int, float]()
        if request.mode is not SearchMode.DENSE:
            lexical = dict(index.lexical.search(request.query, limit, allowed))
        if request.mode is not SearchMode.LEXICAL:
            dense = dict(index.dense.search(vector, limit, allowed))
        others = [k for k in lexical if k not in dense]
        dense |= zip(others, map(float, index.dense.vectors(others) @ vector), strict=True)
        return [Candidate(k, c, lexical.get(k, 0.0), self._entries[k].text_sum) for k, c in dense.items()]

    def vectors(self, keys: Sequence[int]) -> Vectors:
        """Vectors [n, dim] of passages of one collection."""
        if not keys:
            return np.zeros((0, self._dim), np.float32)
        d = self._documents[self._entries[keys[0]].serial]
        return self._indexes[d.tenant, d.collection].dense.vectors(keys)

    def passages(self, keys: Sequence[int]) -> list[tuple[Passage, Document]]:
        """Passages with their documents."""
        return [(self._store.passage(k), self._documents[self._entries[k].serial]) for k in keys]

    def put(self, document: Document, text: str, passages: Sequence[tuple[Passage, str]], vectors: Vectors) -> None:
        """Store a document in place of any of the same tenant and id."""
        with self._lock:
            serial, keys = self._store.put(document, text, passages, vectors)
            self._forget(document.tenant, document.document_id)
            self._documents[serial] = document
            self._serials[document.tenant, document.document_id] = serial
            self._keys[serial] = []
            self._index(serial, keys, passages, vectors)
            self._changed(len(keys))

    def delete(self, tenant: str, document_id: str) -> bool:
        """Delete a document everywhere; False if there was none."""
        with self._lock:
            if (tenant, document_id) not in self._serials:
                return False
            self._store.delete(tenant, document_id)
            self._forget(tenant, document_id)
            return True

    def document(self, tenant: str, document_id: str) -> Document | None:
        """A document's record."""
        with self._lock:
            serial = self._serials.get((tenant, document_id))
            return None if serial is None else self._documents[serial]

    def documents(self, tenant: str, collections: Set[str] | None, limit: int, offset: int) -> list[Document]:
        """A tenant's records in the order of ingest."""
        with self._lock:
            fits = [
                d
                for d in self._documents.values()
                if d.tenant == tenant and (collections is None or d.collection in collections)
            ]
        return fits[offset:] if limit < 0 else fits[offset : offset + limit]

    def passages_of(self, tenant: str, document_id: str) -> list[Passage]:
        """A document's passages, in order."""
        with self._lock:
            serial = self._serials.get((tenant, document_id))
            return [] if serial is None else [self._store.passage(k) for k in self._keys[serial]]

    def collections(self, tenant: str | None) -> dict[str, int]:
        """Documents in each collection."""
        out: dict[str, int] = {}
        with self._lock:
            for d in self._documents.values():
                if tenant is None or d.tenant == tenant:
                    out[d.collection] = out.get(d.collection, 0) + 1
        return dict(sorted(out.items()))

    def size(self) -> tuple[int, int]:
        """Documents and passages."""
        with self._lock:
            return len(self._documents), len(self._entries)

    def checkpoint(self) -> None:
        """Write a snapshot of the indexes if much has changed; searches wait only while it is copied."""
        with self._snapshot_lock:
            with self._lock:
                if self._num_changed < max(SNAPSHOT_AFTER, len(self._entries) // 10):
                    return
                snapshot = self._take_snapshot()
                self._num_changed = 0
            write_snapshot(self._snapshot_file, snapshot)

    def add_job(self, job: Job, sources: Sequence[SourceFile]) -> None:
        """Keep a job and what it has to ingest."""
        with self._lock:
            self._store.add_job(job, sources)

    def advance_job(self, job: Job, done: Sequence[int]) -> None:
        """Keep a job's new state and forget sources."""
        with self._lock:
            self._store.advance_job(job, done)

    def job(self, tenant: str, job_id: str) -> Job | None:
        """A job as it stands."""
        with self._lock:
            return next(iter(self._store.jobs(tenant, job_id)), None)

    def job_sources(self, job_id: str) -> list[tuple[int, SourceFile]]:
        """What a job has not dealt with, and after its end what can be retried."""
        with self._lock:
            return self._store.job_sources(job_id)

    def unfinished_jobs(self) -> list[Job]:
        """Jobs that an earlier process left behind."""
        with self._lock:
            return self._store.jobs()

    def _index(self, serial: int, keys: list[int], passages: Sequence[tuple[Passage, str]], vectors: Vectors) -> None:
        d = self._documents[serial]
        index = self._indexes.get((d.tenant, d.collection))
        if index is None:
            index = self._indexes[d.tenant, d.collection] = _Index(DenseIndex(self._dim))
        if keys:
            index.dense.add(keys, vectors)
        for key, (passage, context) in zip(keys, passages, strict=True):
            index.lexical.add(key, context)
            self._entries[key] = _Entry(serial, text_sum(passage.text))
        self._keys[serial] += keys

    def _forget(self, tenant: str, document_id: str) -> None:
        serial = self._serials.pop((tenant, document_id), None)
        if serial is None:
            return
        d, keys = self._documents.pop(serial), self._keys.pop(serial)
        if keys:
            self._unindex(d.tenant, d.collection, keys)
        self._changed(len(keys))

    def _unindex(self, tenant: str, collection: str, keys: list[int]) -> None:
        index = self._indexes[tenant, collection]
        index.dense.remove(keys)
        index.lexical.remove(keys)
        for key in keys:
            del self._entries[key]
        if not len(index.dense):
            del self._indexes[tenant, collection]

    def _changed(self, num_passages: int) -> None:
        self._num_changed += num_passages
        self._filtered.clear()

    def _allowed(self, request: SearchRequest) -> Keys:
        """Keys of passages whose document fits the filters."""
        mark = msgspec.msgpack.encode((request.tenant, request.collection, request.filters))
        found = self._filtered.get(mark)
        if found is None:
            test = compile_filter(request.filters or {})
            fits = [
                self._keys[serial]
                for serial, d in self._documents.items()
                if d.tenant == request.tenant and d.collection == request.collection and test(d.metadata)
            ]
            found = np.array([k for keys in fits for k in keys], np.int64)
            self._filtered[mark] = found
            while len(self._filtered) > FILTERS_KEPT:
                self._filtered.popitem(last=False)
        self._filtered.move_to_end(mark)
        return found

    def _take_snapshot(self) -> Snapshot:
        entries = self._entries.values()
        return Snapshot(
            self._store.store_id,
            [
                IndexSnapshot(tenant, collection, index.dense.snapshot().tobytes(), index.lexical.snapshot())
                for (tenant, collection), index in self._indexes.items()
            ],
            np.fromiter(self._entries, np.int64, len(self._entries)).tobytes(),
            np.fromiter((e.serial for e in entries), np.int64, len(self._entries)).tobytes(),
            b"".join(e.text_sum for e in entries),
        )

    def _restore(self) -> None:
        """Take the indexes from the snapshot, then make up for what has changed since."""
        snapshot = read_snapshot(self._snapshot_file, self._store.store_id)
        stored = self._store.keys()
        if snapshot is not None:
            keys = np.frombuffer(snapshot.keys, np.int64).tolist()
            if keys and max(keys) > self._store.last_key():
                # Keys are never given twice in one history: an older copy of the store was put in place of this one.
                self._snapshot_file.unlink()
            else:
                self._load(snapshot, keys, set(stored))
        known = set(self._entries)
        for p in self._store.stored_passages([k for k in stored if k not in known]):
            self._index(p.serial, [p.key], [(p.passage, p.context)], p.vector[None])
            self._num_changed += 1
        for keys_of in self._keys.values():
            keys_of.sort()

    def _load(self, snapshot: Snapshot, keys: list[int], stored: set[int]) -> None:
        sums, serials = snapshot.text_sums, np.frombuffer(snapshot.serials, np.int64).tolist()
        for s in snapshot.indexes:
            index = _Index(DenseIndex(self._dim, snapshot=s.dense), BM25.from_snapshot(s.lexical))
            gone = [k for k in np.frombuffer(s.lexical["keys"], np.int64).tolist() if k not in stored]
            index.lexical.remove(gone)
            if gone:
                index.dense.remove(gone)
            self._num_changed += len(gone)
            if len(index.dense):
                self._indexes[s.tenant, s.collection] = index
        for i, (key, serial) in enumerate(zip(keys, serials, strict=True)):
            if key in stored:
                self._entries[key] = _Entry(serial, sums[16 * i : 16 * i + 16])
                self._keys[serial].append(key)


def text_sum(text: str) -> bytes:
    """What stands for a text where equal texts are looked for, 16 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
