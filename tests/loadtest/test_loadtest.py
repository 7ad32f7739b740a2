"""The load test's own arithmetic, and locust against a small real server that speaks the protocol."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest import run
from loadtest.ragbench import percentile, summarise
from loadtest.run import cached_percent, is_loopback, run_locust, seconds
from loadtest.run import summarise as summarise_run
from loadtest.stream import StreamFailed, read_events, read_stream
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
    rag = read_stream(RAG, 0.0, lambda: 0.25)
    assert (rag.ttft_ms, rag.tpot_ms, rag.num_sources) == (250.0, None, 1)


def test_an_answer_without_text_has_no_times() -> None:
    timed = read_stream([CHAT[1], b"data: [DONE]"], 0.0)
    assert (timed.ttft_ms, timed.tpot_ms, timed.num_sources) == (None, None, None)


def test_events_have_the_name_before_them_and_no_other() -> None:
    lines = [": keep-alive", "", "event: delta", 'data: {"text":"a"}', "", b"data:{}", "data: [DONE]"]
    assert list(read_events(lines)) == [("delta", '{"text":"a"}'), ("", "{}"), ("", "[DONE]")]


def test_a_stream_is_read_to_its_end() -> None:
    """What is left on a connection keeps it from being used again."""
    lines = iter([*CHAT, b"", b": bye"])
    read_stream(lines, 0.0)
    assert list(lines) == []


def test_errors_and_cut_streams_are_failures() -> None:
    with pytest.raises(StreamFailed, match="it broke"):
        read_stream([b'data: {"error":{"message":"it broke"}}', b"data: [DONE]"], 0.0)
    with pytest.raises(StreamFailed, match="before it was done"):
        read_stream(CHAT[:-1], 0.0)
    with pytest.raises(StreamFailed, match="no JSON"):
        read_stream([b'data: {"tex', *CHAT], 0.0)


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


def test_a_run_time_is_seconds() -> None:
    assert (seconds("30"), seconds("45s")) == (30, 45)
    for bad in ("0", "-3s", "1m", ""):
        with pytest.raises(ValueError, match=r"."):
            seconds(bad)


class Handler(BaseHTTPRequestHandler):
    """Answers as the server does, in chunks, but fails every third chat: by an error event, then by a cut stream."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/rag/documents":
            time.sleep(self.server.ingest_s)
            self.send_response(self.server.ingest_status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
        elif self.path == "/rag/query":
            self._stream(RAG)
        elif self.server.is_stuck:
            self._stream(CHAT[:3], is_stuck=True)
        else:
            n = next(self.server.chats)
            is_cut, is_error = n % 6 == 1, n % 6 == 4
            lines = CHAT[:3] + [b'data: {"error":{"message":"made to fail"}}'] * 50 if is_error else CHAT
            self._stream(lines[:3] if is_cut else lines, is_cut)

    def _stream(self, lines: list[bytes], is_cut: bool = False, is_stuck: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            end = b"\n" if line.startswith(b"event") else b"\n\n"
            self._chunk(line + end)
        if is_stuck:
            self.server.ended.wait(60)
        if not is_cut:
            self._chunk(b"")
        self.close_connection = is_cut

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_server(
    ingest_status: int = 200, ingest_s: float = 0.0, is_stuck: bool = False
) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.chats, server.ingest_status, server.ingest_s = itertools.count(), ingest_status, ingest_s
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        server.is_stuck, server.ended = is_stuck, threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.ended.set()
        server.shutdown()
        thread.join()


def test_locust_measures_both_users_and_counts_failures() -> None:
    with fake_server() as server:
        table = run_locust(server.url, 4, 4)
        num_chats = next(server.chats)
    rows = {r["name"]: r for r in summarise_run(table)}
    assert rows["rag e2e"]["count"] == rows["rag ttft"]["count"] > rows["rag e2e"]["failed"] == 0
    assert "rag tpot" not in rows
    assert rows["chat e2e"]["count"] == num_chats
    assert 0.5 < rows["chat e2e"]["per_s"] <= num_chats / 4 + 1
    assert rows["chat e2e"]["failed"] == sum(n % 6 in (1, 4) for n in range(num_chats)) >= 1
    ended = rows["chat e2e"]["count"] - rows["chat e2e"]["failed"]
    assert rows["chat ttft"]["count"] == rows["chat tpot"]["count"] == ended
    assert cached_percent(table) == {"rag": 40.0, "chat": 40.0}


def test_a_run_whose_corpus_is_refused_ends_at_once() -> None:
    with fake_server(ingest_status=503) as server, pytest.raises(SystemExit, match="exit code 1"):
        run_locust(server.url, 1, 600)


def test_ingest_takes_nothing_from_the_run_time() -> None:
    with fake_server(ingest_s=2.0) as server:
        table = run_locust(server.url, 2, 1)
    assert {"rag e2e", "chat e2e"} <= {r["name"] for r in table}


def test_a_request_that_never_ends_is_a_failure() -> None:
    with fake_server(is_stuck=True) as server:
        table = run_locust(server.url, 2, 1, grace_s=1)
    rows = {r["name"]: r for r in summarise_run(table)}
    assert (rows["chat e2e"]["count"], rows["chat e2e"]["failed"]) == (1, 1)


def test_percentiles_of_counted_times_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"10": 18, "200.0": 1, "30": 1}
    assert run.percentile({float(k): v for k, v in times.items()}, 0.95) == 30
    record = {"name": "rag ttft", "num_requests": 20, "num_failures": 0, "response_times": times}
    record |= {"start_time": 9.0, "last_request_timestamp": 15.0, "total_content_length": 400}
    began = {"name": "run start", "start_time": 5.0, "last_request_timestamp": 5.0, "total_content_length": 0}
    records = [began, record, {**record, "name": "rag cached", "total_content_length": 100}]
    assert run.report(records) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["rag", "ttft", "20", "0", "10.0", "30.0", "2.00"]
    expected = {"name": "rag ttft", "count": 20, "failed": 0, "p50_ms": 10.0, "p95_ms": 30.0, "per_s": 2.0}
    assert json.loads(lines[-1]) == {"rows": [expected], "cached_pct": {"rag": 25.0}}
    assert run.report([began, {**record, "num_failures": 1}, records[2]]) == run.report([began]) == 1
