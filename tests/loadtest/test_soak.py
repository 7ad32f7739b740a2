"""The soak itself, for a short while, and that it sees what does not hold."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path

import httpx
import pytest
from tiny_model import make_tiny_model

from loadtest import soak
from loadtest.hostile import hostile_body


@pytest.mark.parametrize(
    ("seconds", "kill_every"), [(8, 4), pytest.param(30, 10, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_nothing_breaks_under_mixed_load_with_kills_and_hostile_bodies(
    tmp_path: Path, embedder_path: Path, capfd: pytest.CaptureFixture[str], seconds: int, kill_every: int
) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    flags = ["--minutes", str(seconds / 60), "--kill-every", str(kill_every), "-c", "6", "--live-ms", "5000"]
    code = soak.main([*flags, "--", "--model", str(model), "--num-threads", "1", "--kv-cache-tokens", "2048"])
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["faults"] == []
    assert code == 0
    counts = report["counts"]
    assert any(name.startswith("killed") for name in counts)
    for name in ("/rag/query 200", "ingest 200", "left"):
        assert counts[name] > 0


def a_soak() -> soak.Soak:
    return soak.Soak("http://127.0.0.1:9", os.getpid(), argparse.Namespace(minutes=0, seed=1, c=1, growth_mb=1))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("data: {}\n\ndata: [DONE]\n\n", True),
        ('event: error\ndata: {"error":{"code":"engine_unavailable"}}\n\n', True),
        ("data: {}\n\n", False),
        ('data: {"error":{"code":"internal_error"}}\n\n', False),
        ('data: {"error":{"code":"engine_unavailable"}}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_a_stream_must_end_one_way_or_the_other(text: str, holds: bool) -> None:
    s = a_soak()
    s._check_stream("/x", text)
    assert (not s.found.faults) is holds


@pytest.mark.parametrize(
    ("status", "body", "headers", "holds"),
    [
        (200, "{}", {}, True),
        (400, '{"error":{"code":"invalid_request"}}', {}, True),
        (503, '{"error":{"code":"engine_unavailable"}}', {"Retry-After": "2"}, True),
        (503, '{"error":{"code":"engine_unavailable"}}', {}, False),
        (503, '{"error":{"code":"surprise"}}', {"Retry-After": "2"}, False),
        (500, '{"error":{"code":"internal_error"}}', {}, False),
        (400, "no", {}, False),
    ],
)
def test_a_reply_must_be_success_or_an_announced_error(
    status: int, body: str, headers: dict[str, str], holds: bool
) -> None:
    s = a_soak()
    asyncio.run(s._check("x", httpx.Response(status, text=body, headers=headers)))
    assert (not s.found.faults) is holds


def test_growth_is_seen() -> None:
    s = a_soak()
    s._compare({"files": 10, "memory_mb": 50}, {"files": 15, "memory_mb": 50.5})
    assert s.found.faults == []
    s._compare({"files": 10, "memory_mb": 50}, {"files": 40, "memory_mb": 52})
    assert len(s.found.faults) == 2


def test_hostile_bodies_are_of_every_kind_and_the_same_for_a_seed() -> None:
    bodies = [hostile_body(random.Random(i)) for i in range(60)]
    assert bodies == [hostile_body(random.Random(i)) for i in range(60)]
    assert len({body for body, _ in bodies}) > 30
