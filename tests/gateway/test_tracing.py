"""Traces of requests: real retrieval and the whole application, only the engine computes nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tiny_model import VOCAB, make_tiny_model

from engine import EngineConfig
from gateway.admission import ANYONE, Ticket
from gateway.app import make_app
from gateway.fake_engine import FakeEngine
from gateway.retrieval_client import RetrievalClient
from gateway.services import Services
from gateway.settings import GatewaySettings, Settings
from gateway.tracing import Tracing, make_tracing

pytestmark = pytest.mark.filterwarnings("ignore:.*path parameter .* deprecated:DeprecationWarning")

WORD = "zanzibar"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ASK = {"query": f"{WORD} lamp", "max_tokens": 3, "model": "default"}
CHAT = {"model": "default", "messages": [{"role": "user", "content": WORD}], "max_tokens": 3}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, embedder_path: Path) -> list[list[ReadableSpan]]:
    """Spans of a question, a streamed question, a chat that is told to follow a trace, and one that is refused."""
    folder = tmp_path_factory.mktemp("traces")
    model = make_tiny_model(folder / "tiny", max_model_len=4096)
    exporter = InMemorySpanExporter()

    async def run() -> list[list[ReadableSpan]]:
        retrieval = RetrievalClient(folder / "data", embedder_path)
        settings = Settings(GatewaySettings(data_dir=str(folder / "data")), EngineConfig())
        services = Services(settings, FakeEngine(model, VOCAB, 4096), retrieval, model)
        services.tracing = Tracing(exporter, batched=False)
        app = make_app(services)
        await services.start()
        out = []
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=60) as client:
                documents = [{"id": "a", "text": "The lamp burns oil."}]
                (await client.post("/rag/documents", json={"documents": documents})).raise_for_status()
                for path, body, headers in (
                    ("/rag/query", ASK, {}),
                    ("/rag/query", {**ASK, "stream": True}, {}),
                    ("/v1/chat/completions", CHAT, {"traceparent": PARENT, "X-Request-Id": "mine"}),
                    ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, {}),
                ):
                    await client.post(path, json=body, headers=headers)
                    out.append(list(exporter.get_finished_spans()))
                    exporter.clear()
        finally:
            await services.stop()
        return out

    return asyncio.run(run())


def tree(spans: list[ReadableSpan]) -> dict[str, str]:
    """Span -> its parent."""
    names = {s.context.span_id: s.name for s in spans}
    return {s.name: names.get(s.parent.span_id, "outside") if s.parent else "" for s in spans}


@pytest.mark.parametrize("which", [0, 1], ids=["whole", "stream"])
def test_a_question_has_a_span_for_each_stage(traces: list[list[ReadableSpan]], which: int) -> None:
    spans = traces[which]
    root = "POST /rag/query"
    stages = ("admit", "retrieve", "assemble", "queue", "prefill", "decode", "cite")
    parts = ("embed", "dense", "lexical", "fuse")
    assert tree(spans) == {root: "", **dict.fromkeys(stages, root), **dict.fromkeys(parts, "retrieve")}
    by_name = {s.name: s for s in spans}
    whole = by_name[root]
    for span in spans:
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time, span.name
    order = [by_name[name].start_time for name in stages]
    assert order == sorted(order)
    for name in parts:
        assert by_name["retrieve"].start_time <= by_name[name].start_time
        assert by_name[name].end_time <= by_name["retrieve"].end_time
    assert whole.attributes["output_tokens"] == 3
    assert whole.attributes["prompt_tokens"] > 10
    assert whole.attributes["status"] == 200


def test_a_clients_trace_is_followed(traces: list[list[ReadableSpan]]) -> None:
    spans = traces[2]
    assert {f"{s.context.trace_id:032x}" for s in spans} == {PARENT.split("-")[1]}
    (root,) = [s for s in spans if s.name == "POST /v1/chat/completions"]
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert root.attributes["request_id"] == "mine"
    assert {s.name for s in spans} == {root.name, "admit", "assemble", "queue", "prefill", "decode"}


def test_a_bad_request_is_a_trace_that_ends_early(traces: list[list[ReadableSpan]]) -> None:
    assert tree(traces[3]) == {"POST /v1/chat/completions": "", "admit": "POST /v1/chat/completions"}
    (root,) = [s for s in traces[3] if s.parent is None]
    assert root.attributes["status"] == 400


def test_spans_hold_no_text(traces: list[list[ReadableSpan]]) -> None:
    for spans in traces:
        for span in spans:
            assert WORD not in span.to_json()
            assert "lamp" not in span.to_json()


def test_nothing_of_it_is_imported_while_traces_are_off() -> None:
    code = (
        "import sys, gateway.serve\nfrom gateway.tracing import make_tracing\n"
        "assert make_tracing('off', '') is None\nprint([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_traces_go_to_a_collector(tmp_path: Path) -> None:
    """One request to a socket of ours shows that the exporter speaks OTLP over HTTP to the set address."""
    seen: list[tuple[str, str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            tracing = make_tracing("otlp", f"http://127.0.0.1:{collector.server_port}/v1/traces")
            assert tracing is not None
            tracing.emit("POST /x", Ticket(ANYONE, "/x", 0.0, 1, 1, None), {}, {"status": 200})
            tracing.close()
        finally:
            collector.shutdown()
            thread.join()
    ((path, kind, _),) = seen
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
