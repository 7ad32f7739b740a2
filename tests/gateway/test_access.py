"""Who may call what: keys, roles, and nothing learnt without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from keyed_server import Keyed
from server_process import REPO

from gateway.openapi import ENDPOINTS

OPEN = ["/", "/docs", "/docs/openapi.json", "/health/live", "/health/ready"]
NEEDED: dict[tuple[str, str], str] = {
    ("post", "/rag/query"): "query",
    ("get", "/rag/documents"): "query",
    ("get", "/rag/documents/{document_id}"): "query",
    ("get", "/rag/collections"): "query",
    ("post", "/v1/chat/completions"): "query",
    ("post", "/v1/completions"): "query",
    ("post", "/v1/embeddings"): "query",
    ("get", "/v1/models"): "query",
    ("get", "/v1/models/{model}"): "query",
    ("post", "/rag/documents"): "ingest",
    ("delete", "/rag/documents/{document_id}"): "ingest",
    ("get", "/rag/jobs/{job_id}"): "ingest",
    ("post", "/rag/jobs/{job_id}/retry"): "ingest",
    ("get", "/metrics"): "admin",
    ("get", "/debug/scheduler"): "admin",
    ("get", "/debug/cache"): "admin",
}
HOLDERS = {"query": "ann_reads", "ingest": "ann", "admin": "root"}


def url_of(path: str) -> str:
    return path.replace("{document_id}", "none").replace("{job_id}", "none").replace("{model}", "none")


def test_the_server_is_open_until_the_first_key_and_closed_at_once_after(keyed: Keyed) -> None:
    paths = {"/rag/documents": 200, "/metrics": 200, "/nowhere": 404}
    assert {path: keyed.before[path] for path in paths} == paths
    assert [keyed.ask(None, "GET", path).status_code for path in paths] == [401, 401, 401]


def test_without_keys_a_page_of_another_site_is_refused(keyed: Keyed) -> None:
    by_site = {site: keyed.before[f"from {site}"] for site in ("cross-site", "same-site", "same-origin", "none")}
    assert by_site == {"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200}
    assert keyed.ask("ann", "GET", "/rag/documents", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_every_endpoint_is_open_by_name_or_needs_a_role(keyed: Keyed) -> None:
    assert {(m, p) for m, p, _, _ in ENDPOINTS if p not in OPEN} == set(NEEDED)
    roles = list(HOLDERS)
    for (method, path), needed in NEEDED.items():
        for role, holder in HOLDERS.items():
            reply = keyed.ask(holder, method, url_of(path))
            if roles.index(role) < roles.index(needed):
                assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden"), (role, path)
                assert needed in reply.json()["error"]["message"]
            else:
                assert reply.status_code not in (401, 403, 500), (role, path)


def test_a_wrong_key_learns_nothing_about_paths_and_ids(keyed: Keyed) -> None:
    keyed.post("ann", "/rag/documents", documents=[{"id": "seen", "text": "There is such a document."}])
    places = [
        *((method, url_of(path)) for method, path in NEEDED),
        *(("GET", "/rag/documents/seen"), ("GET", "/nowhere"), ("DELETE", "/v1/models"), ("OPTIONS", "/rag/query")),
        *(("GET", "/health/live/"), ("GET", "/x//"), ("GET", "/docs/openapi.json/x"), ("POST", "/%2e%2e/")),
    ]
    for headers in ({}, {"Authorization": "Bearer fw-000000000000-" + "x" * 43}):
        replies = [keyed.ask(None, m, p, headers=headers, content=b'{"x":') for m, p in places]
        assert [(r.request.method, r.request.url.path) for r in replies if r.status_code != 401] == []
        assert {r.headers["www-authenticate"] for r in replies} == {'Bearer realm="foreword"'}
        assert len({r.content for r in replies}) == 1
        error = replies[0].json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["type"]) == ("unauthorized", "invalid_request_error")
    keyed.ask("ann", "DELETE", "/rag/documents/seen")


def test_what_is_open_needs_no_key_and_minds_no_wrong_one(keyed: Keyed) -> None:
    for path in OPEN:
        for headers in ({}, {"X-API-Key": "wrong"}):
            assert keyed.ask(None, "GET", path, headers=headers).status_code == 200, path


def test_the_description_says_what_needs_a_key(keyed: Keyed) -> None:
    spec = keyed.ask(None, "GET", "/docs/openapi.json").json()
    assert spec["security"] == [{"bearer": []}, {"header": []}]
    assert set(spec["components"]["securitySchemes"]) == {"bearer", "header"}
    assert [p for p, methods in spec["paths"].items() if methods.get("get", {}).get("security") == []] == sorted(
        OPEN, key=list(spec["paths"]).index
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer KEY"}, 200),
        ({"authorization": "bearer  KEY"}, 200),
        ({"X-API-Key": "KEY"}, 200),
        ({"X-API-Key": "KEY", "Authorization": "Bearer KEY"}, 200),
        ({"X-API-Key": "KEY", "Authorization": "Bearer other"}, 401),
        ({"Authorization": "Basic KEY"}, 401),
        ({"Authorization": "KEY"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Cookie": "key=KEY"}, 401),
    ],
)
def test_a_key_comes_in_one_of_two_headers(keyed: Keyed, headers: dict[str, str], status: int) -> None:
    sent = {name: value.replace("KEY", keyed.keys["ann_reads"]) for name, value in headers.items()}
    assert keyed.ask(None, "GET", "/rag/collections", headers=sent).status_code == status
    assert keyed.ask(None, "GET", f"/rag/collections?api_key={keyed.keys['ann_reads']}").status_code == 401


def test_a_running_server_takes_new_keys_and_drops_revoked_ones(keyed: Keyed) -> None:
    keyed.keys["guest"] = keyed.command("create", "--tenant", "guest")
    assert keyed.ask("guest", "GET", "/rag/collections").status_code == 200
    keyed.command("revoke", keyed.keys["guest"].split("-")[1])
    assert keyed.ask("guest", "GET", "/rag/collections").status_code == 401
    assert keyed.ask("ann", "GET", "/rag/collections").status_code == 200


def test_openais_client_is_let_in_by_its_key(keyed: Keyed) -> None:
    def ask(key: str) -> Any:
        with openai.OpenAI(base_url=f"{keyed.server.url}/v1", api_key=key, max_retries=0) as client:
            return client.completions.create(model="default", prompt="One two", max_tokens=2)

    assert ask(keyed.keys["ann_reads"]).usage.completion_tokens == 2
    with pytest.raises(openai.AuthenticationError, match="not known"):
        ask("sk-wrong")


def test_commands_send_the_key_of_their_environment(keyed: Keyed, tmp_path: Path) -> None:
    (tmp_path / "cat.txt").write_text("The harbour cat is called Bosun.", encoding="utf-8")
    where = ["--data-dir", str(keyed.server.data_dir), "--collection", "cli"]

    def run(*args: str, key: str | None) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k != "FOREWORD_API_KEY"}
        environment |= {} if key is None else {"FOREWORD_API_KEY": key}
        command = [sys.executable, "-m", "gateway.cli", *args, *where]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment)

    added = run("ingest", str(tmp_path), key=keyed.keys["ann"])
    assert (added.returncode, "1 of 1 files" in added.stdout) == (0, True), added.stderr
    asked = run("ask", "cat?", "--max-tokens", "1", key=keyed.keys["ann_reads"])
    assert (asked.returncode, "cat" in asked.stdout) == (0, True), asked.stderr
    for args in (["ingest", str(tmp_path)], ["ask", "cat?"]):
        refused = run(*args, key=None)
        assert refused.returncode == 1
        assert "an API key is needed" in refused.stderr
    (document,) = keyed.ask("ann", "GET", "/rag/documents?collection=cli").json()["documents"]
    keyed.ask("ann", "DELETE", f"/rag/documents/{document['document_id']}")


def test_the_page_keeps_a_key_for_the_session_only_and_sends_it(keyed: Keyed) -> None:
    page = keyed.ask(None, "GET", "/").text
    assert 'id="key" aria-label="API key"' in page
    assert "localStorage" not in page
    assert page.count("sessionStorage") == 2, "read once, written once"
    assert page.count("fetch(") == page.count("...auth()") == 2, "each request carries the key"
