"""The replay of a trace in a world small enough to count by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine import CacheMode, bench_replay
from engine.bench_replay import Recorded, optimum, replay

SIZES = {1: 64, 2: 64, 3: 64}


def test_a_pool_that_holds_all_finds_what_was_seen_at_the_same_place_or_elsewhere() -> None:
    requests = [Recorded((1, 2), 5), Recorded((1, 3), 5), Recorded((3, 2), 5)]
    assert replay(requests, SIZES, 8192, CacheMode.EXACT, 16) == 64 / 384
    # 1 at its place; 3, which the second request had computed to borrow it, at its place too; 2 borrowed but for 16 tokens.
    assert replay(requests, SIZES, 8192, CacheMode.LINKED, 16) == (64 + 64 + 48) / 384
    assert optimum(requests, SIZES, 8192, 16) == (64 + 64 + 48) / 384


def test_the_optimum_keeps_what_is_needed_first() -> None:
    requests = [Recorded((1,), 5), Recorded((2,), 5), Recorded((3,), 5), Recorded((1,), 5), Recorded((2,), 5)]
    assert optimum(requests, SIZES, 64, 16) == 64 / 320
    assert optimum(requests, SIZES, 128, 16) == 128 / 320
    assert replay(requests, SIZES, 1024, CacheMode.LINKED, 16) <= optimum(requests, SIZES, 1024, 16)


def test_it_reads_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input_length": 700, "hash_ids": {"passages_ids": [1, 2]}}] * 2
    passages = [{"passage_id": i, "token_length": n} for i, n in SIZES.items()]
    for name, lines in (("0_trace", rows), ("2_passages", passages)):
        text = "\n".join(map(json.dumps, lines)).encode()
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text))
    bench_replay.main([str(tmp_path), "--tokens", "4096"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["requests"] == 2
    # The same order again: the first 16 tokens of the second passage stand behind exact ones and are shared as well.
    assert report["shares"]["4096"] == {"exact": 0.5, "linked": 0.5, "optimum": (64 + 48) / 256}
