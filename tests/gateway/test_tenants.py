"""Two tenants of one server: nothing of one reaches the other, by any way there is."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from keyed_server import Keyed
from server_process import wait_for

SECRET = "The vault of Orlan opens with the word marmalade."


@pytest.fixture(scope="module")
def tenants(keyed: Keyed) -> Keyed:
    """Ann's documents in two collections, Bob's in one; both have a document `plan` and a collection `notes`."""
    for who, collection, document in (
        ("ann", "notes", {"id": "plan", "title": "Vault", "text": SECRET, "metadata": {"level": "top"}}),
        ("ann", "open", {"id": "menu", "title": "Menu", "text": "On Monday there is soup with bread."}),
        ("bob", "notes", {"id": "plan", "title": "Garden", "text": "The tulips are planted in October."}),
    ):
        reply = keyed.post(who, "/rag/documents", documents=[document], collection=collection)
        assert reply.status_code == 200, reply.text
    return keyed


def query(who: str, keyed: Keyed, **body: Any) -> dict[str, Any]:
    reply = keyed.post(who, "/rag/query", **{"query": "What opens the vault of Orlan?", "max_tokens": 2, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_same_id_is_two_documents_and_each_sees_its_own(tenants: Keyed) -> None:
    texts = [tenants.ask(who, "GET", "/rag/documents/plan").json()["passages"][0]["text"] for who in ("ann", "bob")]
    assert texts == [SECRET, "The tulips are planted in October."]
    (own,) = tenants.ask("bob", "GET", "/rag/documents").json()["documents"]
    assert (own["document_id"], own["title"]) == ("plan", "Garden")
    assert tenants.ask("bob", "GET", "/rag/collections").json() == {
        "collections": [{"collection": "notes", "num_documents": 1}]
    }
    assert "plan" not in tenants.ask("root", "GET", "/rag/documents").text, "an operator's key is of its own tenant"


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
@pytest.mark.parametrize("collection", ["notes", "open", "default"])
def test_no_search_finds_anothers_passages(tenants: Keyed, mode: str, collection: str) -> None:
    for extra in ({}, {"filters": {"level": "top"}}, {"filters": {"$not": {"level": "none"}}}, {"top_k": 100}):
        reply = query("bob", tenants, mode=mode, collection=collection, **extra)
        assert {s["document_id"] for s in reply["sources"]} <= {"plan"}
        assert "marmalade" not in json.dumps(reply)
    assert query("ann", tenants, collection="notes", mode=mode)["sources"][0]["text"] == SECRET


def test_equal_texts_of_two_tenants_are_no_twins(tenants: Keyed) -> None:
    for who in ("ann", "bob"):
        tenants.post(who, "/rag/documents", documents=[{"id": f"of-{who}", "text": "Owls see well."}], collection="tw")
    (source,) = query("bob", tenants, query="owls", collection="tw")["sources"]
    assert (source["document_id"], source["also_in"]) == ("of-bob", [])
    for who in ("ann", "bob"):
        assert tenants.ask(who, "DELETE", f"/rag/documents/of-{who}").status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_anothers_document_is_as_unknown_as_one_that_is_not_there(tenants: Keyed, method: str) -> None:
    theirs, none = (tenants.ask("bob", method, f"/rag/documents/{name}") for name in ("menu", "nope"))
    assert theirs.status_code == none.status_code == 404
    assert theirs.text.replace("menu", "nope") == none.text
    assert tenants.ask("ann", "GET", "/rag/documents/menu").status_code == 200


def test_anothers_job_is_as_unknown_as_one_that_is_not_there(tenants: Keyed) -> None:
    body = {"documents": [{"id": "slow", "text": "Snails are slow."}], "collection": "jobs"}
    job = tenants.ask("ann", "POST", "/rag/documents?wait=false", json=body).json()["job_id"]
    unknown = uuid.uuid4().hex
    for method, path in (("GET", "/rag/jobs/{}"), ("POST", "/rag/jobs/{}/retry")):
        theirs, none = (tenants.ask("bob", method, path.format(i)) for i in (job, unknown))
        assert theirs.status_code == none.status_code == 404
        assert theirs.text.replace(job, unknown) == none.text
    wait_for(lambda: tenants.ask("ann", "GET", f"/rag/jobs/{job}").json()["state"] == "done", 30)
    assert tenants.ask("bob", "GET", f"/rag/jobs/{job}").status_code == 404
    assert tenants.ask("ann", "DELETE", "/rag/documents/slow").status_code == 200


def test_anothers_conversation_is_as_unknown_as_one_that_is_not_there(tenants: Keyed) -> None:
    first = query("ann", tenants, collection="notes", conversation_id="new")
    name = first["conversation_id"]
    for other in (name, "conv-unknown"):
        reply = tenants.post("bob", "/rag/query", query="What was said?", conversation_id=other, max_tokens=2)
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == f"there is no conversation {other!r}"
    mine = query("ann", tenants, collection="notes", conversation_id=name, query="And then?")
    assert cached(mine) >= first["usage"]["prompt_tokens"] - 16
    limited = tenants.post("ann_limited", "/rag/query", query="x", collection="open", conversation_id=name)
    assert limited.status_code == 404, "a key that may not use its passages' collection may not go on with it"


PROMPT = "The merger of Orlan and Kelmar will be announced on the ninth of May. " * 4


def routes(secret: str) -> list[tuple[str, dict[str, Any]]]:
    """Every way to put a text in front of the model."""
    few = {"model": "default", "max_tokens": 1}
    system = [{"role": "system", "content": secret}, {"role": "user", "content": "Hi"}]
    return [
        ("/v1/completions", {**few, "prompt": secret}),
        ("/v1/completions", {**few, "prompt": list(secret.encode())}),
        ("/v1/completions", {**few, "prompt": secret, "n": 2}),
        ("/v1/chat/completions", {**few, "messages": [{"role": "user", "content": secret}]}),
        ("/v1/chat/completions", {**few, "messages": system}),
        ("/v1/chat/completions", {**few, "messages": system[1:], "documents": [{"text": secret}]}),
        ("/rag/query", {"query": secret, "collection": "none", "history": [], "max_tokens": 1}),
        ("/rag/query", {"query": "tulips", "system": secret, "collection": "notes", "max_tokens": 1}),
        ("/rag/query", {"query": "tulips", "collection": "same", "max_tokens": 1}),
    ]


@pytest.mark.parametrize("at", range(len(routes(""))))
def test_cached_tokens_never_tell_what_another_tenant_sent(tenants: Keyed, at: int) -> None:
    path, body = routes(PROMPT + str(at))[at]
    if body.get("collection") == "same":
        for who in ("ann", "bob"):
            document = {"id": "same", "title": "T", "text": PROMPT}
            tenants.post(who, "/rag/documents", documents=[document], collection="same")
    # What Bob finds without Ann, in a scope of his own that has seen nothing yet, is what he must find after her.
    fresh = f"fresh{at}"
    tenants.keys[fresh] = tenants.command("create", "--tenant", fresh, "--role", "ingest")
    if body.get("collection") == "same":
        tenants.post(fresh, "/rag/documents", documents=[document], collection="same")
    for _ in range(2):
        assert tenants.post("ann", path, **body).status_code == 200
    asked, again = (tenants.post(fresh, path, **body).json() for _ in range(2))
    assert cached(asked) == 0
    assert cached(again) > 0 or asked["usage"]["prompt_tokens"] == 0


def test_the_key_decides_whose_cache_it_is_and_no_field_does(tenants: Keyed) -> None:
    body: dict[str, Any] = {"model": "default", "max_tokens": 1}
    for field in ("user", "prompt_cache_key", "safety_identifier"):
        body["prompt"] = f"A {field} can be copied. " * 6
        tenants.post("ann", "/v1/completions", **body, **{field: "acme"})
        reply = tenants.post("bob", "/v1/completions", **body, **{field: "acme"}).json()
        assert cached(reply) == 0
        reply = tenants.post("ann_reads", "/v1/completions", **body, **{field: "other"}).json()
        assert cached(reply) > 0, "another key of the same tenant"
    for field in ("cache_salt", "tenant", "scope"):
        for path, sent in (("/v1/completions", body), ("/rag/query", {"query": "x"})):
            reply = tenants.post("bob", path, **sent, **{field: "acme"})
            assert reply.status_code == 400
            assert field in reply.json()["error"]["message"]


def test_a_limited_key_sees_its_collections_and_the_rest_as_unknown(tenants: Keyed) -> None:
    who = "ann_limited"
    assert tenants.ask(who, "GET", "/rag/collections").json()["collections"] == [
        {"collection": "open", "num_documents": 1}
    ]
    for params, expected in (({}, ["menu"]), ({"collection": "open"}, ["menu"]), ({"collection": "notes"}, [])):
        documents = tenants.ask(who, "GET", "/rag/documents", params=params).json()["documents"]
        assert [d["document_id"] for d in documents] == expected
    for method in ("GET", "DELETE"):
        theirs, none = (tenants.ask(who, method, f"/rag/documents/{name}") for name in ("plan", "nope"))
        assert theirs.status_code == none.status_code == 404
        assert theirs.text.replace("plan", "nope") == none.text
    hidden, unknown = (query(who, tenants, collection=name) for name in ("notes", "unknown"))
    assert hidden["no_context"]
    assert (hidden["answer"], hidden["sources"]) == (unknown["answer"], unknown["sources"])
    for name in ("notes", "unknown"):
        bad = tenants.post(who, "/rag/query", query="x", collection=name, filters={"a": {"$near": 1}})
        assert bad.status_code == 400
    assert query(who, tenants, query="What soup?", collection="open")["sources"][0]["document_id"] == "menu"
    body = {"documents": [{"id": "plan", "text": "x"}], "collection": "notes"}
    assert tenants.post(who, "/rag/documents", **body).status_code == 403
    taken = tenants.post(who, "/rag/documents", **{**body, "collection": "open"})
    assert (taken.status_code, "notes" in taken.text) == (422, False)
    job = tenants.ask("ann", "POST", "/rag/documents?wait=false", json=body).json()["job_id"]
    assert tenants.ask(who, "GET", f"/rag/jobs/{job}").status_code == 404
    wait_for(lambda: tenants.ask("ann", "GET", f"/rag/jobs/{job}").json()["state"] == "done", 30)
    tenants.post("ann", "/rag/documents", collection="notes",
                 documents=[{"id": "plan", "title": "Vault", "text": SECRET, "metadata": {"level": "top"}}])  # fmt: skip
