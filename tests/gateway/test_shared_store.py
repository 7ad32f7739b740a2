"""Two gateways' workers over one PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from postgres_server import postgres

from gateway.retrieval_client import RetrievalClient, RetrievalDead
from retrieval import IngestRequest, JobState, SearchRequest, SourceFile, StoreUnavailable


def test_two_workers_serve_one_corpus_and_report_its_loss(tmp_path: Path, embedder_path: Path) -> None:
    async def run() -> None:
        with postgres() as server:
            clients = [RetrievalClient(tmp_path / name, embedder_path, store=server.url) for name in "ab"]
            try:
                await asyncio.gather(*(c.start() for c in clients))
                source = SourceFile("alps.txt", b"The Matterhorn was first climbed in 1865.")
                job = await clients[0].wait((await clients[0].ingest(IngestRequest((source,)))).job_id)
                assert job.state is JobState.DONE
                assert await clients[1].job(job.job_id) == job
                found = await clients[1].search(SearchRequest("When was the Matterhorn climbed?"))
                assert [h.passage.text for h in found.hits] == ["The Matterhorn was first climbed in 1865."]
                assert found.hits[0].scores.lexical > 0
                assert await clients[1].delete(job.documents[0].document_id)
                assert (await clients[0].search(SearchRequest("Matterhorn"))).hits == ()
                server.stop()
                with pytest.raises(StoreUnavailable, match="the database failed"):
                    await clients[0].search(SearchRequest("Matterhorn"))
            finally:
                await asyncio.gather(*(c.stop() for c in clients))

    asyncio.run(run())


def test_a_store_that_cannot_be_used_is_named(tmp_path: Path, embedder_path: Path) -> None:
    async def run(store: str) -> None:
        client = RetrievalClient(tmp_path, embedder_path, store=store)
        try:
            await client.start()
        finally:
            await client.stop()

    for store, said in (
        ("mysql://x", "store: this is no URL such as postgresql://"),
        ("postgresql://127.0.0.1:9/x", "the database"),
    ):
        with pytest.raises(RetrievalDead, match=said):
            asyncio.run(run(store))
