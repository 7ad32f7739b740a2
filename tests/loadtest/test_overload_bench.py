"""The overload bench against the real gateway, whose engine computes nothing."""

from __future__ import annotations

import asyncio

import pytest
from tiny_model import make_tiny_model

from gateway.bench_gateway import HOLD_MS, chat, server
from loadtest.overload_bench import load
from loadtest.raw_http import connection


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny", max_model_len=2048))


def test_answers_are_counted(model: str) -> None:
    with server(model, 32) as (port, _):
        row = asyncio.run(load(port, 8, 0.5, 1))
    assert row["answers_per_s"] > 0
    assert row["refused"] == row["other"] == 0


def test_refusals_are_counted_timed_and_not_repeated_at_once(model: str) -> None:
    async def run(port: int) -> dict[str, float]:
        async with connection(port) as holder:
            holder.send(chat(HOLD_MS, stream=True))
            await holder.head()
            return await load(port, 8, 0.4, 1)

    with server(model, 1) as (port, _):
        row = asyncio.run(run(port))
    assert (row["answers_per_s"], row["other"]) == (0, 0)
    assert row["refused"] == 8, "a client came back before it should"
    assert 0 < row["refusal_p50_ms"] <= row["refusal_p99_ms"]
