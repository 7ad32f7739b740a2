"""The evaluation's own arithmetic, and the command on a small data set."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gateway.cli import main
from retrieval.evaluate import evaluate, half_of, load_dataset, scores

DOCS = {
    "d1": ("Lighthouses", "A keeper lights the lamp of the lighthouse at dusk."),
    "d2": ("Bread", "Bread is baked from flour, water, salt and yeast."),
    "d3": ("Rivers", "The river floods its banks every spring."),
}
QUERIES = {"q1": "Who lights the lighthouse lamp?", "q2": "What is bread baked from?", "q3": "unjudged"}


def write_dataset(folder: Path, is_zipped: bool = False, qrels: str = "qrels.tsv") -> Path:
    folder.mkdir(parents=True)
    rows = {
        "corpus.jsonl": [{"_id": i, "title": t, "text": x} for i, (t, x) in DOCS.items()],
        "queries.jsonl": [{"_id": i, "text": t} for i, t in QUERIES.items()],
    }
    for name, values in rows.items():
        text = "".join(json.dumps(v) + "\n" for v in values)
        if is_zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / name).write_text(text)
    (folder / qrels).parent.mkdir(exist_ok=True)
    (folder / qrels).write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td3\t0\nq2\td2\t2\n")
    return folder


def test_metrics_by_hand() -> None:
    perfect = scores(["a", "b"], {"a": 2, "b": 1})
    assert perfect == {"ndcg@10": 1.0, "recall@10": 1.0, "recall@100": 1.0, "mrr@10": 1.0}
    late = scores(["x", "a"], {"a": 1})
    assert late["ndcg@10"] == pytest.approx(0.6309, abs=1e-4)
    assert late["mrr@10"] == 0.5
    far = scores([*(f"x{i}" for i in range(10)), "a"], {"a": 1, "b": 1, "c": 0})
    assert (far["ndcg@10"], far["recall@10"], far["recall@100"], far["mrr@10"]) == (0, 0, 0.5, 0)
    swapped = scores(["b", "a"], {"a": 2, "b": 1})
    assert swapped["ndcg@10"] == pytest.approx((1 + 2 / 1.58496) / (2 + 1 / 1.58496), abs=1e-4)


def test_a_documents_passages_count_once_and_the_query_itself_never() -> None:
    out = evaluate({"q": "text"}, {"q": {"a": 1}}, lambda _: ["q", "b", "b", "b", "a"])
    assert (out["mrr@10"], out["queries"]) == (0.5, 1)


@pytest.mark.parametrize(("is_zipped", "qrels"), [(False, "qrels.tsv"), (True, "qrels/test.tsv")])
def test_datasets_plain_or_zipped(tmp_path: Path, is_zipped: bool, qrels: str) -> None:
    dataset = load_dataset(write_dataset(tmp_path / "set", is_zipped, qrels))
    assert dataset.qrels == {"q1": {"d1": 1, "d3": 0}, "q2": {"d2": 2}}
    assert set(dataset.queries) == {"q1", "q2"}
    assert next(iter(dataset.documents())) == ("d1", *DOCS["d1"])


def test_halves_are_disjoint_and_whole() -> None:
    queries = {str(i): "x" for i in range(50)}
    even, odd = half_of(queries, "even"), half_of(queries, "odd")
    assert even.keys() | odd.keys() == queries.keys()
    assert not even.keys() & odd.keys()
    assert min(len(even), len(odd)) > 10


def test_what_a_folder_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], embedder_path: Path) -> None:
    folder = write_dataset(tmp_path / "set")
    (folder / "queries.jsonl").unlink()
    assert main(["eval", "retrieval", str(folder), "--embedder", str(embedder_path)]) == 2
    assert "holds no queries.jsonl (plain or .gz)" in capsys.readouterr().err
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "x"}\n')
    with pytest.raises(ValueError, match="no text of the query 'q2'"):
        load_dataset(folder)
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1 d1\n")
    with pytest.raises(ValueError, match=r"qrels\.tsv, line 2"):
        load_dataset(folder)


def test_the_command_ends_with_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], embedder_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    folder = write_dataset(tmp_path / "set", is_zipped=True)
    command = ["eval", "retrieval", str(folder), "--embedder", str(embedder_path), "--json"]
    assert main([*command, "--mode", "hybrid"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["ndcg@10"], row["mode"], row["queries"]) == (1.0, "hybrid", 2)
    assert row["p50_ms"] > 0
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["mode"] for r in rows] == ["dense", "lexical", "hybrid"]
    assert len(list((tmp_path / "cache" / "eval").iterdir())) == 1, "the index is made once"
    assert main([*command, "--no-split", "--mode", "dense"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ndcg@10"] == 1.0
    assert main([*command, "--no-split", "--mode", "lexical"]) == 2
