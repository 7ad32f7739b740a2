"""The bench of linked passages on a tiny model: with everything recomputed, nothing is lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model

from engine import bench_linking


def write_questions(folder: Path) -> None:
    (folder / "musique").mkdir()
    (folder / "xquad_en").mkdir()
    texts = [f"Passage {i} says that the number of the house is {1000 + i}, and little else." for i in range(4)]
    asked = {"question": "Which number?", "answers": ["1002"], "ctxs": [{"title": "", "text": t} for t in texts]}
    unasked = {"question": "Who?", "answers": ["nobody"], "ctxs": asked["ctxs"]}
    (folder / "musique" / "musique_dev50.json.gz").write_bytes(gzip.compress(json.dumps([unasked, asked]).encode()))
    corpus = [{"_id": f"a00p{i}", "title": "", "text": t} for i, t in enumerate(texts)]
    queries = [{"_id": "q1", "text": "Which number?", "metadata": {"answers": ["1001"]}}]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        lines = "\n".join(map(json.dumps, rows)).encode()
        (folder / "xquad_en" / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "xquad_en" / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\ta00p1\t1\n")


def test_with_everything_recomputed_nothing_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    write_questions(tmp_path)
    model = make_tiny_model(tmp_path / "tiny", max_model_len=2048)
    flags = ["--passages", "3", "--recomputed", "0", "2048", "--dtype", "float32"]
    bench_linking.main([str(model), "--data", str(tmp_path), *flags])
    torch.set_num_threads(before)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == ["musique", "xquad_en"]
    for rows in json.loads(last)["sets"].values():
        assert rows["full"]["agreement"] == rows["k=2048"]["agreement"] == [1.0, 1.0, 1.0]
        assert abs(rows["k=2048"]["kl"][0]) < 1e-6
        assert rows["k=0"]["kl"][0] > 1e-3
        assert rows["k=0"]["computed"] < rows["k=2048"]["computed"] < rows["full"]["computed"] + 1


def test_the_gold_passage_stands_among_the_others(tmp_path: Path) -> None:
    write_questions(tmp_path)
    (question,) = bench_linking.read_musique(tmp_path / "musique", 3)
    assert len(set(question.passages)) == 3
    assert sum(question.answer in p for p in question.passages) == 1
    (question,) = bench_linking.read_xquad(tmp_path / "xquad_en", 4)
    assert [question.answer in p for p in question.passages].count(True) == 1
