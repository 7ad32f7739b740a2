"""OpenAI's routes of the whole server, with the real models, over a real socket: as an unchanged client sees them."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
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


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as c:
        yield c


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


def test_embeddings_are_those_that_retrieval_uses(server: Server, client: openai.OpenAI, embedder_path: Path) -> None:
    from retrieval.embed import make_embedder

    texts = [f"{text} ({i})" for i in range(10) for _, text in TEXTS.values()]
    model = next(m for m in client.models.list() if m.task == "embedding")
    assert model.id == client.models.retrieve(model.id).id == "all-MiniLM-L6-v2"
    reply = client.embeddings.create(model=model.id, input=texts)
    ours = np.asarray([row.embedding for row in reply.data])
    expected = make_embedder(embedder_path).embed_passages(texts)
    assert [row.index for row in reply.data] == list(range(len(texts)))
    assert np.abs(ours - expected).max() < 1e-5
    assert np.linalg.norm(ours, axis=1) == pytest.approx(1.0, abs=1e-5)
    counts = [make_embedder(embedder_path).count(t) for t in texts]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(counts)
    one = client.embeddings.create(model="default", input=texts[0], dimensions=384, encoding_format="float")
    assert np.abs(np.asarray(one.data[0].embedding) - expected[0]).max() < 1e-5
    question = client.embeddings.create(model=model.id, input=texts[0], extra_body={"input_type": "query"})
    assert np.abs(np.asarray(question.data[0].embedding) - expected[0]).max() < 1e-5, "this embedder has no prefixes"


def test_numbers_and_base64_hold_the_same_vectors(server: Server) -> None:
    body = {"model": "default", "input": ["A lamp.", "A bridge."]}
    numbers = server.post("/v1/embeddings", **body).json()["data"]
    coded = server.post("/v1/embeddings", **body, encoding_format="base64").json()["data"]
    for a, b in zip(numbers, coded, strict=True):
        assert np.frombuffer(base64.b64decode(b["embedding"]), "<f4").tolist() == a["embedding"]


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"input": []}, 400, "invalid_request", "1 to 2048 texts, got 0"),
        ({"input": ["x"] * 2049}, 400, "invalid_request", "got 2049"),
        ({"input": ""}, 400, "invalid_request", "input[0]"),
        ({"input": ["a", " \n"]}, 400, "invalid_request", "input[1]"),
        ({"input": [1, 2, 3]}, 400, "invalid_request", "another tokenizer"),
        ({"input": [[1, 2], [3]]}, 400, "invalid_request", "another tokenizer"),
        ({"input": {"text": "x"}}, 400, "invalid_request", "input"),
        ({"input": None}, 400, "invalid_request", "input"),
        ({"input": ["x"] * 20 + ["word " * 300]}, 400, "context_length_exceeded", "input[20] has 300 tokens"),
        ({"input": "word " * 300, "input_type": "query"}, 400, "context_length_exceeded", "at most 254"),
        ({"input_type": "image"}, 400, "invalid_request", "image"),
        ({"dimensions": 256}, 400, "unsupported_parameter", "384"),
        ({"encoding_format": "int8"}, 400, "invalid_request", "int8"),
        ({"model": "text-embedding-3-small"}, 404, "model_not_found", "served: all-MiniLM-L6-v2"),
        ({"models": "x"}, 400, "invalid_request", "models"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    server: Server, change: dict[str, Any], status: int, code: str, words: str
) -> None:
    reply = server.post("/v1/embeddings", **{"model": "default", "input": "A lamp.", **change})
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["code"] == code
    assert words in reply.json()["error"]["message"]
    long = server.post("/v1/embeddings", model="default", input="word " * 254)
    assert long.status_code == 200, "as long as the embedder reads"


def test_a_search_does_not_wait_for_a_long_list_of_texts(server: Server) -> None:
    ended: list[str] = []

    def embed() -> None:
        assert server.post("/v1/embeddings", model="default", input=["word " * 120] * 96).status_code == 200
        ended.append("embeddings")

    thread = threading.Thread(target=embed)
    thread.start()
    assert server.post("/rag/query", query="Orlan bridge", collection="empty").json()["no_context"]
    ended.append("search")
    thread.join()
    assert ended == ["search", "embeddings"]
