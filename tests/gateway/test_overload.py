"""The server under more than it can do, and at its end. Its processes are stopped for a while to hold things still."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, child_pid, wait_for
from tiny_model import make_tiny_model

CHAT = "/v1/chat/completions"
MAX_QUEUED = 2


def start(folder: Path, model: Path, *flags: str) -> Server:
    common = ["--model", str(model), "--max-num-seqs", "1", "--max-queued-requests", str(MAX_QUEUED)]
    s = Server(folder, *common, "--keep-alive-s", "0.1", "--log-level", "info", "--num-threads", "1", *flags)
    s.wait_ready()
    return s


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path, embedder_path: Path) -> Iterator[Server]:
    """One sequence runs, one waits in the engine, two in the gateway."""
    s = start(tmp_path_factory.mktemp("overload"), model, "--queue-timeout-s", "5")
    try:
        s.post("/rag/documents", documents=[{"id": "a", "text": "The lamp burns oil."}]).raise_for_status()
        yield s
    finally:
        s.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing runs or waits anywhere."""
    yield
    if "server" in request.fixturenames:
        s: Server = request.getfixturevalue("server")
        if s.process.poll() is None:
            names = ("requests_running", "requests_waiting", "requests_queued", "queued_prompt_tokens")
            wait_for(lambda: all(s.metric(f"foreword_{n}") == 0 for n in names), 10)


def chat(**extra: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    return {**body, "max_tokens": 400, "ignore_eos": True, "stream": True, **extra}


class Streams:
    """Streams that are open, in the order they were opened."""

    def __init__(self, server: Server) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=60)
        self.replies: list[httpx.Response] = []
        self.lines: list[Iterator[str]] = []

    def open(self, path: str = CHAT, **body: Any) -> httpx.Response:
        request = self._client.build_request("POST", path, json=body or chat())
        reply = self._client.send(request, stream=True)
        self.replies.append(reply)
        self.lines.append(reply.iter_lines())
        return reply

    def until(self, what: Callable[[str], bool], at: int = -1) -> str:
        return next(line for line in self.lines[at] if what(line))

    def rest(self, at: int) -> list[str]:
        return list(self.lines[at])

    def leave(self, at: int) -> None:
        self.replies[at].close()

    def close(self) -> None:
        for reply in self.replies:
            reply.close()
        self._client.close()


@contextmanager
def streams(server: Server) -> Iterator[Streams]:
    s = Streams(server)
    try:
        yield s
    finally:
        s.close()


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def busy(server: Server) -> Iterator[Streams]:
    """The engine stands still with one stream under way and one in its queue."""
    with streams(server) as s:
        s.open()
        s.until(has_text)
        with paused(child_pid(server, "engine.process")):
            s.open()
            yield s


def has_text(line: str) -> bool:
    return '"content":"' in line and '"content":""' not in line


def code_of(reply: httpx.Response) -> str:
    reply.read()
    return str(reply.json()["error"]["code"])


def refused(server: Server, reason: str) -> float:
    name = f'foreword_refused_requests_total{{reason="{reason}"}}'
    return server.metric(name) if name in server.client.get("/metrics").text else 0.0


def test_requests_beyond_the_queue_are_refused_while_the_others_wait_and_are_served(server: Server) -> None:
    before = refused(server, "queue_full")
    with busy(server) as s:
        for _ in range(MAX_QUEUED):
            assert s.open().status_code == 200
        # The engine stands still, so nothing but the refusal can answer these.
        for body in (chat(), chat(stream=False), {"query": "lamp"}, {"query": "lamp", "stream": True}):
            reply = s.open("/rag/query" if "query" in body else CHAT, **body)
            assert (reply.status_code, code_of(reply)) == (429, "queue_full")
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.headers["x-request-id"]
        listed = server.client.get("/rag/documents")
        assert listed.status_code == 200, "what needs no engine is not held up"
        os.kill(child_pid(server, "engine.process"), signal.SIGCONT)
        for i in range(2 + MAX_QUEUED):
            assert "data: [DONE]" in s.rest(i)
    assert refused(server, "queue_full") == before + 4


def test_a_request_that_is_queued_too_long_is_given_up_with_its_reason(server: Server) -> None:
    before = refused(server, "queue_timeout")
    with busy(server) as s, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.client.post, CHAT, json=chat(stream=False))
        s.open()
        in_engine, in_gateway = s.rest(1), s.rest(2)
        reply = whole.result()
        os.kill(child_pid(server, "engine.process"), signal.SIGCONT)
        assert "data: [DONE]" in s.rest(0), "the one that had its turn goes on"
    assert (reply.status_code, code_of(reply)) == (503, "queue_timeout")
    assert int(reply.headers["retry-after"]) > 0
    for lines in (in_engine, in_gateway):
        assert lines.count(": keep-alive") >= 5, "nothing was said while it was queued"
        (error,) = [json.loads(line.removeprefix("data: ")) for line in lines if '"error"' in line]
        assert error["error"]["code"] == "queue_timeout"
        assert "5 s" in error["error"]["message"]
        assert "data: [DONE]" not in lines
    assert refused(server, "queue_timeout") == before + 3
    assert server.post(CHAT, **chat(stream=False, max_tokens=3)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_gives_its_place_to_the_next(server: Server, stream: bool) -> None:
    def is_full() -> bool:
        with streams(server) as s:
            return s.open().status_code == 429

    # A closed socket is held by the thread that reads from it: a whole answer is given up by its client's time-out.
    with busy(server) as s, httpx.Client(base_url=server.url, timeout=2) as leaver, ThreadPoolExecutor() as pool:
        s.open()
        if stream:
            s.open()
            assert is_full()
            s.leave(-1)
        else:
            whole = pool.submit(leaver.post, CHAT, json=chat(stream=False))
            wait_for(is_full, 2)
            with pytest.raises(httpx.ReadTimeout):
                whole.result()
        wait_for(lambda: not is_full(), 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_passages_are_searched_gives_its_place_up(server: Server, stream: bool) -> None:
    body = {"query": "lamp", "stream": stream}

    def is_full() -> bool:
        with streams(server) as s:
            return s.open(**chat(max_tokens=1)).status_code == 429

    with paused(child_pid(server, "retrieval.worker")), ThreadPoolExecutor() as pool:
        limit_s = 60 if stream else 2
        clients = [httpx.Client(base_url=server.url, timeout=limit_s) for _ in range(2 + MAX_QUEUED)]
        asked = [pool.submit(c.post, "/rag/query", json=body) for c in clients]
        wait_for(is_full, 2)
        for client in clients:
            client.close()
        for future in asked:
            with suppress(httpx.HTTPError):
                future.result()
        wait_for(lambda: not is_full(), 1)


def test_a_stream_speaks_while_its_passages_are_searched(server: Server) -> None:
    with streams(server) as s:
        with paused(child_pid(server, "retrieval.worker")):
            assert s.open("/rag/query", query="lamp", stream=True, max_tokens=2).status_code == 200
            for _ in range(3):
                s.until(lambda line: line == ": keep-alive")
        assert s.until(lambda line: line.startswith("event: ")) == "event: sources"
        assert "data: [DONE]" in s.rest(-1)
        bad = s.open("/rag/query", query="lamp", stream=True, filters={"a": {"$near": 1}})
        assert (bad.status_code, code_of(bad)) == (400, "invalid_request")


def test_a_completion_of_more_prompts_than_the_queue_takes_is_refused_whole(server: Server) -> None:
    body = {"model": "default", "prompt": ["a", "b", "c", "d", "e", "f"], "max_tokens": 400, "ignore_eos": True}
    reply = server.post("/v1/completions", **body)
    assert (reply.status_code, code_of(reply)) == (429, "queue_full")
    assert server.post("/v1/completions", **{**body, "prompt": ["a", "b"], "max_tokens": 2}).status_code == 200


def test_the_queue_is_shown_and_freed_when_the_engine_dies(server: Server) -> None:
    with busy(server) as s:
        for _ in range(MAX_QUEUED):
            s.open()
        os.kill(child_pid(server, "engine.process"), signal.SIGKILL)
        for i in range(2 + MAX_QUEUED):
            lines = s.rest(i)
            assert any('"code":"engine_unavailable"' in line for line in lines), lines
            assert "data: [DONE]" not in lines
    assert server.post("/debug/cache").status_code == 405
    assert server.client.get("/debug/cache").json()["error"]["code"] == "engine_unavailable"
    server.wait_ready()
    assert server.client.get("/debug/scheduler").json()["queue"]["waiting"] == []


def test_sigterm_lets_streams_end_and_tells_new_requests_why_not(server: Server) -> None:
    with busy(server) as s:
        for _ in range(MAX_QUEUED):
            s.open()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.status("/health/ready") == 503, 5)
        # Not only in the moment before it stops listening: time and again, on connections of their own.
        told: list[int] = []
        with httpx.Client(base_url=server.url, limits=httpx.Limits(max_keepalive_connections=0)) as newcomer:

            def was_told_often() -> bool:
                told.append(newcomer.get("/v1/models").status_code)
                return len(told) > 6

            wait_for(was_told_often, 10)
        assert set(told) == {503}
        for method, path in (("POST", CHAT), ("POST", "/rag/query"), ("GET", "/rag/documents"), ("GET", "/v1/models")):
            reply = server.client.request(method, path, json=chat())
            assert (reply.status_code, code_of(reply)) == (503, "shutting_down"), path
            assert reply.headers["retry-after"]
        assert server.status("/health/live") == 200
        os.kill(child_pid(server, "engine.process"), signal.SIGCONT)
        for i in range(2 + MAX_QUEUED):
            assert "data: [DONE]" in s.rest(i)
    assert server.process.wait(20) == 0


def test_what_outlasts_the_grace_ends_with_an_error(tmp_path: Path, model: Path, embedder_path: Path) -> None:
    server = start(tmp_path, model, "--shutdown-grace-s", "0.5")
    try:
        with busy(server) as s:
            s.open()
            server.process.send_signal(signal.SIGTERM)
            for i in range(3):
                lines = s.rest(i)
                assert any('"code":"shutting_down"' in line for line in lines), lines[-3:]
                assert "data: [DONE]" not in lines
        assert server.process.wait(20) == 0
    finally:
        server.stop()


def test_a_second_sigterm_ends_at_once(tmp_path: Path, model: Path, embedder_path: Path) -> None:
    server = start(tmp_path, model, "--shutdown-grace-s", "600")
    try:
        engine = child_pid(server, "engine.process")
        with busy(server):
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.status("/health/ready") == 503, 5)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(5) == 1
        wait_for(lambda: not Path(f"/proc/{engine}").exists(), 10)
    finally:
        server.stop()
