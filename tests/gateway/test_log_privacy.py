"""The log says what happened and where, and never what a prompt or a document says."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from keyed_server import Keyed

from gateway.access import Gate
from gateway.errors import log_fault
from gateway.keys import KeyFile
from retrieval.api import DEFAULT_COLLECTION, SourceFile
from retrieval.ingest import Ingest
from retrieval.wire import Call
from retrieval.worker import RetrievalServer

SECRET = "marmalade-4711"


class Faulty:
    """Stands where a corpus or a retriever does, and fails with words that hold a secret."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"cannot handle {SECRET}")

        return fail


def test_the_servers_log_holds_nothing_of_prompts_documents_and_bad_bodies(keyed: Keyed) -> None:
    few = {"model": "default", "max_tokens": 2}
    message = {"role": "user", "content": SECRET}
    sent: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**few, "prompt": SECRET}),
        ("/v1/completions", {**few, "prompt": SECRET * 2000}),
        ("/v1/completions", {**few, "prompt": SECRET, "suffix": SECRET}),
        ("/v1/chat/completions", {**few, "messages": [message]}),
        ("/v1/chat/completions", {**few, "messages": [{**message, "role": SECRET}]}),
        ("/v1/chat/completions", {**few, "messages": [message], "documents": [{"text": SECRET, "title": SECRET}]}),
        ("/v1/chat/completions", {**few, "messages": [message], SECRET: SECRET}),
        ("/rag/documents", {"documents": [{"id": "log", "title": SECRET, "text": SECRET, "metadata": {"a": SECRET}}]}),
        ("/rag/documents", {"documents": [{"title": SECRET, "text": " "}]}),
        ("/rag/documents", {"documents": [{"text": SECRET}], "collection": f"../{SECRET}"}),
        ("/rag/query", {"query": SECRET, "max_tokens": 2}),
        ("/rag/query", {"query": SECRET, "filters": {"a": {f"${SECRET}": 1}}}),
        ("/rag/query", {"query": SECRET, "conversation_id": SECRET}),
    ]
    for path, body in sent:
        for stream in ({}, {"stream": True}) if path != "/rag/documents" else ({},):
            assert keyed.post("ann", path, **body, **stream).status_code < 500
    for content in (f'{{"query": "{SECRET}"', f'{{"query": ["{SECRET}"]}}', SECRET, f'"{SECRET}\xff"'):
        for path in ("/rag/query", "/rag/documents", "/v1/completions"):
            assert keyed.ask("ann", "POST", path, content=content.encode("latin-1")).status_code == 400
    for name, data in (
        (f"{SECRET}.pdf", b"%PDF-1.4 " + SECRET.encode()),
        (f"{SECRET}.docx", SECRET.encode()),
        ("a.json", b"[" * 3000 + SECRET.encode()),
        ("a.txt", SECRET.encode("utf-16-le")[:-1]),
    ):
        assert keyed.ask("ann", "POST", "/rag/documents", files={"file": (name, data)}).status_code < 500
    for path in (f"/rag/documents/{SECRET}", f"/{SECRET}", f"/rag/jobs/{SECRET}"):
        assert keyed.ask("ann", "GET", path).status_code == 404
    keyed.ask(None, "GET", "/metrics", headers={"X-API-Key": SECRET, "X-Request-Id": SECRET})
    keyed.ask("ann", "DELETE", "/rag/documents/log")
    log = keyed.server.read_log()
    assert "Serving tiny" in log, "this is the log"
    assert SECRET not in log
    assert not any(key in log for key in keyed.keys.values())


def test_an_unexpected_fault_is_logged_by_type_and_place(caplog: pytest.LogCaptureFixture) -> None:
    try:
        Faulty().anything()
    except RuntimeError as e:
        log_fault("unexpected error in POST /rag/query", e)
    assert "unexpected error in POST /rag/query: RuntimeError" in caplog.text
    assert "test_log_privacy.py" in caplog.text
    assert f"line {Faulty.__getattr__.__code__.co_firstlineno + 2}" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("has_started", [False, True])
def test_a_fault_behind_the_gate_is_not_left_to_the_server_below(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_started: bool
) -> None:
    sent: list[Any] = []

    async def app(_: Any, __: Any, send: Any) -> None:
        if has_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        Faulty().anything()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": "/", "headers": [], "state": {}}
    asyncio.run(Gate(app, KeyFile(tmp_path))(scope, None, send))
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [200 if has_started else 500]
    assert "RuntimeError" in caplog.text
    assert SECRET not in caplog.text + str(sent)


def test_a_fault_with_a_source_names_neither_it_nor_its_text(caplog: pytest.LogCaptureFixture) -> None:
    ingest = Ingest(Faulty(), Faulty(), "", DEFAULT_COLLECTION)
    ((outcome,),) = ingest.run([SourceFile(SECRET, SECRET.encode(), title=SECRET)])
    assert outcome.code == "internal_error"
    assert "a source was not ingested: RuntimeError" in caplog.text
    assert SECRET not in caplog.text


def test_a_fault_in_a_call_to_retrieval_tells_its_words_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    frames: list[bytes] = []

    class Socket:
        async def send(self, frame: bytes) -> None:
            frames.append(frame)

    server = RetrievalServer(Faulty(), Socket())
    with caplog.at_level(logging.ERROR):
        asyncio.run(server._answer(Call(1, "stats", b"\xc0")))
    assert b"RuntimeError" in frames[0]
    assert "stats failed: RuntimeError" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET.encode() not in frames[0]
