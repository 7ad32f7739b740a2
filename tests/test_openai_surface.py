"""OpenAI's routes of the whole server, with the real models, over a real socket: as an unchanged client sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, read_events

TEXTS = {
    "lamp": ("Lighthouse", "The lighthouse of Kelmar was built in 1874. Its lamp burns 12 litres of oil each night."),
    "bread": ("Bread", "Marta's bread needs 700 grams of rye flour. The dough rests for nine hours."),
    "bridge": ("Bridge", "The Orlan bridge is 312 metres long. It was painted green in 1990."),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_path: Path, embedder_path: Path) -> Iterator[Server]:
    s = Server(tmp_path_factory.mktemp("server"), "--dtype", "float32", "--max-model-len", "2048")
    try:
        s.wait_ready()
        documents = [{"id": i, "title": title, "text": text} for i, (title, text) in TEXTS.items()]
        reply = s.post("/rag/documents", documents=documents, collection="facts")
        assert reply.status_code == 200, reply.text
        yield s
    finally:
        s.stop()


def counts_of(reply: httpx.Response) -> dict[str, int]:
    """What the cache did, of a whole reply or of a stream."""
    assert reply.status_code == 200, reply.text
    if reply.headers["content-type"].startswith("text/event-stream"):
        last = [data for _, data in read_events(reply) if data != "[DONE]"][-1]
    else:
        last = reply.json()
    details: dict[str, int] = last["usage"]["prompt_tokens_details"]
    return details


def generating_bodies(tag: str) -> dict[str, dict[str, Any]]:
    """A body for each generating route whose prompt no other test has sent, from its first token on."""
    system = f"{tag}: you are a parrot that says everything twice and nothing else."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "How many litres? " * 9}]
    return {
        "/v1/chat/completions": {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0},
        "/v1/completions": {"model": "default", "prompt": f"{tag} " + "one two three " * 9, "max_tokens": 4},
        "/rag/query": {"query": "How many litres?", "collection": "facts", "system": f"Rag {system}", "max_tokens": 8},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_with_the_cache_off_nothing_is_reused_and_nothing_is_left_to_reuse(server: Server, stream: bool) -> None:
    for path, body in generating_bodies(f"Off{stream}").items():
        first, second, exact, auto, after = (
            counts_of(server.post(path, **body, stream=stream, cache=c)) for c in ("off", "off", "exact", "auto", "off")
        )
        assert first["cached_tokens"] == second["cached_tokens"] == exact["cached_tokens"] == 0, path
        assert auto["cached_tokens"] > 0, path
        assert auto["cached_tokens"] + auto["computed_tokens"] == first["computed_tokens"] == after["computed_tokens"]
    held = [server.metric(f'foreword_kv_blocks{{state="{s}"}}') for s in ("protected", "held")]
    assert held == [0, 0]


def test_an_unknown_cache_mode_is_refused_by_name(server: Server) -> None:
    for path, body in generating_bodies("Bad").items():
        reply = server.post(path, **body, cache="sometimes")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "cache"
        assert "sometimes" in reply.json()["error"]["message"]
