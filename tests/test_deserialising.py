"""Nothing that is read can run code: no pickle anywhere, and a planted one is left aside."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from retrieval.api import Document
from retrieval.local import LocalCorpus

REPO = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "torch.load", "np.load", "numpy.load", "faiss.read_index", "pd.read_pickle"}


def findings(source: str) -> list[str]:
    """What of a source could run what it reads."""
    out = []
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        out += [n for n in names if n.split(".")[0] in MODULES]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            out.append(ast.unparse(node.func))
    return out


def test_no_source_can_run_what_it_reads() -> None:
    assert findings("import os, pickle\nfrom yaml import load\ntorch.load(f)\neval(x)") == [
        "pickle",
        "yaml",
        "torch.load",
        "eval",
    ]
    sources = [p for part in ("gateway", "retrieval", "engine", "kernels") for p in (REPO / part).rglob("*.py")]
    assert len(sources) > 50
    assert {str(p): f for p in sources if (f := findings(p.read_text(encoding="utf-8")))} == {}


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["index.snapshot", "index.faiss", "index.pkl"])
def test_a_planted_pickle_is_not_loaded(tmp_path: Path, name: str) -> None:
    corpus = LocalCorpus(tmp_path / "data", "e", 2)
    document = Document("a", "default", "T", "t.txt", {}, 0, 0, "", 0.0)
    corpus.put(document, "text", [], [])
    corpus.close()
    mark = tmp_path / "ran"
    planted = pickle.dumps(Bomb(mark))
    (tmp_path / "data" / name).write_bytes(planted)
    corpus = LocalCorpus(tmp_path / "data", "e", 2)
    assert corpus.document("", "a") == document
    corpus.close()
    assert not mark.exists()
    pickle.loads(planted)
    assert mark.exists(), "the bomb works"
