"""Ten real manual pages and a real report: the right passage comes first, and citations point into it.

FOREWORD_PYTHON_DOC is the folder of CPython's HTML documentation (Debian: python3.11-doc, .../html).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server

PAGES = [
    "json",
    "functools",
    "itertools",
    "pathlib",
    "sqlite3",
    "asyncio-task",
    "subprocess",
    "heapq",
    "bisect",
    "textwrap",
]
QUESTIONS = [
    ("functools", "What happens to lru_cache if maxsize is set to None?", "the LRU feature is disabled"),
    ("itertools", "What does itertools.chain return?", "until it is exhausted, then proceeds to the next"),
    (
        "subprocess",
        "What does subprocess.run raise if check is true and the exit code is not zero?",
        "CalledProcessError",
    ),
    ("heapq", "What does heapq.heappushpop do?", "then pop and return the smallest item"),
    ("bisect", "Where does bisect_left insert x if x is already present in a?", "before (to the left of) any existing"),
    ("textwrap", "What does textwrap.dedent remove?", "Remove any common leading whitespace"),
    ("json", "What does ensure_ascii do in json.dump?", "non-ASCII characters escaped"),
    ("asyncio-task", "What does asyncio.gather return if all awaitables succeed?", "aggregate list of returned values"),
    ("sqlite3", "What does the commit method of an sqlite3 connection do?", "Commit any pending transaction"),
    ("2023_Q3_AAPL", "What were the total net sales of Apple by product category, iPhone, Mac and iPad?", "iPhone"),
]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path, embedder_path: Path, shared_data: Path
) -> Iterator[Server]:
    folder = os.environ.get("FOREWORD_PYTHON_DOC")
    if folder is None:
        pytest.skip("no shared data: FOREWORD_PYTHON_DOC is not set")
    s = Server(tmp_path_factory.mktemp("docs"), "--embed-threads", "2")
    try:
        s.wait_ready()
        paths = [Path(folder) / "library" / f"{p}.html" for p in PAGES]
        for path in [*paths, shared_data / "sec10q" / "2023_Q3_AAPL.pdf"]:
            reply = s.client.post("/rag/documents", files={"file": (path.name, path.read_bytes())}, timeout=300)
            assert reply.status_code == 200, reply.text
        yield s
    finally:
        s.stop()


@pytest.mark.slow
def test_the_right_passage_comes_first_and_citations_point_into_it(server: Server) -> None:
    first = cited = pointed = 0
    for source, question, phrase in QUESTIONS:
        reply = server.client.post("/rag/query", json={"query": question, "max_tokens": 60}, timeout=300).json()
        top = reply["sources"][0]
        is_right = Path(top["source"]).stem == source and phrase in " ".join(top["text"].split())
        first += is_right
        documents = {
            Path(s["source"]).stem
            for s in reply["sources"]
            for c in reply["citations"]
            if c["document_id"] == s["document_id"]
        }
        cited += bool(documents)
        pointed += source in documents
        print(f"{'ok' if is_right else '--'} {source:14} cited {sorted(documents)} | {reply['answer'][:150]!r}")
    print(
        f"right passage first {first} of {len(QUESTIONS)}; answers with a citation {cited}, into the right document {pointed}"
    )
    assert first >= 8
    assert pointed >= 0.8 * cited
    assert cited >= 5
