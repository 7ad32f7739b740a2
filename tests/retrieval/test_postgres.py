"""What only a database shared by several processes can do, or suffer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import psycopg
import pytest
from postgres_server import Server, postgres

from retrieval.api import Job, JobState, SearchMode, SearchRequest, SourceFile, StorageFailed, StoreUnavailable
from retrieval.postgres import PostgresCorpus

from .corpora import DIM, found, put, vector_of


def open_(url: str) -> PostgresCorpus:
    return PostgresCorpus(url, "words", DIM)


@pytest.fixture
def two(database: str) -> Iterator[tuple[PostgresCorpus, PostgresCorpus]]:
    """One corpus in the hands of two gateways."""
    a, b = open_(database), open_(database)
    yield a, b
    a.close()
    b.close()


def test_what_one_gateway_ingests_or_deletes_the_other_sees_at_once(two: tuple[PostgresCorpus, PostgresCorpus]) -> None:
    a, b = two
    put(a, "x", "red apples")
    assert found(b, "red apples") == ["red apples"]
    put(b, "x", "green pears")
    assert found(a, "red apples", mode=SearchMode.LEXICAL) == []
    assert found(a, "green pears") == ["green pears"]
    assert b.delete("", "x")
    assert (a.document("", "x"), a.size()) == (None, (0, 0))


def test_two_gateways_that_replace_one_document_leave_one_whole_version(
    two: tuple[PostgresCorpus, PostgresCorpus],
) -> None:
    def churn(corpus: PostgresCorpus, name: str) -> None:
        for i in range(15):
            put(corpus, "x", *(f"{name} version{i} part{j}" for j in range(4)))

    threads = [threading.Thread(target=churn, args=(c, n)) for c, n in zip(two, "ab", strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    texts = found(two[0], "version14")
    assert len(texts) == 4
    assert len({t.rsplit(" ", 1)[0] for t in texts}) == 1
    assert two[1].size() == (1, 4)


def test_a_job_is_taken_over_only_when_its_gateway_is_gone(
    two: tuple[PostgresCorpus, PostgresCorpus], postgres_server: Server
) -> None:
    a, b = two
    jobs = [Job(f"j{i}", JobState.PENDING, "default", 1, 0) for i in range(2)]
    for job in jobs:
        a.add_job(job, [SourceFile("a.txt", b"a")])
    assert a.unfinished_jobs() == jobs
    assert b.unfinished_jobs() == []
    a.advance_job(Job("j0", JobState.DONE, "default", 1, 1), [0])
    postgres_server.end_connections()
    assert b.unfinished_jobs() == jobs[1:]
    with pytest.raises(StorageFailed, match="taken over the job j1"):
        a.advance_job(Job("j1", JobState.RUNNING, "default", 1, 1), [0])
    assert b.job_sources("j1") == [(0, SourceFile("a.txt", b"a"))]
    b.close()
    assert a.unfinished_jobs() == jobs[1:]


def test_connections_that_died_while_idle_are_replaced(database: str, postgres_server: Server) -> None:
    corpus = open_(database)
    put(corpus, "x", "red apples")
    postgres_server.end_connections()
    assert found(corpus, "red apples") == ["red apples"]
    postgres_server.end_connections()
    put(corpus, "y", "green pears")
    assert corpus.size() == (2, 2)
    corpus.close()


def test_a_database_that_goes_away_is_reported_and_nothing_is_half_done() -> None:
    with postgres() as server:
        corpus = open_(server.url)
        put(corpus, "x", "red apples")
    for call in (lambda: put(corpus, "y", "pears"), lambda: found(corpus, "apples"), lambda: corpus.delete("", "x")):
        with pytest.raises(StoreUnavailable, match="the database failed"):
            call()
    with pytest.raises(StoreUnavailable, match="the database failed"):
        open_(server.url)
    corpus.close()


def test_a_failed_ingest_keeps_what_was_there(database: str) -> None:
    name = database.rsplit("/")[-1]
    corpus = open_(database)
    put(corpus, "x", "red apples")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE disk_full; END'")
        db.execute("CREATE TRIGGER refusal BEFORE INSERT ON foreword.passages EXECUTE FUNCTION refuse()")
        with pytest.raises(StorageFailed, match="cannot be written: disk_full"):
            put(corpus, "x", "green pears")
        db.execute("DROP TRIGGER refusal ON foreword.passages")
        assert found(corpus, "apples pears") == ["red apples"]
        db.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode())
    corpus.close()
    with pytest.raises(StorageFailed, match="read-only"):
        open_(database)


def test_urls_and_rights_that_do_not_serve_are_named(database: str) -> None:
    with pytest.raises(ValueError, match="no URL such as postgresql://") as e:
        open_("postgresql://foreword:secret@[")
    assert "secret" not in str(e.value)
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("DROP ROLE IF EXISTS guest")
        db.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(StorageFailed, match="permission denied"):
        open_(database.replace("foreword@", "guest@"))


def test_no_byte_of_a_name_or_a_filter_upsets_the_database(database: str) -> None:
    corpus = open_(database)
    put(corpus, "x", "red apples", lang="a\0b", **{"k'\"%s": [1, {"$x": "\\"}]})
    for spec, fits in (
        ({"lang": "a\0b"}, True),
        ({"k'\"%s": {"$exists": True}}, True),
        ({"k'\"%s": 1}, True),
        ({"k\0": {"$in": ["\0", "'"]}}, False),
    ):
        assert bool(found(corpus, "apples", filters=spec)) is fits, spec
    assert corpus.document("", "x\0'") is None
    assert corpus.job("", "\0") is None
    assert not corpus.delete("", "%s\0")
    assert found(corpus, "\0 ' \\ :* <-> !") == ["red apples"]
    corpus.close()


def test_a_large_collection_is_searched_by_its_graph_and_its_rare_words(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_(database)
    rng = np.random.default_rng(0)
    words = [f"w{i}x" for i in range(400)]
    texts = [" ".join(["the", *rng.choice(words, 6)]) for _ in range(3000)]
    for i in range(0, 3000, 500):
        put(corpus, f"d{i}", *texts[i : i + 500])
    put(corpus, "other", "the needle", tenant="t")
    queries = [" ".join(["the", *rng.choice(words, 2)]) for _ in range(30)]
    exact = [(found(corpus, q, 10, mode=SearchMode.DENSE), _scores(corpus, q)) for q in queries]
    for module in ("postgres", "postgres_view"):
        monkeypatch.setattr(f"retrieval.{module}.EXACT_LIMIT", 1000)
        monkeypatch.setattr(f"retrieval.{module}.ALL_WORDS_LIMIT", 1000)
    corpus.checkpoint()
    again = [found(corpus, q, 10, mode=SearchMode.DENSE) for q in queries]
    same = [len({*a} & {*e}) for a, (e, _) in zip(again, exact, strict=True)]
    assert sum(same) / (10 * len(queries)) >= 0.98
    for query, (_, scores) in zip(queries, exact, strict=True):
        assert _scores(corpus, query) == pytest.approx(scores, rel=0.02), query
    assert len(found(corpus, "the", mode=SearchMode.LEXICAL)) == 50
    assert found(corpus, "the needle", tenant="t") == ["the needle"]
    corpus.close()
    with psycopg.connect(database, autocommit=True) as db:
        for _ in range(10_000):  # statistics are whole once its connections are gone
            if db.execute("SELECT FROM pg_stat_activity WHERE application_name = 'foreword'").fetchone() is None:
                break
        scans = db.execute("SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname LIKE 'passages_by_vector_%'")
        assert scans.fetchone() == (len(queries),)


def _scores(corpus: PostgresCorpus, query: str) -> list[float]:
    """The ten best by words."""
    with corpus.view() as view:
        request = SearchRequest(query, mode=SearchMode.LEXICAL)
        return sorted((c.lexical for c in view.candidates(request, vector_of(query), 10)), reverse=True)
