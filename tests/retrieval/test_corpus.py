"""One behaviour, whatever keeps the passages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from retrieval.api import Job, JobState, SearchMode, SearchRequest, SourceFile
from retrieval.corpus import MAX_JOBS, Corpus, EmbedderMismatch
from retrieval.postgres import PostgresCorpus

from .corpora import DIM, found, open_local, put, vector_of

Open = Callable[..., Corpus]


@pytest.fixture(params=["sqlite", "postgres"])
def open_corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same corpus again and again; the last one is closed at the end."""
    opened: list[Corpus] = []
    url = request.getfixturevalue("database") if request.param == "postgres" else ""

    def open_(embedder: str = "words") -> Corpus:
        while opened:
            opened.pop().close()
        opened.append(PostgresCorpus(url, embedder, DIM) if url else open_local(tmp_path / "data", embedder))
        return opened[0]

    yield open_
    while opened:
        opened.pop().close()


@pytest.fixture
def corpus(open_corpus: Open) -> Corpus:
    return open_corpus()


def test_what_was_put_is_found_by_each_index_and_again_after_reopening(corpus: Corpus, open_corpus: Open) -> None:
    put(corpus, "a", "red apples grow", "ships sail far")
    put(corpus, "b", "green pears grow")
    for reopen in (False, True):
        c = open_corpus() if reopen else corpus
        assert found(c, "red apples grow", 1)[0] == "red apples grow"
        assert found(c, "ships", mode=SearchMode.LEXICAL) == ["ships sail far"]
        assert found(c, "grow", mode=SearchMode.LEXICAL) == ["red apples grow", "green pears grow"]
        assert len(found(c, "zebra", mode=SearchMode.DENSE)) == 3
        assert found(c, "zebra", mode=SearchMode.LEXICAL) == []
        assert [d.document_id for d in c.documents("", None, 10, 0)] == ["a", "b"]
        assert [p.text for p in c.passages_of("", "a")] == ["red apples grow", "ships sail far"]
        assert (c.size(), c.collections(None)) == ((2, 3), {"default": 2})


def test_scores_are_cosines_and_bm25_for_every_candidate(corpus: Corpus) -> None:
    texts = ["red apples grow", "ships sail far away", "apples apples apples and one red pear"]
    for i, text in enumerate(texts):
        put(corpus, f"d{i}", text)
    query = vector_of("red apples")
    with corpus.view() as view:
        candidates = view.candidates(SearchRequest("red apples"), query, 2)
        by_text = {p.text: c for c, (p, _) in zip(candidates, view.passages([c.key for c in candidates]), strict=True)}
        vectors = view.vectors([c.key for c in candidates])
    assert set(by_text) == {texts[0], texts[2]}
    for (text, c), vector in zip(by_text.items(), vectors, strict=True):
        assert c.cosine == pytest.approx(float(vector_of(text) @ query), abs=1e-5)
        assert vector == pytest.approx(vector_of(text), abs=1e-6)
    # Robertson and Zaragoza 2009, section 3.2: k1 0.9, b 0.4, the title is a word too; 3 passages of 4, 5 and 8 words.
    idf = np.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    norm = {0: 0.9 * (0.6 + 0.4 * 4 / (17 / 3)), 2: 0.9 * (0.6 + 0.4 * 8 / (17 / 3))}
    assert by_text[texts[0]].lexical == pytest.approx(2 * idf / (1 + norm[0]), rel=1e-4)
    assert by_text[texts[2]].lexical == pytest.approx(idf * (3 / (3 + norm[2]) + 1 / (1 + norm[2])), rel=1e-4)


def test_a_document_is_replaced_and_deleted_whole(corpus: Corpus, open_corpus: Open) -> None:
    put(corpus, "a", "old owls hoot", "old foxes run")
    put(corpus, "b", "bees hum")
    put(corpus, "a", "new whales sing")
    assert found(corpus, "owls foxes", mode=SearchMode.LEXICAL) == []
    assert sorted(found(corpus, "old owls hoot")) == ["bees hum", "new whales sing"]
    assert [d.document_id for d in corpus.documents("", None, 9, 0)] == ["b", "a"]
    assert corpus.delete("", "a")
    assert not corpus.delete("", "a")
    for reopen in (False, True):
        c = open_corpus() if reopen else corpus
        assert found(c, "new whales sing") == ["bees hum"]
        assert found(c, "whales", mode=SearchMode.LEXICAL) == []
        assert c.document("", "a") is None
        assert c.passages_of("", "a") == []


def test_collections_and_tenants_never_mix(corpus: Corpus) -> None:
    put(corpus, "a", "red apples", collection="one")
    put(corpus, "b", "red apples", collection="two")
    put(corpus, "a", "red apples of t", tenant="t", collection="one")
    assert found(corpus, "red apples", collection="one") == ["red apples"]
    assert found(corpus, "red apples", collection="one", tenant="t") == ["red apples of t"]
    assert found(corpus, "red apples", collection="two", tenant="t") == []
    assert found(corpus, "red apples", collection="nowhere") == []
    assert [d.tenant for d in corpus.documents("t", None, 9, 0)] == ["t"]
    assert (corpus.collections("t"), corpus.collections("")) == ({"one": 1}, {"one": 1, "two": 1})
    assert corpus.collections(None) == {"one": 2, "two": 1}
    for names, ids in (({"one"}, ["a"]), ({"two", "one", "none"}, ["a", "b"]), ({"\0"}, []), (set(), [])):
        assert [d.document_id for d in corpus.documents("", names, 9, 0)] == ids
    assert [d.document_id for d in corpus.documents("", {"one", "two"}, 1, 1)] == ["b"]
    assert corpus.document("t", "b") is None
    assert not corpus.delete("t", "b")
    assert corpus.delete("t", "a")
    assert corpus.document("", "a") is not None
    assert found(corpus, "red apples", collection="one") == ["red apples"]


FILTERS = [
    ({"lang": "en"}, "ab"),
    ({"lang": {"$ne": "en"}}, "cde"),
    ({"year": {"$gte": 2000, "$lt": 2010}}, "b"),
    ({"year": {"$gt": "1"}}, "d"),
    ({"tags": "sea"}, "ac"),
    ({"tags": {"$nin": ["sea", "air"]}}, "de"),
    ({"tags": {"$in": ["air", 7]}}, "b"),
    ({"tags": ["sea", "sun"]}, "a"),
    ({"author.name": "Ann"}, "c"),
    ({"author": {"name": "Ann"}}, "c"),
    ({"a.b": 1}, "e"),
    ({"year": {"$exists": False}}, "ce"),
    ({"lang": None}, "d"),
    ({"flag": 1}, ""),
    ({"flag": True}, "e"),
    ({"$or": [{"year": 1999}, {"flag": {"$in": [True]}}]}, "ae"),
    ({"$not": {"$and": [{"lang": "en"}, {"tags": "sea"}]}}, "bcde"),
    ({"quote": 'it\'s "so" %_\\'}, "d"),
    ({"year": {"$lte": 1999.5}}, "a"),
    ({"list": {"$gt": 4}}, "e"),
    ({"nothing": {"$nin": ["x"]}}, "abcde"),
    ({"nothing": {"$in": []}}, ""),
]


@pytest.mark.parametrize(("spec", "expected"), FILTERS, ids=lambda x: x if isinstance(x, str) else None)
def test_filters_mean_the_same_everywhere(corpus: Corpus, spec: dict[str, object], expected: str) -> None:
    put(corpus, "a", "text a", lang="en", year=1999, tags=["sea", "sun"])
    put(corpus, "b", "text b", lang="en", year=2005, tags=["air"])
    put(corpus, "c", "text c", lang="vi", tags="sea", author={"name": "Ann"})
    put(corpus, "d", "text d", lang=None, year="2005", quote='it\'s "so" %_\\')
    put(corpus, "e", "text e", flag=True, list=[1, 5], **{"a.b": 1})
    for mode in SearchMode:
        assert sorted(found(corpus, "text", filters=spec, mode=mode)) == [f"text {x}" for x in expected]


def test_a_filter_finds_the_one_that_fits_however_many_are_nearer(corpus: Corpus) -> None:
    for i in range(120):
        put(corpus, f"n{i}", f"red apples number {i}", year=1900)
    put(corpus, "z", "a treatise on apples", year=2021)
    assert found(corpus, "red apples", 3, filters={"year": 2021}) == ["a treatise on apples"]
    put(corpus, "z", "a treatise on apples", year=1900)
    assert found(corpus, "red apples", 3, filters={"year": 2021}) == []


def test_words_of_every_kind_are_found(corpus: Corpus) -> None:
    lines = [
        "Hà Nội là thủ đô",
        "低头思故乡",
        "나의 고향은 남쪽",
        "ฉันกลับบ้าน",
        "أحب وطني",
        "set max_num_seqs",
        "x" * 3000,
        "it's 'quoted' \\ & | ! :*",
    ]
    for i, line in enumerate(lines):
        put(corpus, f"d{i}", line)
    queries = ["thu do", "故乡", "고향", "บ้าน", "وطني", "seqs", "x" * 3000, "quoted"]
    for query, line in zip(queries, lines, strict=True):
        assert found(corpus, query, mode=SearchMode.LEXICAL) == [line], query
    assert found(corpus, "?! & | :*", mode=SearchMode.LEXICAL) == []


def test_jobs_are_kept_with_what_is_left_of_them(corpus: Corpus, open_corpus: Open) -> None:
    sources = [SourceFile(f"{i}.txt", bytes([i, 0, 255])) for i in range(3)]
    job = Job("j1", JobState.PENDING, "default", 3, 0, tenant="t")
    corpus.add_job(job, sources)
    running = Job("j1", JobState.RUNNING, "default", 3, 2, tenant="t")
    corpus.advance_job(running, [0, 2])
    assert corpus.job("t", "j1") == running
    assert corpus.job("", "j1") is None
    again = open_corpus()
    assert again.unfinished_jobs() == [running]
    assert again.job_sources("j1") == [(1, sources[1])]
    done = Job("j1", JobState.DONE, "default", 3, 3, tenant="t")
    again.advance_job(done, [])
    assert again.unfinished_jobs() == []
    assert again.job_sources("j1") == [(1, sources[1])]
    assert open_corpus().job("t", "j1") == done


def test_old_jobs_are_forgotten_in_the_end_and_unfinished_ones_are_not(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrieval.store.MAX_JOBS", 5)
    monkeypatch.setattr("retrieval.postgres.MAX_JOBS", 5)
    corpus.add_job(Job("first", JobState.PENDING, "default", 0, 0), [])
    for i in range(8):
        corpus.add_job(Job(f"j{i}", JobState.PENDING, "default", 0, 0), [SourceFile("a", b"a")])
        corpus.advance_job(Job(f"j{i}", JobState.DONE, "default", 0, 0), [])
    assert [corpus.job("", f"j{i}") is not None for i in range(8)] == [False] * 3 + [True] * 5
    assert corpus.job("", "first") is not None
    assert corpus.job_sources("j0") == []
    assert MAX_JOBS >= 100


def test_another_embedder_is_refused_with_both_names(corpus: Corpus, open_corpus: Open) -> None:
    put(corpus, "a", "red apples")
    with pytest.raises(EmbedderMismatch, match=r"words.*another"):
        open_corpus("another")
    assert found(open_corpus(), "red apples") == ["red apples"]


def test_searches_beside_ingest_and_delete_see_whole_documents_only(corpus: Corpus) -> None:
    """A document of eight passages is there eight times or not at all, in both indexes, while it comes and goes."""
    faults: list[str] = []
    stop = threading.Event()

    def churn(name: str) -> None:
        for i in range(25):
            put(corpus, name, *(f"{name} version{i} part{j}" for j in range(8)))
            if i % 5 == 4:
                corpus.delete("", name)

    def look() -> None:
        while not stop.is_set():
            for mode in SearchMode:
                texts = found(corpus, "alpha beta", mode=mode)
                for name in ("alpha", "beta"):
                    versions = [t.split()[1] for t in texts if t.startswith(name)]
                    if len(versions) not in (0, 8) or len(set(versions)) > 1:
                        faults.append(f"{mode}: {versions}")

    writers = [threading.Thread(target=churn, args=(n,)) for n in ("alpha", "beta")]
    readers = [threading.Thread(target=look) for _ in range(2)]
    for t in (*writers, *readers):
        t.start()
    for t in writers:
        t.join()
    stop.set()
    for t in readers:
        t.join()
    assert faults == []
    assert corpus.size() == (0, 0)


def test_vectors_of_nothing(corpus: Corpus) -> None:
    put(corpus, "empty")
    with corpus.view() as view:
        assert view.vectors([]).shape == (0, DIM)
        assert view.passages([]) == []
        assert view.candidates(SearchRequest("x"), np.full(DIM, np.nan, np.float32), 5) == []
