"""The worker beside another one of the same PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from postgres_server import Server

from retrieval.api import IngestRequest, Job, JobState, SearchRequest, SearchResult, SourceFile
from retrieval.retriever import Retriever
from retrieval.wire import METHODS, ById, Call, FromWorker, Ready, Reply
from retrieval.worker import RetrievalServer

Ask = Callable[[str, Any], Any]
ALPS = IngestRequest((SourceFile("alps.txt", b"The Matterhorn was first climbed in 1865."),))


@pytest.fixture
def open_retriever(tmp_path: Path, embedder_path: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("retrieval.worker.TAKE_JOBS_S", 0.01)
    return lambda: Retriever(tmp_path, embedder_path, store=database)


@asynccontextmanager
async def serving(retriever: Retriever) -> AsyncIterator[Ask]:
    """A server on a socket, and what asks it."""
    context = zmq.asyncio.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    near.bind("inproc://worker")
    far.connect("inproc://worker")

    async def ask(method: str, argument: Any) -> Any:
        await near.send(msgspec.msgpack.encode(Call(0, method, msgspec.msgpack.encode(argument))))
        reply = msgspec.msgpack.decode(await near.recv(), type=FromWorker)
        assert isinstance(reply, Reply)
        assert reply.error_type is None, reply.error
        return msgspec.msgpack.decode(reply.payload, type=METHODS[method][1])

    server = asyncio.create_task(RetrievalServer(retriever, far).run())
    try:
        assert isinstance(msgspec.msgpack.decode(await near.recv(), type=FromWorker), Ready)
        yield ask
    finally:
        server.cancel()
        with suppress(asyncio.CancelledError):
            await server
        for socket in (near, far):
            socket.close(linger=0)
        context.term()


async def until_ended(ask: Ask, job: Job) -> Job:
    async with asyncio.timeout(60):
        while not (job := await ask("wait", ById(job.job_id))).has_ended:
            pass
    return job


def test_a_job_of_a_gateway_that_has_gone_is_finished_by_another(open_retriever: Callable[[], Retriever]) -> None:
    async def run() -> None:
        with open_retriever() as gone, open_retriever() as here:
            job = gone.submit(ALPS)
            async with serving(here) as ask:
                for _ in range(20):
                    assert (await ask("wait", ById(job.job_id))).state is JobState.PENDING
                gone.close()
                assert (await until_ended(ask, job)).state is JobState.DONE
                assert len((await ask("search", SearchRequest("Matterhorn"))).hits) == 1

    asyncio.run(run())


def test_a_job_whose_lock_broke_off_is_not_run_twice(
    open_retriever: Callable[[], Retriever], postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server took the lock away while the job ran; the look for jobs left behind takes it again."""
    at_work, go_on, looked, runs = threading.Event(), threading.Event(), threading.Semaphore(0), list[str]()

    async def run() -> None:
        with open_retriever() as r:
            embed, look, run_job = r.embedder.embed_passages, r.unfinished_jobs, r.run_job

            def slowly(texts: Any) -> Any:
                at_work.set()
                assert go_on.wait(60)
                return embed(texts)

            def looking() -> list[Job]:
                found = look()
                looked.release()
                return found

            def running(job: Job, note: Callable[[Job], None]) -> Job:
                runs.append(job.job_id)
                return run_job(job, note)

            monkeypatch.setattr(r.embedder, "embed_passages", slowly)
            monkeypatch.setattr(r, "unfinished_jobs", looking)
            monkeypatch.setattr(r, "run_job", running)
            async with serving(r) as ask:
                job = await ask("ingest", ALPS)
                assert await asyncio.to_thread(at_work.wait, 60)
                postgres_server.end_connections()
                while looked.acquire(blocking=False):
                    pass
                for _ in range(3):
                    assert await asyncio.to_thread(looked.acquire, timeout=60)
                go_on.set()
                ended = await until_ended(ask, job)
                for _ in range(3):
                    assert await asyncio.to_thread(looked.acquire, timeout=60)
                assert (ended.state, ended.num_done, runs) == (JobState.DONE, 1, [job.job_id])

    asyncio.run(run())


def test_a_question_that_fails_takes_no_other_callers_with_it_and_none_hears_its_words() -> None:
    class Picky:
        """Fails whole batches for one question, as an index or a database may."""

        def check(self, request: SearchRequest) -> None: ...

        def search_many(self, requests: list[SearchRequest]) -> list[SearchResult]:
            batches.append(len(requests))
            return [self.search(r) for r in requests]

        def search(self, request: SearchRequest) -> SearchResult:
            if request.query == "bad":
                raise RuntimeError(f"cannot search for {request.query} of {request.tenant}")
            return SearchResult((), float(len(request.query)), 0.0)

    batches: list[int] = []

    async def run() -> list[SearchResult | BaseException]:
        server = RetrievalServer(Picky(), None)
        wanted = [SearchRequest(q, tenant=t) for q, t in (("one", "a"), ("bad", "b"), ("three", "c"))]
        return await asyncio.gather(*(server._do_search(r) for r in wanted), return_exceptions=True)

    first, bad, third = asyncio.run(run())
    assert batches == [3], "they were one batch"
    assert (first.embed_ms, third.embed_ms) == (3.0, 5.0)
    assert isinstance(bad, RuntimeError)
