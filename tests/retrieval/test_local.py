"""One folder: kills, full disks, damaged snapshots, older stores."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from retrieval import dense, local
from retrieval.api import Document, Passage, SearchMode
from retrieval.dense import DenseIndex
from retrieval.lexical import BM25

from .corpora import found, open_local, put, vector_of

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SNAPSHOT_AFTER", 1)


def word(i: int) -> str:
    """Letters alone: a number would be a word of its own."""
    return "w" + chr(97 + i // 26) + chr(97 + i % 26)


def fill(folder: Path, n: int = 30) -> None:
    corpus = open_local(folder)
    for i in range(n):
        put(corpus, f"d{i}", f"document number{i} here", f"second {word(i)} there", year=i)
    corpus.close()


def count_indexed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keys that are indexed anew from now on."""
    seen: list[int] = []
    whole = BM25.add

    def add(self: BM25, key: int, text: str) -> None:
        seen.append(key)
        whole(self, key, text)

    monkeypatch.setattr(BM25, "add", add)
    return seen


@pytest.mark.usefixtures("small_snapshots")
def test_a_snapshot_saves_the_work_and_changes_since_are_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    seen = count_indexed(monkeypatch)
    corpus = open_local(tmp_path)
    assert seen == []
    assert found(corpus, "document number7 here", 1) == ["document number7 here"]
    assert found(corpus, word(7), mode=SearchMode.LEXICAL) == [f"second {word(7)} there"]
    assert [p.text for p in corpus.passages_of("", "d3")] == ["document number3 here", f"second {word(3)} there"]
    old = (tmp_path / "index.snapshot").read_bytes()
    put(corpus, "new", "a new whale")
    put(corpus, "d7", "changed entirely")
    corpus.delete("", "d8")
    corpus.close()
    (tmp_path / "index.snapshot").write_bytes(old)  # as a kill would have left it
    seen.clear()
    corpus = open_local(tmp_path)
    assert len(seen) == 2
    expected = {"whale": ["a new whale"], "entirely": ["changed entirely"], word(7): [], word(8): []}
    for query, texts in expected.items():
        assert found(corpus, query, mode=SearchMode.LEXICAL) == texts
    assert len(found(corpus, "document", 99)) == 2 * 28 + 2
    assert [p.text for p in corpus.passages_of("", "d7")] == ["changed entirely"]
    corpus.close()


@pytest.mark.usefixtures("small_snapshots")
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_or_foreign_snapshot_is_built_again(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "a")
    file = tmp_path / "a" / "index.snapshot"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flip":
        data[-5] ^= 1
    elif damage == "empty":
        data.clear()
    else:
        fill(tmp_path / "b", 31)
        data = bytearray((tmp_path / "b" / "index.snapshot").read_bytes())
    file.write_bytes(data)
    seen = count_indexed(monkeypatch)
    corpus = open_local(tmp_path / "a")
    assert len(seen) == 60
    assert "the index is built again" in caplog.text
    assert found(corpus, "document number7 here", 1) == ["document number7 here"]
    corpus.close()


@pytest.mark.usefixtures("small_snapshots")
def test_an_older_copy_of_the_store_is_not_answered_from_a_newer_snapshot(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    older = (tmp_path / "foreword.sqlite").read_bytes()
    corpus = open_local(tmp_path)
    put(corpus, "later", "text of later")
    corpus.close()
    (tmp_path / "foreword.sqlite").write_bytes(older)
    corpus = open_local(tmp_path)
    put(corpus, "other", "text of other")  # takes the key that "later" had
    corpus._num_changed = 0  # end without a snapshot, as a kill would
    corpus.close()
    assert (tmp_path / "index.snapshot").exists() is False
    corpus = open_local(tmp_path)
    assert found(corpus, "other", mode=SearchMode.LEXICAL) == ["text of other"]
    assert found(corpus, "later", mode=SearchMode.LEXICAL) == []
    corpus.close()


def test_a_snapshot_without_room_is_a_warning(
    tmp_path: Path, small_snapshots: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index.new").mkdir(parents=True)  # nothing can be written there
    fill(tmp_path, 3)
    assert "the next start takes longer" in caplog.text
    corpus = open_local(tmp_path)
    assert found(corpus, "document number2 here", 1) == ["document number2 here"]
    corpus.close()


def test_bm25_from_a_snapshot_is_the_same_and_goes_on(tmp_path: Path) -> None:
    index, other = BM25(), BM25()
    texts = ["Hà Nội là thủ đô", "red apples", "", "apples and pears", "东京 x"]
    for i, text in enumerate(texts):
        index.add(i, text)
    index.remove([1])
    again = BM25.from_snapshot(index.snapshot())
    for i in (0, 2, 3, 4):
        other.add(i, texts[i])
    for b in (index, again):
        b.add(9, "apples again")
    other.add(9, "apples again")
    again.remove([3])
    for b in (index, other):
        b.remove([3])
    for query in ("thu do", "apples", "东京", "pears"):
        assert again.search(query, 9) == index.search(query, 9) == other.search(query, 9)
    assert len(BM25.from_snapshot(BM25().snapshot())) == 0


def unit(rng: np.random.Generator, n: int, dim: int) -> dense.Vectors:
    """Vectors about forty centres, as texts lie about topics."""
    centres = rng.normal(size=(40, dim))
    v = (centres[rng.integers(0, 40, n)] + 0.6 * rng.normal(size=(n, dim))).astype(np.float32)
    out: dense.Vectors = v / np.linalg.norm(v, axis=1, keepdims=True)
    return out


def test_many_vectors_are_searched_by_lists_and_filters_stay_exact() -> None:
    rng = np.random.default_rng(0)
    vectors = unit(rng, 4000, 32)
    exact, index = DenseIndex(32), DenseIndex(32, exact_limit=1500)
    for i in (exact, index):
        i.add(range(0, 2000), vectors[:2000])
        i.add(range(2000, 4000), vectors[2000:])
        i.remove(range(500, 700))
    assert index.is_approximate
    assert not exact.is_approximate
    again = DenseIndex(32, exact_limit=1500, snapshot=index.snapshot().tobytes())
    queries = vectors[::40] + 0.05 * rng.normal(size=(100, 32)).astype(np.float32)
    allowed = np.arange(0, 4000, 7)
    hits = 0
    for q in queries:
        truth = [k for k, _ in exact.search(q, 10)]
        got = [k for k, _ in index.search(q, 10)]
        hits += len(set(truth) & set(got))
        assert not set(got) & set(range(500, 700))
        assert [k for k, _ in again.search(q, 10)] == got
        assert [k for k, _ in index.search(q, 10, allowed)] == [k for k, _ in exact.search(q, 10, allowed)]
    assert hits / 1000 > 0.9
    assert np.array_equal(index.vectors([3, 3999]), vectors[[3, 3999]])
    again.add([5000], vectors[:1])
    assert {0, 5000} <= {k for k, _ in again.search(vectors[0], 2)}


SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (document_id TEXT PRIMARY KEY, collection TEXT NOT NULL, record BLOB NOT NULL,
    text TEXT NOT NULL, serial INTEGER NOT NULL);
CREATE INDEX documents_by_collection ON documents (collection, serial);
CREATE TABLE passages (key INTEGER PRIMARY KEY AUTOINCREMENT,
    document_id TEXT NOT NULL REFERENCES documents (document_id) ON DELETE CASCADE,
    record BLOB NOT NULL, context TEXT NOT NULL, vector BLOB NOT NULL);
CREATE INDEX passages_by_document ON passages (document_id);
INSERT INTO meta VALUES ('embedder', 'words');
"""


def test_a_store_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "foreword.sqlite")
    db.executescript(SCHEMA_1)
    encode = msgspec.msgpack.encode
    for serial, name in enumerate(("zeta", "alpha"), 1):
        text = f"old text of {name}"
        document = Document(name, "default", name, f"{name}.txt", {"n": serial}, 1, 4, "0" * 64, 1.0)
        db.execute("INSERT INTO documents VALUES (?, 'default', ?, ?, ?)", (name, encode(document), text, serial))
        passage = encode(Passage(f"{name}#0", name, text, 0, len(text)))
        sql = "INSERT INTO passages (document_id, record, context, vector) VALUES (?, ?, ?, ?)"
        db.execute(sql, (name, passage, text, vector_of(text).tobytes()))
    db.commit()
    db.close()
    for _ in range(2):
        corpus = open_local(tmp_path)
        assert [d.document_id for d in corpus.documents("", None, 9, 0)] == ["zeta", "alpha"]
        assert found(corpus, "old text of alpha", 1) == ["old text of alpha"]
        assert found(corpus, "text", filters={"n": 1}, mode=SearchMode.LEXICAL) == ["old text of zeta"]
        corpus.close()
    corpus = open_local(tmp_path)
    put(corpus, "zeta", "new text")
    assert sorted(found(corpus, "text")) == ["new text", "old text of alpha"]
    corpus.close()


CHURNER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from retrieval import local
local.SNAPSHOT_AFTER = 1
from corpora import open_local, put
corpus = open_local(Path(sys.argv[1]))
print("go", flush=True)
round = int(sys.argv[4])
for i in range(100000):
    name = f"d{i % 7}"
    put(corpus, name, *(f"{name} round{round} version{i} part{j}" for j in range(6)), version=i, round=round)
    if i % 5 == 3:
        corpus.delete("", f"d{(i + 3) % 7}")
    if i % 4 == 2:
        corpus.checkpoint()
"""


def check_whole(folder: Path) -> int:
    corpus = open_local(folder)
    try:
        documents = corpus.documents("", None, -1, 0)
        for d in documents:
            label = f"{d.document_id} round{d.metadata['round']} version{d.metadata['version']}"
            texts = [f"{label} part{j}" for j in range(6)]
            assert [p.text for p in corpus.passages_of("", d.document_id)] == texts
            for mode in SearchMode:
                assert sorted(found(corpus, texts[0], 50, filters=d.metadata, mode=mode)) == texts
        assert corpus.size() == (len(documents), 6 * len(documents))
        assert len(found(corpus, "part1", 99, mode=SearchMode.DENSE)) == 6 * len(documents)
        return len(documents)
    finally:
        corpus.close()


def kill_at_random(folder: Path, times: int, seed: int) -> None:
    """Ingest, replace, delete and snapshot in a child that is killed at any moment; what is left is whole."""
    rng = random.Random(seed)
    most = 0
    for round_ in range(times):
        args = [str(folder), str(Path(__file__).parent), str(REPO), str(round_)]
        child = subprocess.Popen([sys.executable, "-c", CHURNER, *args], stdout=subprocess.PIPE, cwd=REPO)
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        try:
            child.wait(rng.uniform(0.0, 0.25))
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        most = max(most, check_whole(folder))
    assert most == 7


def test_a_kill_at_any_moment_leaves_whole_documents(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 4, 1)


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 200, 2)


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from retrieval import local
from retrieval.api import StorageFailed
local.SNAPSHOT_AFTER = 1
from corpora import found, open_local, put
corpus = open_local(Path(sys.argv[1]))
put(corpus, "first", "the first whale")
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
stored = ["first"]
try:
    for i in range(200):
        put(corpus, f"d{i}", *(f"word{i} part{j} " + "x " * 500 for j in range(4)))
        stored.append(f"d{i}")
except StorageFailed as e:
    print(e)
else:
    sys.exit("it never failed")
assert [d.document_id for d in corpus.documents("", None, -1, 0)] == stored
assert found(corpus, "the first whale", 1) == ["the first whale"]
assert len(found(corpus, "part1", 999)) == corpus.size()[1] == 4 * (len(stored) - 1) + 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
put(corpus, "after", "room again")
assert found(corpus, "room again", 1) == ["room again"]
corpus.close()
corpus = open_local(Path(sys.argv[1]))
assert [d.document_id for d in corpus.documents("", None, -1, 0)] == [*stored, "after"]
"""


def run(script: str, *args: str) -> str:
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    """The limit on a file's size stands for a disk's end: a write beyond it fails in the same place."""
    said = run(FULL_DISK, str(tmp_path), str(Path(__file__).parent), str(REPO))
    assert f"cannot write in {tmp_path}" in said


READ_ONLY = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from retrieval.api import StorageFailed
from corpora import open_local
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    open_local(Path(sys.argv[1]))
except StorageFailed as e:
    print(e)
"""


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o555)
        if parent.name.startswith("pytest-of"):
            break
    said = run(READ_ONLY, str(folder), str(Path(__file__).parent), str(REPO))
    assert said.startswith(f"cannot write in {folder}: ")
    folder.chmod(0o755)
