"""The gateway's bench measures what it says, on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from gateway.bench_gateway import KEEP_ALIVE_S, main


def test_the_bench_measures_times_rates_and_gaps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_model_len=2048)
    flags = ["--model", str(model), "--runs", "1", "--seconds", "0.5", "--streams", "20", "--wait-s", "3"]
    assert main(flags) == 0
    row = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    for name in ("chats", "refusals"):
        assert row[f"{name}_per_s"] > 0
        assert row[f"{name}_per_cpu_s"] > 0
    # Streams that said nothing while they wait would have a gap of three seconds.
    assert KEEP_ALIVE_S * 0.9 < row["streams_max_gap_s"] < 3
    assert row["streams_missed"] == 0 or row["streams_max_gap_s"] > 2 * KEEP_ALIVE_S
