"""The load test's own arithmetic, and locust against a small real server that speaks the protocol."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.ragbench import percentile, summarise
from loadtest.run import cached_percent, is_loopback, run_locust, summary_row
from loadtest.stream import StreamFailed, read_stream
from loadtest.workload import build_corpus, draw, make_requests

CHAT = [
    b": keep-alive",
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}',
    b'data: {"choices":[{"delta":{"content":"a"}}]}',
    b'data: {"choices":[{"delta":{"content":"b"}}]}',
    b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}',
    b"data: [DONE]",
]
RAG = [
    b"event: sources",
    b'data: {"id":"x","sources":[{"text":"no answer"}]}',
    b"event: delta",
    b'data: {"text":"a"}',
    b"event: final",
    b'data: {"answer":"a","usage":{"prompt_tokens":20,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}}}',
    b"data: [DONE]",
]


def test_times_come_from_the_texts_and_tokens_from_the_usage() -> None:
    ticks = iter([1.5, 2.5])
    timed = read_stream(CHAT, 1.0, lambda: next(ticks))
    assert (timed.ttft_ms, timed.tpot_ms, timed.cached_share) == (500.0, 250.0, (4, 10))
    assert read_stream(RAG, 0.0, lambda: 0.25).ttft_ms == 250.0


def test_errors_and_cut_streams_are_failures() -> None:
    with pytest.raises(StreamFailed, match="it broke"):
        read_stream([b'data: {"error":{"message":"it broke"}}', b"data: [DONE]"], 0.0)
    with pytest.raises(StreamFailed, match="before it was done"):
        read_stream(CHAT[:-1], 0.0)


def test_popularity_is_zipf_and_draws_are_distinct() -> None:
    rng = random.Random(0)
    counts = Counter(draw(rng, 1, 1.0)[0] for _ in range(4000))
    assert counts[0] > 1.5 * counts[1] > 2 * counts[5]
    assert all(len(set(draw(rng, 5, 1.0))) == 5 for _ in range(50))


def test_the_workload_is_the_same_every_time() -> None:
    passages, questions = build_corpus()
    assert (len(passages), len(questions)) == (200, 400)
    assert make_requests(1, 3, 1.0, 5) == make_requests(1, 3, 1.0, 5) != make_requests(2, 3, 1.0, 5)


def test_a_summary_adds_up() -> None:
    rows = [
        {"ttft_ms": t, "tpot_ms": 2.0, "num_out": 4, "num_prompt": 10, "cached": 5, "text": "x", "details": {}}
        for t in (1.0, 2.0, 3.0)
    ]
    out = summarise(rows, 2.0, 5)
    assert (out["req_s"], out["short_answers"], out["cached_pct"], out["ttft_p50_ms"]) == (1.5, 3, 50.0, 2.0)
    assert percentile([3.0, 1.0, 2.0], 95) == 3.0


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://[::1]:2", True),
        ("http://localhost", True),
        ("http://10.0.0.1", False),
        ("http://a.b", False),
    ],
)
def test_only_this_machine_is_loaded(url: str, is_local: bool) -> None:
    assert is_loopback(url) is is_local


class Handler(BaseHTTPRequestHandler):
    """Answers as the server does; each third chat fails."""

    chats = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/rag/documents":
            self._reply(b'{"documents": []}', "application/json")
            return
        Handler.chats += self.path.startswith("/v1")
        broken = self.path.startswith("/v1") and Handler.chats % 3 == 0
        lines = [b'data: {"error":{"message":"made to fail"}}'] if broken else RAG if "rag" in self.path else CHAT
        self._reply(b"\n\n".join(lines) + b"\n\n", "text/event-stream")

    def _reply(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_locust_measures_both_users_and_counts_failures() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        table = run_locust(f"http://127.0.0.1:{server.server_port}", 4, 4)
    finally:
        server.shutdown()
        server.server_close()
    rows = {r["name"]: r for r in map(summary_row, table)}
    assert {"rag e2e", "rag ttft", "rag tpot", "chat e2e", "chat ttft"} <= set(rows)
    assert rows["rag e2e"]["failed"] == 0
    assert rows["chat e2e"]["failed"] >= 1
    assert rows["chat ttft"]["count"] == rows["chat e2e"]["count"] - rows["chat e2e"]["failed"]
    assert cached_percent(table) == {"rag": 40.0, "chat": 40.0}
    json.dumps(rows)
