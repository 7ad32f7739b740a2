"""The engine bench on a small real model: every way runs, and its numbers hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model

from engine.bench_quality import main as quality
from kernels import cpu
from loadtest import engine_bench

pytestmark = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler")


def test_all_ways_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_bench, "read_gb_s", lambda: 10.0)
    monkeypatch.setattr(engine_bench, "float32_gflop_s", lambda: 50.0)
    for way, how in engine_bench.WAYS.items():  # the default type is bfloat16 on some machines
        monkeypatch.setitem(engine_bench.WAYS, way, {"dtype": "float32", **how})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = make_tiny_model(tmp_path / "tiny", max_model_len=1024)
        assert (
            engine_bench.main([str(model), "--lengths", "40", "90", "--runs", "1", "--ways", *engine_bench.WAYS]) == 0
        )
    finally:
        torch.set_num_threads(before)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert list(rows) == list(engine_bench.WAYS)
    for row in rows.values():
        assert {"prefill tok/s @40", "decode tok/s @90", "8 x decode tok/s @40", "mixed gap p99 ms"} < set(row)
        assert all(v > 0 for v in row.values())
    assert rows["int8"]["weights MB"] < rows["none"]["weights MB"] / 3
    # 2 layers of 32 x (64 + 32 + 3 x 64) products and 4 x 8 columns of attention
    operations = 2 * 2 * (32 * (64 + 32 + 3 * 64) + 90 * 4 * 8)
    row = rows["none"]
    assert row["% of float32 @90"] == pytest.approx(100 * row["prefill tok/s @90"] * operations / 50e9)


def test_quality_is_told_beside_the_first_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_model_len=2048)
    text = tmp_path / "text.txt"
    text.write_text("A passage about lighthouses, and what their keepers do all night. " * 20)
    quality([str(model), str(text), "--tokens", "600", "--questions", "2", "--ways", "float32", "int8", "int4"])
    ways = json.loads(capsys.readouterr().out.splitlines()[-1])["ways"]
    assert ways["float32"]["loss"] == ways["float32"]["answers_changed"] == 0
    assert ways["float32"]["of"] == 2
    assert 0 < abs(ways["int8"]["loss"]) < abs(ways["int4"]["loss"]) < 0.5
