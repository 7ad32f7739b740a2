"""The server answers at once whatever else it does: while it starts, ingests much, or is sent far too long prompts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, wait_for

CHAT = "/v1/chat/completions"
FAR_TOO_LONG_S = 2.0
"""A blocked loop would hold health back for the whole of what blocks it, which is longer by far."""


@pytest.fixture(scope="module")
def seen() -> list[tuple[int | None, int | None]]:
    """(live, ready) while the server starts."""
    return []


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path, embedder_path: Path, seen: list[Any]
) -> Iterator[Server]:
    s = Server(tmp_path_factory.mktemp("responsive"), "--model", str(model_path), "--num-threads", "1")

    def is_ready() -> bool:
        seen.append((s.status("/health/live"), s.status("/health/ready")))
        return seen[-1][1] == 200

    try:
        wait_for(is_ready, 90)
        yield s
    finally:
        s.stop()


def chat(content: str, **extra: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 3, **extra}


class Health:
    """Polls liveness on a connection of its own and keeps the times."""

    def __init__(self, server: Server) -> None:
        self._url, self._is_over = server.url, threading.Event()
        self.times_s: list[float] = []
        self._thread = threading.Thread(target=self._poll)

    def _poll(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._is_over.wait(0.02):
                started = time.monotonic()
                assert client.get("/health/live").status_code == 200
                self.times_s.append(time.monotonic() - started)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def health_is_good(server: Server) -> Iterator[None]:
    with Health(server) as health:
        yield
        wait_for(lambda: len(health.times_s) >= 3, 60)
    assert max(health.times_s) < FAR_TOO_LONG_S


def test_a_server_is_alive_before_it_is_ready_and_ready_once_it_can_answer(server: Server, seen: list[Any]) -> None:
    assert seen[-1] == (200, 200)
    before = [pair for pair in seen[:-1] if pair != (None, None)]
    assert (200, 503) in before, "it was never seen starting"
    assert all(ready in (503, None) for _, ready in before)
    assert server.post(CHAT, **chat("Hi")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("word " * 3_000_000), "messages"),
        ("/v1/completions", {"model": "default", "prompt": ["a", "word " * 3_000_000]}, "prompt"),
        ("/rag/query", {"query": "word " * 3_000_000}, "query"),
    ],
    ids=["chat", "completions", "rag"],
)
def test_a_prompt_that_can_never_fit_is_refused_without_tokenizing_it(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    with health_is_good(server):
        reply = server.client.post(path, content=json.dumps(body))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "at least" in error["message"]


def test_a_long_prompt_is_tokenized_beside_everything_else(server: Server) -> None:
    with health_is_good(server):
        reply = server.post(CHAT, **chat("word " * 120_000))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" not in reply.json()["error"]["message"], "it was not tokenized"


def test_health_and_streams_go_on_while_a_huge_text_is_ingested(server: Server) -> None:
    text = "\n\n".join(f"Chapter {i}. " + "The lamp of the lighthouse burns oil. " * 30 for i in range(17_000))
    assert len(text) > 19_000_000
    with health_is_good(server):
        job = server.client.post("/rag/documents?wait=false", content=json.dumps({"documents": [{"text": text}]}))
        assert job.status_code == 202, job.text
        reply = server.post(CHAT, **chat("Tell a story.", max_tokens=30, stream=True, ignore_eos=True))
        assert "data: [DONE]" in reply.text
    assert server.client.get(f"/rag/jobs/{job.json()['job_id']}").json()["state"] in ("pending", "running")
