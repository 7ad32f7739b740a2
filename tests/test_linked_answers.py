"""Linked passages of the whole server, over a real socket: what a caller asks for, gets and is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, read_events
from tiny_model import make_tiny_model

DOCUMENTS = [
    {"id": name, "title": name.title(), "text": f"{text} {text[::-1]}"}
    for name, text in {
        "lamp": "The lighthouse of Kelmar was built in 1874 and burns oil each night.",
        "bread": "Rye bread needs flour, and the dough rests for nine hours in the night.",
        "bridge": "The Orlan bridge is long, and was painted green in 1990 over one night.",
        "clock": "The clock of the town hall strikes each hour of the night but the first.",
    }.items()
]
CHAT = [{"role": "system", "content": "You answer from documents."}, {"role": "user", "content": "What of the night?"}]


def make_server(folder: Path, embedder: Path, *flags: str) -> Server:
    model = make_tiny_model(folder / "tiny", max_model_len=4096)
    settings = ("--model", str(model), "--embedder", str(embedder), "--dtype", "float32", *flags)
    server = Server(folder, *settings)
    server.wait_ready()
    return server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, embedder_path: Path) -> Iterator[Server]:
    s = make_server(tmp_path_factory.mktemp("linked"), embedder_path)
    try:
        assert s.post("/rag/documents", documents=DOCUMENTS).status_code == 200
        yield s
    finally:
        s.stop()


def ask(server: Server, query: str, **more: Any) -> dict[str, Any]:
    reply = server.post("/rag/query", query=query, max_tokens=4, top_k=4, **more)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_the_reply_says_what_was_linked_for_each_passage_and_that_no_certificate_covers_it(server: Server) -> None:
    first = ask(server, "What burns oil each night?", cache="linked")
    second = ask(server, "Who burns oil each night, and why?", cache="linked")
    third = ask(server, "How long does dough rest in the night?", cache="linked")
    assert [a["certified"] for a in (first, second, third)] == [False] * 3
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for answer in (second, third):
        details = answer["usage"]["prompt_tokens_details"]
        parts = [s["cache"] for s in answer["sources"]]
        assert details["linked_tokens"] == sum(p["linked_tokens"] for p in parts) > 200
        assert details["cached_tokens"] == details["prefix_tokens"] + details["linked_tokens"]
        assert details["cached_tokens"] + details["computed_tokens"] == answer["usage"]["prompt_tokens"]
        assert all(p["computed_tokens"] <= 16 for p in parts[1:]), (
            "only the first tokens of later passages are computed"
        )
    assert server.metric("foreword_compiled_passages") >= 3
    assert server.metric('foreword_prompt_tokens_total{kind="linked"}') > 400


def test_exact_answers_after_linked_ones_are_those_of_a_cache_that_was_never_used(server: Server) -> None:
    queries = ["What was painted green?", "What strikes each hour?", "What rests for nine hours?"]
    for query in queries:
        ask(server, query, cache="linked")
    for query in queries:
        exact, cold = (ask(server, query, cache=c) for c in ("exact", "off"))
        assert exact["answer"] == cold["answer"]
        assert "certified" not in exact
        assert exact["usage"]["prompt_tokens_details"]["linked_tokens"] == 0


def test_documents_of_a_chat_are_linked_streamed_or_not(server: Server) -> None:
    body = {"model": "default", "messages": CHAT, "max_tokens": 4, "temperature": 0, "cache": "linked"}
    texts = [{"title": d["title"], "text": d["text"]} for d in DOCUMENTS[:3]]
    server.post("/v1/chat/completions", **body, documents=texts)
    whole = server.post("/v1/chat/completions", **body, documents=texts[::-1]).json()
    assert whole["certified"] is False
    assert whole["usage"]["prompt_tokens_details"]["linked_tokens"] > 200
    streamed = read_events(server.post("/v1/chat/completions", **body, documents=texts[::-1], stream=True))
    last = [data for _, data in streamed if data != "[DONE]"][-1]
    assert last["certified"] is False
    assert last["usage"]["prompt_tokens_details"]["linked_tokens"] > 200
    text = "".join(c["delta"].get("content", "") for _, d in streamed if d != "[DONE]" for c in d["choices"])
    assert text == whole["choices"][0]["message"]["content"]


def test_passages_in_the_order_of_earlier_prompts_are_found_in_the_cache(server: Server) -> None:
    queries = ["What burns oil each night?", "How long does dough rest?", "What was painted green?"]
    prefixes = {}
    for order in ("relevance", "cache"):
        answers = [ask(server, q, order=order, system=f"Ordered by {order}.") for q in queries]
        ranked = [[s["document_id"] for s in a["sources"]] for a in answers]
        assert len({tuple(r) for r in ranked}) > 1, "sources are by relevance, which differs"
        prefixes[order] = [sum(s["cache"]["prefix_tokens"] > 0 for s in a["sources"]) for a in answers]
    assert prefixes["cache"] == [0, 4, 4]
    assert sum(prefixes["relevance"]) < 4
    refused = server.post("/rag/query", query="What?", order="best")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "order"


def refusals(server: Server) -> list[httpx.Response]:
    chat = {"model": "default", "messages": CHAT, "documents": [{"text": "A text."}]}
    bodies = {
        "/rag/query": {"query": "What?"},
        "/v1/chat/completions": chat,
        "/v1/completions": {"model": "default", "prompt": "Once"},
    }
    return [server.post(path, **body, cache="linked", max_tokens=1) for path, body in bodies.items()]


@pytest.mark.parametrize(
    ("flag", "status", "code", "why"),
    [
        ("--no-allow-linked", 403, "linked_forbidden", "allow_linked is off"),
        ("--deterministic", 400, "unsupported_parameter", "deterministic promises the same text"),
    ],
)
def test_linking_is_refused_by_name_where_it_is_forbidden_or_impossible(
    tmp_path: Path, embedder_path: Path, flag: str, status: int, code: str, why: str
) -> None:
    server = make_server(tmp_path, embedder_path, flag)
    try:
        for reply in refusals(server):
            assert reply.status_code == status, reply.text
            error = reply.json()["error"]
            assert (error["code"], error["param"]) == (code, "cache")
            assert why in error["message"]
        ordered = server.post("/rag/query", query="What?", order="cache", max_tokens=1)
        assert ordered.status_code == (400 if flag == "--deterministic" else 200)
        assert server.post("/v1/completions", model="default", prompt="Once", max_tokens=1).status_code == 200
    finally:
        server.stop()
