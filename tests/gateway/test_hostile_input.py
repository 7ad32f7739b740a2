"""What a hostile client can send: names, bodies and heads. A 4xx or a harmless label, never a 500, never a file."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from keyed_server import Keyed

DISPOSITION = b'Content-Disposition: form-data; name="%s"; filename="%s"'


def form(keyed: Keyed, *parts: tuple[bytes, bytes]) -> tuple[int, dict[str, object]]:
    """Send a form byte by byte as given: its parts' heads and contents."""
    body = b"".join(b"--XX\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + b"--XX--\r\n"
    reply = keyed.ask("ann", "POST", "/rag/documents", content=body,
                      headers={"Content-Type": "multipart/form-data; boundary=XX"})  # fmt: skip
    return reply.status_code, reply.json()


def files_under(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (b"../../outside.txt", "outside.txt"),
        (b"/etc/cron.d/outside.txt", "outside.txt"),
        (b"a/../../outside.txt", "outside.txt"),
        (b"C:\\\\Windows\\\\outside.txt", "outside.txt"),
        (b"out\x00side.txt", "outside.txt"),
        (b"out\x1bside.txt", "outside.txt"),
        (b"../" * 200 + b"outside.txt", "outside.txt"),
        (b"o" * 3000 + b".txt", None),
        (b"..", None),
        (b"\xff\xfe.txt", None),
        (b'"; x="', None),
    ],
)
def test_a_file_name_is_a_label_or_refused_and_never_a_path(keyed: Keyed, name: bytes, label: str | None) -> None:
    folder = keyed.server.data_dir.parent
    before = files_under(folder)
    status, reply = form(keyed, (DISPOSITION % (b"file", name), b"Some plain words."))
    if label is None:
        assert 400 <= status < 500
    else:
        assert status == 200, reply
        (document,) = reply["documents"]
        assert document["source"] == label
        assert keyed.ask("ann", "DELETE", f"/rag/documents/{document['document_id']}").status_code == 200
    assert files_under(folder) - before <= {Path("data/foreword.sqlite-shm"), Path("data/foreword.sqlite-wal")}


@pytest.mark.parametrize(
    "bad", ["../x", "/etc/passwd", "a/../../b", "a\\b", "a\0b", "a\nb", "x" * 10_000, "", ".", ".."]
)
def test_ids_and_collections_that_could_be_paths_are_refused(keyed: Keyed, bad: str) -> None:
    before = files_under(keyed.server.data_dir.parent)
    reply = keyed.post("ann", "/rag/documents", documents=[{"id": bad, "text": "Some words."}])
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_id")
    if bad not in (".", ".."):  # harmless as the name of a collection, which no URL holds as a step
        for path, body in (
            ("/rag/documents", {"documents": [{"text": "Some words."}]}),
            ("/rag/query", {"query": "words"}),
        ):
            reply = keyed.post("ann", path, **body, collection=bad)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "collection"
    assert keyed.ask("ann", "GET", "/rag/documents", params={"collection": bad}).json()["documents"] == []
    assert files_under(keyed.server.data_dir.parent) == before


@pytest.mark.parametrize("path", ["%00", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%ff", "%0a", "a" * 5000, "..%5c", "%25"])
def test_odd_ids_in_a_url_are_not_found(keyed: Keyed, path: str) -> None:
    for method, at in (("GET", "documents"), ("DELETE", "documents"), ("GET", "jobs")):
        assert keyed.ask("ann", method, f"/rag/{at}/{path}").status_code == 404


FIELD = b'Content-Disposition: form-data; name="%s"'
FILE = (DISPOSITION % (b"file", b"a.txt"), b"words")


@pytest.mark.parametrize(
    ("parts", "status", "word"),
    [
        (((FIELD % b"collection" + b"\r\nContent-Type: text/plain; charset=bogus", b"x"), FILE), 400, "decoded"),
        (((FIELD % b"collection", b"\xff"), FILE), 400, "decoded"),
        (((DISPOSITION % (b"collection", b"x"), b"x"), FILE), 400, "collection must be a text"),
        (((FIELD % b"collection", b"a"), (FIELD % b"collection", b"../b"), FILE), 200, ""),
        ((), 400, "no file"),
        (((FIELD % b"file", b"text, not a file"),), 400, "no file"),
        (((b"X-Y: z", b"x"),), 400, "multipart"),
        ((FILE,) * 21, 413, "20 are allowed"),
        ((FILE,) * 3000, 413, "20 files"),
        (((FIELD % b"a", b"x"),) * 3000, 413, "too many fields"),
        (((DISPOSITION % (b"file", b"b.txt"), b"w" * 1_000_001),), 413, "1000000 are allowed"),
    ],
)
def test_forms_are_bounded_and_faults_are_named(
    keyed: Keyed, parts: tuple[tuple[bytes, bytes], ...], status: int, word: str
) -> None:
    got, reply = form(keyed, *parts)
    assert got == status, reply
    if status == 200:
        assert [d["collection"] for d in reply["documents"]] == ["a"], "the first one counts"
    else:
        assert word in reply["error"]["message"]


def test_texts_in_json_are_bounded_like_files(keyed: Keyed) -> None:
    many = keyed.post("ann", "/rag/documents", documents=[{"text": "x"}] * 21)
    big = keyed.post("ann", "/rag/documents", documents=[{"text": "ok"}, {"text": "w" * 1_000_001}])
    assert [(r.status_code, r.json()["error"]["code"]) for r in (many, big)] == [(413, "request_too_large")] * 2
    assert "documents[1]" in big.json()["error"]["message"]


DEEP = {
    "metadata": ("/rag/documents", b'{"documents":[{"text":"x","metadata":{"a":%s}}]}'),
    "filters": ("/rag/query", b'{"query":"x","filters":{"a":{"$in":%s}}}'),
    "tool calls": ("/v1/chat/completions",
                   b'{"model":"default","messages":[{"role":"user","content":"x","tool_calls":[{"a":%s}]}]}'),
    "ignored": ("/v1/chat/completions", b'{"model":"default","user":%s,"messages":[{"role":"user","content":"x"}]}'),
    "refused": ("/v1/completions", b'{"model":"default","prompt":"x","tools":%s}'),
}  # fmt: skip


@pytest.mark.parametrize("depth", [65, 950, 985, 200_000])
@pytest.mark.parametrize("where", DEEP)
def test_deeply_nested_bodies_are_refused(keyed: Keyed, where: str, depth: int) -> None:
    path, body = DEEP[where]
    reply = keyed.ask("ann", "POST", path, content=body % (b"[" * depth + b"1" + b"]" * depth))
    assert reply.status_code == 400, reply.text
    assert "nested too deeply" in reply.json()["error"]["message"]
    assert keyed.ask("ann", "GET", "/rag/documents").status_code == 200


def test_a_list_of_lists_that_is_not_deep_is_kept_as_it_is(keyed: Keyed) -> None:
    metadata = {"a": [[[i]] for i in range(100)]}
    reply = keyed.post("ann", "/rag/documents", documents=[{"id": "wide", "text": "Wide.", "metadata": metadata}])
    assert reply.json()["documents"][0]["metadata"] == metadata
    keyed.ask("ann", "DELETE", "/rag/documents/wide")


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl", "deep.html"])
def test_deeply_nested_files_are_refused(keyed: Keyed, name: str) -> None:
    data = {"deep.html": b"<div>" * 3000 + b"words"}.get(name, b"[" * 3000 + b'"words"' + b"]" * 3000)
    status, reply = form(keyed, (DISPOSITION % (b"file", name.encode()), data))
    assert (status, reply["error"]["code"]) == (422, "bad_document")


@pytest.mark.parametrize("query", ["limit=%C2%B2", "limit=" + "9" * 5000, "offset=-1", "limit=1e3", "limit=10001"])
def test_numbers_in_a_url_are_numbers_or_refused(keyed: Keyed, query: str) -> None:
    reply = keyed.ask("ann", "GET", f"/rag/documents?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.split("=")[0])


def test_too_many_or_too_long_headers_are_refused_before_anything_else(keyed: Keyed) -> None:
    for headers in ({f"x-{i}": "y" for i in range(120)}, {"x": "y" * 40_000}):
        for path in ("/health/live", "/nowhere"):
            reply = keyed.ask(None, "GET", path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (431, "headers_too_large")
    assert keyed.ask(None, "GET", "/health/live", headers={"x": "y" * 20_000}).status_code == 200


def raw(keyed: Keyed, data: bytes) -> bytes:
    """The first line of what the server answers to bytes."""
    with socket.create_connection(("127.0.0.1", int(keyed.server.url.rsplit(":", 1)[1])), timeout=30) as s:
        s.sendall(data)
        with s.makefile("rb") as lines:
            return lines.readline()


def test_a_head_without_end_is_cut_off(keyed: Keyed) -> None:
    # 64 KiB and a little: less than the server reads at once, so that no unread rest makes it reset the connection.
    assert b"431" in raw(keyed, b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 66_000)
    assert b"431" in raw(keyed, b"GET /" + b"y" * 66_000)
    assert b"200" in raw(keyed, b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 30_000 + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"POST /rag/query HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
         b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", b"403"),
        (b"GET //metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"401"),
        (b"GET http://other/metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"401"),
        (b"GET /./metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"401"),
    ],
)  # fmt: skip
def test_broken_and_odd_requests_get_an_answer_and_nothing_else(keyed: Keyed, data: bytes, status: bytes) -> None:
    assert status in raw(keyed, data)
    assert keyed.ask(None, "GET", "/health/ready").status_code == 200


@pytest.mark.parametrize(
    "extra",
    [{"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, {"chat_template_kwargs": {"a": 1}},
     {"add_generation_prompt": False}, {"chat_template_url": "file:///etc/passwd"}],
)  # fmt: skip
def test_a_callers_chat_template_is_refused(keyed: Keyed, extra: dict[str, object]) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    reply = keyed.post("ann", "/v1/chat/completions", **body, **extra)
    assert reply.status_code == 400
    assert next(iter(extra)) in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "data:image/png;base64,eA"]
)
def test_an_image_url_is_refused_and_not_fetched(keyed: Keyed, url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "default", "messages": [{"role": "user", "content": content}]}
    reply = keyed.ask("ann", "POST", "/v1/chat/completions", content=json.dumps(body))
    assert reply.status_code == 400
    assert "image_url" in reply.json()["error"]["message"]
