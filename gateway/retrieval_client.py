"""Retrieval in a child process, behind ordinary async calls."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from gateway.supervisor import ChildProcess
from retrieval import (
    METHODS,
    STORE,
    ById,
    Call,
    Document,
    DocumentsRequest,
    Embeddings,
    EmbedRequest,
    Failed,
    FromWorker,
    IngestRequest,
    Job,
    Passage,
    Ready,
    Reply,
    RetrievalStats,
    SearchRequest,
    SearchResult,
    StorageFailed,
    StoreUnavailable,
)


class RetrievalDead(Exception):
    """The worker is gone, not there yet, or failed in a call by its own fault."""


_FAULTS: dict[str, type[Exception]] = {t.__name__: t for t in (ValueError, StorageFailed, StoreUnavailable)}


class RetrievalClient:
    """Calls to the worker. Each raises `ValueError`, naming the fault, for a bad argument, and `RetrievalDead`.

    Those that write raise `StorageFailed` where the disk is full or cannot be written, all of them `StoreUnavailable`
    where a shared store cannot be reached.
    """

    def __init__(
        self,
        data_dir: Path,
        embedder: str | Path,
        num_threads: int = 1,
        store: str = "",
        reranker: str = "",
        overlap: int = 0,
    ) -> None:
        args = ["--data-dir", str(data_dir), "--embedder", str(embedder), "--threads", str(num_threads)]
        args += ["--overlap", str(overlap)]
        if reranker:
            args += ["--reranker", str(Path(reranker).expanduser())]
        self._child = ChildProcess("retrieval.worker", args, self._take, self._died, {STORE: store})
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._ids = count()
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._settled = asyncio.Event()
        self._failed: str | None = None
        self.is_ready = False

    @property
    def num_restarts(self) -> int:
        """How often the worker died and was started again."""
        return self._child.num_restarts

    async def start(self) -> None:
        """Start the worker; returns when calls can be made. Raises `RetrievalDead` if it cannot start."""
        self._child.start()
        await self._settled.wait()
        if self._failed is not None:
            raise RetrievalDead(self._failed)

    async def stop(self) -> None:
        """End the worker."""
        self.is_ready = False
        self._fail_all("retrieval was stopped")
        await self._child.stop()

    async def search(self, request: SearchRequest) -> SearchResult:
        """Best passages for a question."""
        result: SearchResult = await self._call("search", request)
        return result

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Vectors of a few texts: searches wait meanwhile."""
        embeddings: Embeddings = await self._call("embed", request)
        return embeddings

    async def ingest(self, request: IngestRequest) -> Job:
        """Start a job and return it as it begins."""
        job: Job = await self._call("ingest", request)
        return job

    async def retry(self, job_id: str, tenant: str = "") -> Job:
        """Start an ended job again, for what failed for no fault of its own."""
        job: Job = await self._call("retry", ById(job_id, tenant))
        return job

    async def job(self, job_id: str, tenant: str = "") -> Job | None:
        """A job as it stands, or None if there is none of that id."""
        job: Job | None = await self._call("job", ById(job_id, tenant))
        return job

    async def wait(self, job_id: str, tenant: str = "") -> Job:
        """A job once it has ended."""
        job: Job = await self._call("wait", ById(job_id, tenant))
        return job

    async def documents(
        self, collections: frozenset[str] | None = None, limit: int = 100, offset: int = 0, tenant: str = ""
    ) -> list[Document]:
        """Records in the order of ingest, of some collections or of all."""
        documents: list[Document] = await self._call("documents", DocumentsRequest(collections, limit, offset, tenant))
        return documents

    async def collections(self, tenant: str = "") -> dict[str, int]:
        """Documents in each of a tenant's collections."""
        collections: dict[str, int] = await self._call("collections", tenant)
        return collections

    async def document(self, document_id: str, tenant: str = "") -> Document | None:
        """One record."""
        document: Document | None = await self._call("document", ById(document_id, tenant))
        return document

    async def passages(self, document_id: str, tenant: str = "") -> list[Passage]:
        """A document's passages, in order."""
        passages: list[Passage] = await self._call("passages", ById(document_id, tenant))
        return passages

    async def delete(self, document_id: str, tenant: str = "") -> bool:
        """Delete a document everywhere; False if there was none."""
        return bool(await self._call("delete", ById(document_id, tenant)))

    async def stats(self) -> RetrievalStats:
        """Gauges for metrics."""
        stats: RetrievalStats = await self._call("stats", None)
        return stats

    async def _call(self, method: str, argument: object) -> Any:
        if not self.is_ready:
            raise RetrievalDead("retrieval is not ready")
        call_id = next(self._ids)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._child.send(msgspec.msgpack.encode(Call(call_id, method, _encode(method, argument))))
            payload = await future
        finally:
            self._calls.pop(call_id, None)
        return msgspec.msgpack.decode(payload, type=METHODS[method][1])

    def _take(self, frame: bytes) -> None:
        match self._decoder.decode(frame):
            case Ready():
                self.is_ready = True
                self._child.mark_ready()
                self._settled.set()
            case Failed(error):
                self._failed = error
                self._child.should_restart = False
                self._settled.set()
            case Reply(call_id, payload, error_type, error):
                future = self._calls.get(call_id)
                if future is None or future.done():
                    return
                if error_type is None:
                    future.set_result(payload)
                else:
                    kind = _FAULTS.get(error_type)
                    future.set_exception(kind(error) if kind else RetrievalDead(f"{error_type}: {error}"))

    def _died(self, code: int) -> None:
        self.is_ready = False
        self._fail_all(f"the retrieval worker ended with code {code}")

    def _fail_all(self, why: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(RetrievalDead(why))


def _encode(method: str, argument: object) -> bytes:
    """A call's argument. Raises `ValueError` for a number that JSON can hold and MessagePack cannot."""
    try:
        return msgspec.msgpack.encode(argument)
    except OverflowError as e:
        where = {"ingest": "metadata", "search": "filters"}.get(method, method)
        raise ValueError(f"{where} holds a number that does not fit 64 bits") from e
