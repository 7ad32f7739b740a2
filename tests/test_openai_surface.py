"""OpenAI's routes of the whole server, with the real models, over a real socket: as an unchanged client sees them."""

from __future__ import annotations

import asyncio
import base64
import re
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
    folder = tmp_path_factory.mktemp("server")
    (folder / "templated.jinja").write_text("{% block passage %}" + "page " * 50 + "{{ text }}\n{% endblock %}")
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--prompt-templates", str(folder))
    s = Server(folder, *flags)
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


QUESTION = "When was the lighthouse of Kelmar built?"
EARLIER = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "On the coast."}]


@pytest.fixture(scope="module")
def rag_reply(server: Server) -> dict[str, Any]:
    """What /rag/query says to the question."""
    reply = server.post("/rag/query", query=QUESTION, collection="facts", max_tokens=40)
    assert reply.status_code == 200, reply.text
    return reply.json()


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """A reply's fields that do not depend on what ran before it."""
    sources = [{k: v for k, v in s.items() if k != "cache"} for s in report["sources"]]
    return {"sources": sources, **{k: report[k] for k in ("no_context", "dropped", "language")}}


@pytest.mark.parametrize(
    "how", [{"model": "rag:facts"}, {"model": "default", "rag": {"collection": "facts"}}], ids=["model", "field"]
)
def test_a_chat_over_documents_says_what_rag_query_says(
    client: openai.OpenAI, rag_reply: dict[str, Any], how: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}
    model, extra = how["model"], {k: v for k, v in how.items() if k != "model"}
    whole = client.chat.completions.create(model=model, extra_body=extra, **asked)
    message = whole.choices[0].message
    assert message.content == rag_reply["answer"]
    assert whole.usage.prompt_tokens == rag_reply["usage"]["prompt_tokens"]
    assert without_times(whole.model_extra) == without_times(rag_reply)
    assert [a.citation for a in message.annotations] == rag_reply["citations"] != []
    annotation = message.annotations[0]
    start, end = annotation.url_citation.start_index, annotation.url_citation.end_index
    assert [start, end] == rag_reply["citations"][0]["answer_span"]
    assert "1874" in message.content[start:end]
    assert annotation.url_citation.title == "Lighthouse"
    shown = httpx.get(annotation.url_citation.url).json()
    assert shown["document_id"] == "lamp"
    chunks = list(client.chat.completions.create(model=model, extra_body=extra, stream=True, **asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    annotated, last = chunks[-2], chunks[-1]
    assert annotated.choices[0].finish_reason is None
    assert [a["citation"] for a in annotated.choices[0].delta.annotations] == rag_reply["citations"]
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert [s["passage_id"] for s in chunks[0].sources] == [s["passage_id"] for s in rag_reply["sources"]]
    assert without_times(last.model_extra) == without_times(rag_reply)
    assert last.sources[0]["cache"]["computed_tokens"] == 0


def test_earlier_messages_are_the_history_and_the_system_message_the_system_text(server: Server) -> None:
    system = "Answer in one word."
    given = {"collection": "facts", "top_k": 2, "mode": "lexical", "language": "fr"}
    by_rag = server.post("/rag/query", query=QUESTION, history=EARLIER, system=system, max_tokens=12, **given).json()
    messages = [{"role": "developer", "content": system}, *EARLIER, {"role": "user", "content": QUESTION}]
    body = {"model": "default", "messages": messages, "max_tokens": 12}
    by_chat = server.post("/v1/chat/completions", **body, rag=given).json()
    assert by_chat["choices"][0]["message"]["content"] == by_rag["answer"]
    assert by_chat["usage"]["prompt_tokens"] == by_rag["usage"]["prompt_tokens"]
    details = by_chat["usage"]["prompt_tokens_details"]
    assert details["computed_tokens"] <= 16, "the same prompt, found in the cache"
    assert by_chat["language"] == by_rag["language"] == "French"


def test_each_of_several_continuations_has_its_own_citations(server: Server) -> None:
    body = {"model": "rag:facts", "messages": [{"role": "user", "content": QUESTION}], "n": 3, "max_tokens": 30}
    reply = server.post("/v1/chat/completions", **body, temperature=1.2, seed=3, logprobs=True).json()
    texts = [c["message"]["content"] for c in reply["choices"]]
    assert len(set(texts)) > 1
    for choice in reply["choices"]:
        assert choice["logprobs"]["content"]
        for a in choice["message"]["annotations"]:
            start, end = a["citation"]["answer_span"]
            assert 0 <= start < end <= len(choice["message"]["content"])


def test_a_chat_that_finds_nothing_gets_the_fixed_reply(server: Server) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    rag = {"collection": "facts", "filters": {"lang": "xx"}}
    body = {"model": "default", "messages": messages, "rag": rag, "n": 2}
    whole = server.post("/v1/chat/completions", **body).json()
    assert whole["no_context"]
    assert {c["message"]["content"] for c in whole["choices"]} == {"I found nothing about this in the documents."}
    assert whole["usage"]["total_tokens"] == 0
    chunks = [d for _, d in read_events(server.post("/v1/chat/completions", **body, stream=True)) if d != "[DONE]"]
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"][0]["index"] == 1]
    assert "".join(texts) == whole["choices"][1]["message"]["content"]
    assert chunks[-1]["no_context"]


def test_a_documents_own_address_is_what_a_citation_links_to(server: Server) -> None:
    url, (title, text) = "https://example.org/lamp", TEXTS["lamp"]
    documents = [{"title": title, "text": text, "metadata": {"url": url}}]
    server.post("/rag/documents", documents=documents, collection="linked")
    body = {"model": "rag:linked", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}
    message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["annotations"][0]["url_citation"]["url"] == url
    assert "rag:linked" in {m["id"] for m in server.client.get("/v1/models").json()["data"]}
    assert server.client.get("/v1/models/rag:linked").json()["task"] == "rag"
    missing = server.client.get("/v1/models/rag:unknown")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


ASK = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize(
    ("change", "status", "param", "word"),
    [
        ({"model": "rag:nowhere"}, 404, "model", "nowhere"),
        ({"model": "rag:"}, 400, "rag.collection", "collection"),
        ({"model": "rag:facts", "rag": {"collection": "linked"}}, 400, "rag.collection", "two collections"),
        ({"rag": {"top_k": 0}}, 400, "rag.top_k", "top_k"),
        ({"rag": {"min_score": {"dense": 2, "x": 1}}}, 400, "rag.min_score", "min_score"),
        ({"rag": {"colection": "x"}}, 400, "rag", "colection"),
        ({"rag": {"language": "x y z 1"}}, 400, "rag.language", "language"),
        ({"rag": {}, "documents": [{"text": "x"}]}, 400, "documents", "exclude"),
        ({"rag": {}, "messages": [*ASK, {"role": "assistant", "content": "In"}]}, 400, "messages[1]", "last message"),
        ({"rag": {}, "messages": [{"role": "user", "content": " "}]}, 400, "messages[0]", "not empty"),
        (
            {"rag": {"collection": "facts"}, "messages": [{"role": "user", "content": "why " * 3000}]},
            400,
            "messages",
            "2048",
        ),
    ],
)
def test_what_a_chat_over_documents_cannot_be_is_refused_by_name(
    server: Server, change: dict[str, Any], status: int, param: str, word: str
) -> None:
    reply = server.post("/v1/chat/completions", **{"model": "default", "messages": ASK, "max_tokens": 4, **change})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert word in error["message"]


def test_the_async_client_chats_streams_embeds_and_hears_what_is_wrong(
    server: Server, rag_reply: dict[str, Any]
) -> None:
    async def use() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as c:
            ask: dict[str, Any] = {"model": "rag:facts", "messages": ASK, "max_tokens": 40}
            streams = await asyncio.gather(*(c.chat.completions.create(**ask, stream=True) for _ in range(3)))
            for stream in streams:
                text = "".join([x.choices[0].delta.content or "" async for x in stream])
                assert text == rag_reply["answer"]
            async with c.chat.completions.stream(**ask) as helper:
                done = await helper.get_final_completion()
            assert done.choices[0].message.content == rag_reply["answer"]
            texts = [text for _, text in TEXTS.values()]
            rows = (await c.embeddings.create(model="default", input=[QUESTION, *texts])).data
            question, *passages = (np.asarray(r.embedding) for r in rows)
            assert np.argmax([question @ p for p in passages]) == list(TEXTS).index("lamp")
            with pytest.raises(openai.NotFoundError) as missing:
                await c.models.retrieve("gpt-4o")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await c.chat.completions.create(**{**ask, "temperature": 1000})
            assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")

    asyncio.run(use())


def test_the_stream_helper_of_the_client_assembles_n_choices_and_logprobs(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "default", "messages": ASK, "stop": "e", "n": 2, "seed": 1}
    with client.chat.completions.stream(**body, logprobs=True, stream_options={"include_usage": True}) as stream:
        done = stream.get_final_completion()
    whole = client.chat.completions.create(**body, logprobs=True)
    assert [c.message.content for c in done.choices] == [c.message.content for c in whole.choices]
    assert [len(c.logprobs.content) for c in done.choices] == [len(c.logprobs.content) for c in whole.choices]
    assert done.usage.completion_tokens == whole.usage.completion_tokens


def chat(server: Server, messages: list[dict[str, Any]], **extra: Any) -> httpx.Response:
    body = {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0, **extra}
    return server.post("/v1/chat/completions", **body)


def test_a_prompt_that_is_too_long_is_told_the_true_limit_and_both_numbers(server: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "word " * 2100}]}),
        ("/v1/completions", {"model": "default", "prompt": [7] * 2048}),
        ("/rag/query", {"query": "word " * 2100, "collection": "facts"}),
    ):
        for stream in (False, True):
            reply = server.post(path, **body, max_tokens=33, stream=stream)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
            limit, prompt, asked = (int(n) for n in re.findall(r"\d+", reply.json()["error"]["message"]))
            assert (limit, asked) == (2048, 33)
            assert prompt >= 2048


def test_more_output_than_there_is_room_for_is_cut_on_every_route_and_in_streams(server: Server) -> None:
    text = "word " * 1985
    done = chat(server, [{"role": "user", "content": text}], max_tokens=2048, ignore_eos=True).json()
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["total_tokens"] == 2048
    raw = chat(server, [{"role": "user", "content": text}], max_tokens=2048, ignore_eos=True, stream=True)
    last = [d for _, d in read_events(raw) if d != "[DONE]"][-1]
    assert (last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]) == ("length", 2048)


def test_an_empty_message_is_answered_and_harms_nobody(server: Server) -> None:
    assert chat(server, [{"role": "user", "content": ""}]).status_code == 200
    assert chat(server, ASK).status_code == 200


def test_tool_turns_without_content_are_in_the_prompt(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC+7"}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "It is 14:05."}
    counts = []
    for messages in ([*ASK], [*ASK, turn], [*ASK, turn, tool]):
        reply = chat(server, [*messages, {"role": "user", "content": "What time is it?"}])
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["usage"]["prompt_tokens"])
    assert counts[0] + 20 < counts[1] < counts[2]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_content_in_parts_is_the_joined_text_for_every_role(server: Server, role: str) -> None:
    parts = [{"type": "text", "text": "A=1. "}, {"type": "text", "text": "B=2."}]
    replies = [chat(server, [{"role": role, "content": c}, *ASK]).json() for c in (parts, "A=1. B=2.")]
    assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
    assert replies[0]["choices"] == replies[1]["choices"]
    refused = chat(server, [{"role": role, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, *ASK])
    assert refused.status_code == 400
    assert "image_url" in refused.json()["error"]["message"]


def test_a_body_of_another_content_type_is_read_as_json_or_refused_as_none(server: Server) -> None:
    headers = {"Content-Type": "text/plain"}
    good = server.client.post("/v1/chat/completions", json={"model": "default", "messages": ASK}, headers=headers)
    assert good.status_code == 200
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/rag/query"):
        bad = server.client.post(path, content=b"model=default", headers=headers)
        assert bad.status_code == 400
        assert set(bad.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "schema", [{"type": "not-a-type"}, {"$ref": "#"}, {"pattern": "["}, {"enum": ["x" * 100] * 20_000}]
)
def test_a_schema_is_refused_at_once_and_never_ignored(server: Server, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = chat(server, ASK, response_format=wanted)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")
    assert len(reply.json()["error"]["message"]) < 400
    for field in ("chat_template", "chat_template_kwargs"):
        assert chat(server, ASK, **{field: {"x": 1}}).status_code == 400


def test_a_stop_string_never_leaks_into_a_stream(server: Server) -> None:
    text = chat(server, ASK, max_tokens=30, ignore_eos=True).json()["choices"][0]["message"]["content"]
    for at in range(3, len(text) - 8, 29):
        stop = text[at : at + 7]
        raw = chat(server, ASK, max_tokens=30, ignore_eos=True, stop=[stop], stream=True)
        chunks = [d for _, d in read_events(raw) if d != "[DONE]"]
        streamed = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert streamed == text[: text.index(stop)]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_more_passages_than_fit_are_dropped_and_named_weakest_first(server: Server) -> None:
    documents = [{"text": f"Ledger page {i}. " + f"Item {i} costs {i} crowns. " * 24} for i in range(24)]
    assert server.post("/rag/documents", documents=documents, collection="ledger").status_code == 200
    history = [{"role": "user", "content": "Tell me of the ledger. " * 30}] * 2
    asked: dict[str, Any] = {"query": "What does item 7 cost?", "collection": "ledger", "max_tokens": 4}
    reply = server.post("/rag/query", **asked, top_k=100, history=history)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    used = [s["passage_id"] for s in body["sources"] if s["used"]]
    dropped = [d["passage_id"] for d in body["dropped"]]
    assert [s["passage_id"] for s in body["sources"]] == used + dropped
    assert 1 <= len(used) < len(body["sources"])
    assert all(d["reason"] == "token_budget" and d["num_tokens"] > 0 for d in body["dropped"])
    kinds = body["usage"]["prompt_tokens_by_kind"]
    assert kinds.keys() == {"system", "passage", "tail"}
    assert sum(n for kind in kinds.values() for n in kind.values()) == body["usage"]["prompt_tokens"] < 2048
    too_much = server.post("/rag/query", **asked, history=history * 20)
    assert (too_much.status_code, too_much.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_collections_template_writes_its_passages(server: Server) -> None:
    text = TEXTS["bridge"][1]
    tokens = {}
    for collection in ("plain", "templated"):
        server.post("/rag/documents", documents=[{"id": collection, "title": "T", "text": text}], collection=collection)
        reply = server.post("/rag/query", query="Orlan?", collection=collection, max_tokens=1, cache="off").json()
        tokens[collection] = reply["usage"]["prompt_tokens_by_kind"]
    assert tokens["templated"]["passage"]["computed_tokens"] >= tokens["plain"]["passage"]["computed_tokens"] + 48
    assert tokens["templated"]["tail"] == tokens["plain"]["tail"]


@pytest.mark.parametrize(
    ("question", "document", "fact"),
    [
        (QUESTION, "lamp", "1874"),
        ("How long does the dough of Marta's bread rest?", "bread", "nine"),
        ("How long is the Orlan bridge?", "bridge", "312"),
    ],
)
def test_every_citation_points_to_the_document_that_says_it(
    server: Server, question: str, document: str, fact: str
) -> None:
    asked = {"query": question, "collection": "facts", "max_tokens": 40}
    whole = server.post("/rag/query", **asked).json()
    streamed = [d for name, d in read_events(server.post("/rag/query", **asked, stream=True)) if name == "citation"]
    messages = [{"role": "user", "content": question}]
    by_chat = chat(server, messages, model="rag:facts", max_tokens=40).json()["choices"][0]["message"]["annotations"]
    assert whole["citations"] == streamed == [a["citation"] for a in by_chat]
    cited = next(c for c in whole["citations"] if fact in c["text"])
    assert cited["document_id"] == document
    assert whole["sources"][cited["number"] - 1]["document_id"] == document


def test_a_question_about_something_else_finds_nothing_above_the_threshold(server: Server) -> None:
    asked = {"query": "Which guitar did the astronaut play?", "collection": "facts", "min_score": {"dense": 0.5}}
    reply = server.post("/rag/query", **asked).json()
    assert reply["no_context"]
    assert reply["answer"] == "I found nothing about this in the documents."
    assert reply["sources"] == reply["citations"] == reply["dropped"] == []
    assert all(reply["timings"][k] == 0 for k in ("queue_ms", "prefill_ms", "decode_ms", "ttft_ms"))


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (
            "/rag/documents",
            b'{"documents": [{"text": "x", "metadata": {"n": 99999999999999999999}}]}',
            "metadata holds",
        ),
        ("/rag/query", b'{"query": "x", "filters": {"n": 99999999999999999999}}', "filters holds"),
        (
            "/rag/query",
            b'{"query": "x", "filters": {"n": ' + b"[" * 99_999 + b"]" * 99_999 + b"}}",
            "nested too deeply",
        ),
        (
            "/v1/embeddings",
            b'{"model": "default", "input": ' + b"[" * 99_999 + b"]" * 99_999 + b"}",
            "nested too deeply",
        ),
    ],
)
def test_numbers_and_nesting_beyond_bounds_are_the_clients_fault(
    server: Server, path: str, content: bytes, words: str
) -> None:
    reply = server.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]
    for depth in (200, 900, 990):
        nested = b'{"query": "x", "filters": {"n": ' + b"[" * depth + b"1" + b"]" * depth + b"}}"
        assert server.client.post("/rag/query", content=nested).status_code in (200, 400)
