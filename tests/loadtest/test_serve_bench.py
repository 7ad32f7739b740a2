"""The serving bench against small real servers: turns, ratios, checks of lengths and of prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from engine import load_tokenizer
from loadtest import serve_bench


class Chat(BaseHTTPRequestHandler):
    """Says as many tokens as it is asked for, less `server.missing`, once `server.wait_for` requests have come together."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
            self.server.bodies.append(body)
            if self.server.running >= self.server.wait_for:
                self.server.together.set()
        self.server.together.wait(10)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        num = body["max_tokens"] - self.server.missing
        for _ in range(num):
            self._say({"choices": [{"delta": {"content": "a"}}]})
        usage = {"prompt_tokens": self.server.count(body), "completion_tokens": num}
        self._say({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        with self.server.lock:
            self.server.running -= 1

    def _say(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def chat_server(wait_for: int = 1, missing: int = 0) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Chat) as server:
        server.wait_for, server.missing, server.lock = wait_for, missing, threading.Lock()
        server.together = threading.Event()
        server.running = server.most = 0
        server.bodies, server.count = [], lambda _: 7
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_servers_get_the_same_requests_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    with chat_server() as first, chat_server(wait_for=2) as second:
        code = serve_bench.main(
            [f"first={first.url}", f"second={second.url}/", "-n", "4", "-c", "2", "--runs", "2", "--max-tokens", "3"]
        )
    out = last_json(capsys)
    assert code == out["bad"] == 0
    texts = [sorted(json.dumps(b["messages"]) for b in server.bodies) for server in (first, second)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2 + 2 * 4
    assert len(set(texts[0])) > 8, "rounds must not repeat each other's prompts"
    assert second.most == 2, "two clients, never more"
    assert list(out["servers"]) == ["first", "second"]
    for row in out["servers"].values():
        assert row["e2e_p50_ms"] >= row["ttft_p50_ms"] > 0
        assert row["cached_pct"] is None


def test_an_open_loop_does_not_wait_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with chat_server(wait_for=2) as server:
        serve_bench.main([server.url, "-n", "6", "--rate", "100", "--runs", "1", "--max-tokens", "2"])
    assert server.most >= 2
    assert server.together.is_set()
    assert list(last_json(capsys)["servers"]) == [server.url]


def test_short_answers_and_miscounted_prompts_fail_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["-n", "2", "--runs", "1", "--max-tokens", "3"]
    with chat_server(missing=1) as server:
        assert serve_bench.main([server.url, *flags]) == 1
    assert last_json(capsys)["bad"] == 2
    model = make_tiny_model(tmp_path / "tiny")
    tokenizer = load_tokenizer(model)
    with chat_server() as server:
        assert serve_bench.main([server.url, *flags, "--tokenizer", str(model)]) == 1
        server.count = lambda body: len(tokenizer.encode_template(tokenizer.render_chat(body["messages"])))
        assert last_json(capsys)["bad"] == 2
        assert serve_bench.main([server.url, *flags, "--tokenizer", str(model)]) == 0


def test_only_this_machine_is_loaded_unless_told() -> None:
    with pytest.raises(SystemExit, match=r"http://10\.0\.0\.1 is not on this machine"):
        serve_bench.main(["a=http://10.0.0.1"])
    assert serve_bench.named("x=http://h:1/") == ("x", "http://h:1")
    assert serve_bench.named("http://h:1/?a=b") == ("http://h:1/?a=b", "http://h:1/?a=b")
