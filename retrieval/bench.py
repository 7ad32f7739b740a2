"""How fast retrieval is: `foreword bench retrieval FOLDER`.

The folder's files are ingested once into the user's cache folder, up to `--passages` passages, and reused while files
and embedder stay the same. Then, each against its limit or peer:

- ingest: the time of a few thousand passages against that of the bare embedder for the same texts, in turns;
- open: from the start of a new process to its first hits by vector;
- search: by mode, the question's vector given, over sentences, headings and the commonest words of the passages;
- approximate: recall@10 and time of the inverted file that takes over beyond 300,000 passages, against exact search.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.api import IngestRequest, Passage, SearchMode, SearchRequest, SourceFile
from retrieval.dense import DenseIndex, Vectors
from retrieval.embed import Embedder, make_embedder
from retrieval.parse import SUPPORTED
from retrieval.retriever import Retriever
from retrieval.store import Store

FILES_AT_ONCE = 64
ROUNDS = 3
"""Turns of ingest and bare embedder, and starts of a process, of which the median counts."""
OPEN = """
import sys, time
from pathlib import Path
import numpy as np
from retrieval import Retriever, SearchMode, SearchRequest
with Retriever(Path(sys.argv[1]), sys.argv[2], 1) as r:
    vector = np.ones(r.embedder.dim, np.float32) / r.embedder.dim**0.5
    (found,) = r.search_vectors([SearchRequest("x", mode=SearchMode.DENSE)], vector[None])
    print(len(found.hits), time.time())
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(
        "bench retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", type=Path, metavar="FOLDER", help="files to ingest, folders below included")
    p.add_argument("--embedder", help="as the setting of that name")
    p.add_argument("--passages", type=int, default=100_000, help="Default: 100000.")
    p.add_argument("--ingest-passages", type=int, default=2_000, help="for the ingest's time. Default: 2000.")
    p.add_argument("--questions", type=int, default=600, help="Default: 600.")
    p.add_argument("--threads", type=int, default=2, help="for embedding")
    p.add_argument("--seed", type=int, default=0)
    return p


def run_bench(
    argv: Sequence[str], resolve: Callable[[str | None], str], cache: Path, say: Callable[[str], None]
) -> int:
    """The command. Args: resolve, what `make_embedder` takes for the embedder asked for; cache, folder of the indexes.

    Prints a table, then one JSON line. Raises `ValueError` for a folder without files that can be read.
    """
    args = make_parser().parse_args(argv)
    embedder = resolve(args.embedder)
    files = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in SUPPORTED and p.is_file())
    if not files:
        raise ValueError(f"{args.folder} holds no file that can be ingested")
    mark = f"{args.folder.resolve()} {len(files)} {make_embedder(embedder).identity}"
    folder = cache / f"{args.folder.name}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    rng = random.Random(args.seed)
    with Retriever(folder, embedder, args.threads) as r:
        fill(r, files, args.passages, say)
        identity = r.embedder.identity
    passages, vectors = stored_passages(folder, identity)
    result: dict[str, Any] = {"passages": len(passages), "embedder": identity}
    with Retriever(folder, embedder, args.threads) as r:
        say("search")
        questions = make_questions(passages, args.questions, rng)
        asked = r.embedder.embed_queries(questions)
        result["search"] = {mode.value: time_searches(r, questions, asked, mode) for mode in SearchMode}
    say("approximate search")
    result["approximate"] = compare_indexes(vectors, asked)
    say("open")
    result["open_s"] = statistics.median(time_open(folder, embedder) for _ in range(ROUNDS))
    say("ingest")
    result["ingest"] = time_ingest(files, embedder, args.ingest_passages, args.threads)
    _print(result)
    print(json.dumps(result))
    return 0


def fill(r: Retriever, files: Sequence[Path], limit: int, say: Callable[[str], None]) -> None:
    """Ingest files until the corpus has that many passages; those that it has already cost nothing."""
    for request in _requests(files):
        n = r.stats().num_passages
        if n >= limit:
            return
        say(f"{n} passages")
        r.ingest(request)


def stored_passages(folder: Path, identity: str) -> tuple[list[Passage], Vectors]:
    """All passages of a corpus, and their vectors [n, dim]."""
    store = Store(folder, identity)
    rows = list(store.stored_passages(store.keys()))
    store.close()
    return [p.passage for p in rows], np.stack([p.vector for p in rows])


def make_questions(passages: Sequence[Passage], n: int, rng: random.Random) -> list[str]:
    """A third each: eight words in a row, headings, and the commonest words of all, which stand nearly everywhere."""
    words = Counter(w.lower() for p in rng.sample(passages, min(len(passages), 2000)) for w in p.text.split())
    common = [w for w, _ in words.most_common(60) if w.isalpha()]
    headings = [p.heading.split(" > ")[-1] for p in passages if p.heading]
    out = []
    for i in range(n):
        if i % 3 == 0:
            text = rng.choice(passages).text.split()
            start = rng.randrange(max(1, len(text) - 8))
            out.append(" ".join(text[start : start + 8]))
        elif i % 3 == 1 and headings:
            out.append(rng.choice(headings))
        else:
            out.append(" ".join(rng.sample(common, min(6, len(common)))))
    return out


def time_searches(r: Retriever, questions: Sequence[str], vectors: Vectors, mode: SearchMode) -> dict[str, float]:
    """Milliseconds of a search whose question's vector is known."""
    ms = []
    for text, vector in zip(questions, vectors, strict=True):
        (found,) = r.search_vectors([SearchRequest(text, top_k=10, mode=mode)], vector[None])
        ms.append(found.search_ms)
    ms.sort()
    return {"p50_ms": ms[len(ms) // 2], "p99_ms": ms[round(0.99 * (len(ms) - 1))]}


def compare_indexes(vectors: Vectors, asked: Vectors) -> dict[str, float]:
    """The inverted file over the same vectors against comparing every one."""
    n, dim = vectors.shape
    exact, lists = DenseIndex(dim, exact_limit=n), DenseIndex(dim, exact_limit=n - 1)
    exact.add(range(n), vectors)
    started = time.perf_counter()
    lists.add(range(n), vectors)
    build_s = time.perf_counter() - started
    if not lists.is_approximate:
        raise ValueError("there are too few passages for an inverted file")
    shared = 0
    exact_ms: list[float] = []
    lists_ms: list[float] = []
    for v in asked:
        found = []
        for index, ms in ((exact, exact_ms), (lists, lists_ms)):
            started = time.perf_counter()
            found.append({k for k, _ in index.search(v, 10)})
            ms.append((time.perf_counter() - started) * 1e3)
        shared += len(found[0] & found[1])
    return {
        "recall@10": shared / (10 * len(asked)),
        "exact_p50_ms": statistics.median(exact_ms),
        "approximate_p50_ms": statistics.median(lists_ms),
        "build_s": build_s,
    }


def time_open(folder: Path, embedder: str) -> float:
    """Seconds from the start of a process to its first hits."""
    started = time.time()
    done = subprocess.run([sys.executable, "-c", OPEN, str(folder), embedder], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"a second process could not open {folder}: {done.stderr[-500:]}")
    return float(done.stdout.split()[-1]) - started


def time_ingest(files: Sequence[Path], embedder: str, num_passages: int, threads: int) -> dict[str, float]:
    """An ingest into an empty folder, and the bare embedder for the very texts that it embedded."""
    ratios, rates = [], []
    model = make_embedder(embedder, threads)
    model.load()
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder, Retriever(Path(folder), embedder, threads) as r:
            recorder = r.embedder = _Recorder(model)
            started = time.perf_counter()
            for request in _requests(files):
                r.ingest(request)
                if len(recorder.texts) >= num_passages:
                    break
            whole_s = time.perf_counter() - started
        started = time.perf_counter()
        model.embed_passages(recorder.texts)
        bare_s = time.perf_counter() - started
        ratios.append(whole_s / bare_s)
        rates.append(len(recorder.texts) / whole_s)
    return {"ratio": statistics.median(ratios), "passages_per_s": statistics.median(rates)}


class _Recorder:
    """An embedder that keeps what it was asked to embed."""

    def __init__(self, model: Embedder) -> None:
        self._model = model
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """As the model does."""
        self.texts += texts
        return self._model.embed_passages(texts)


def _requests(files: Sequence[Path]) -> Iterator[IngestRequest]:
    for at in range(0, len(files), FILES_AT_ONCE):
        yield IngestRequest(tuple(_source(f) for f in files[at : at + FILES_AT_ONCE]))


def _source(file: Path) -> SourceFile:
    return SourceFile(file.name, file.read_bytes(), hashlib.sha256(str(file).encode()).hexdigest()[:16])


def _print(result: dict[str, Any]) -> None:
    print(f"{result['passages']} passages, {result['embedder']}")
    for mode, t in result["search"].items():
        print(f"search {mode:14} p50 {t['p50_ms']:8.2f} ms   p99 {t['p99_ms']:8.2f} ms")
    a, i = result["approximate"], result["ingest"]
    print(
        f"approximate recall@10 {a['recall@10']:.4f}, p50 {a['approximate_p50_ms']:.2f} ms of {a['exact_p50_ms']:.2f}"
    )
    print(f"open to first hits {result['open_s']:.2f} s")
    print(f"ingest {i['ratio']:.3f} of the bare embedder's time, {i['passages_per_s']:.0f} passages/s")
