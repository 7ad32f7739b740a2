"""Log lines as JSON and as text."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

from server_process import Server, child_pid, wait_for
from tiny_model import make_tiny_model

from gateway.logs import JsonFormatter, TextFormatter


def record(**extra: object) -> logging.LogRecord:
    return logging.LogRecord("foreword", logging.WARNING, "f.py", 1, "said %s", ("\n\u2028é",), None, **extra)


def test_json_lines_are_one_object_with_fields_and_exceptions() -> None:
    line = record()
    line.fields = {"request_id": "7"}
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line.exc_info = sys.exc_info()
    text = JsonFormatter().format(line)
    assert "\n" not in text
    data = json.loads(text)
    assert {k: data[k] for k in ("level", "logger", "message", "request_id")} == {
        "level": "warning", "logger": "foreword", "message": "said \n\u2028é", "request_id": "7"
    }  # fmt: skip
    assert data["time"].endswith("+00:00")
    assert "ValueError: two\nlines" in data["exception"]


def test_text_lines_end_with_their_fields() -> None:
    line = record()
    line.fields = {"request_id": "7", "ms": 1.5}
    assert TextFormatter().format(line).endswith("request_id=7 ms=1.5")


def test_every_line_of_a_server_and_its_children_is_json(tmp_path: Path, embedder_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    server = Server(tmp_path, "--model", str(model), "--log-format", "json", "--log-level", "info")
    try:
        server.wait_ready()
        reply = server.client.get("/v1/models", headers={"X-Request-Id": "mine"})
        assert reply.status_code == 200
        os.kill(child_pid(server, "engine.process"), signal.SIGKILL)
        wait_for(lambda: "ended with code -9" in server.read_log(), 10)
        server.wait_ready()
    finally:
        server.client.close()
        server.process.terminate()
        assert server.process.wait(30) == 0
        text = server.read_log()
        server.log.close()
    lines = [line for line in text.splitlines() if not line.startswith("Serving ")]
    objects = [json.loads(line) for line in lines]
    (access,) = [o for o in objects if o.get("request_id") == "mine"]
    assert (access["route"], access["status"], access["method"]) == ("/v1/models", 200, "GET")
    assert access["ms"] > 0
