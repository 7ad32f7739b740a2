"""The retrieval bench on a small folder: it measures what it says, and reuses what it has ingested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gateway.cli import main
from retrieval.bench import compare_indexes

LINE = "the lamp of the keeper is lit at dusk and the boat in the bay is seen from the tower"


def write_files(folder: Path, n: int) -> Path:
    folder.mkdir()
    for i in range(n):
        body = "\n\n".join(f"## Part {j}\n\n{' '.join(LINE.split()[(i + j) % 9 :])} {i} {j}." * 8 for j in range(3))
        (folder / f"{i}.md").write_text(f"# Page {i}\n\n{body}\n")
    return folder


def test_the_bench_fills_measures_and_reuses(
    tmp_path: Path, embedder_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    folder = write_files(tmp_path / "docs", 12)
    argv = ["bench", "retrieval", str(folder), "--embedder", str(embedder_path)]
    argv += ["--passages", "20", "--questions", "12", "--ingest-passages", "5"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out.splitlines()[-1])
    assert "0 passages" in shown.err
    assert result["passages"] >= 20
    assert set(result["search"]) == {"dense", "lexical", "hybrid"}
    assert all(0 < t["p50_ms"] <= t["p99_ms"] for t in result["search"].values())
    assert result["approximate"]["recall@10"] > 0.8
    assert result["open_s"] > 0
    assert result["ingest"]["ratio"] > 0
    assert main(argv) == 0
    assert " passages\n" not in capsys.readouterr().err


def test_recall_counts_what_the_exact_search_finds() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2000, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = compare_indexes(vectors, vectors[:50])
    assert 0.3 < found["recall@10"] < 1.0  # eight of 45 lists of vectors without clusters


def test_a_folder_without_files_is_refused(
    tmp_path: Path, embedder_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "retrieval", str(tmp_path), "--embedder", str(embedder_path)]) == 2
    assert "holds no file" in capsys.readouterr().err
