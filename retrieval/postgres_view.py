"""Search in PostgreSQL: words by BM25 in SQL over `tsvector`, vectors by pgvector, filters over `jsonb`.

A `tsvector` holds our own terms (lexical.py), and its positions are how often a term stands in the passage, so scores
are those of lexical.py. Vectors are compared one by one up to `EXACT_LIMIT` passages in a collection and wherever there
are filters; beyond, the collection's HNSW graph (Malkov and Yashunin 2018) is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString

import msgspec
import numpy as np

from retrieval.api import Document, Passage, SearchMode, SearchRequest
from retrieval.corpus import Candidate
from retrieval.dense import Vectors
from retrieval.filters import compile_filter
from retrieval.filters_sql import Params, filter_sql
from retrieval.lexical import K1, B, query_terms
from retrieval.postgres_db import Connection
from retrieval.stages import Stages

EXACT_LIMIT = 50_000
"""Passages of a collection up to which every vector is compared."""
ALL_WORDS_LIMIT = 5_000
"""Passages of a collection up to which every word of a question finds; beyond, common words only score."""
COMMON_SHARE = 0.05
"""Share of all passages from which on a word is common."""

_BM25: LiteralString = """
WITH matched AS MATERIALIZED (
    SELECT p.key, p.serial, p.length, w.lexeme, w.positions[1]::float8 AS n
    FROM foreword.passages p, LATERAL unnest(p.words) w
    WHERE p.tenant = %s AND p.collection = %s AND p.words @@ %s::tsquery AND w.lexeme = ANY (%s)),
frequencies AS (
    SELECT m.lexeme, CASE WHEN m.lexeme = ANY (%s) THEN count(*)::float8 ELSE min(c.n) END AS df
    FROM matched m LEFT JOIN unnest(%s::text[], %s::float8[]) c (lexeme, n) USING (lexeme) GROUP BY m.lexeme)
SELECT m.key, sum(ln(1 + (%s - f.df + 0.5) / (f.df + 0.5)) * m.n / (m.n + %s + %s * m.length)) AS score
FROM matched m JOIN frequencies f USING (lexeme) WHERE {fits} GROUP BY m.key ORDER BY score DESC, m.key LIMIT %s
"""


class PostgresView:
    """`View` within one transaction."""

    def __init__(self, db: Connection, dim: int) -> None:
        self._db = db
        self._dim = dim

    def candidates(
        self, request: SearchRequest, vector: Vectors, limit: int, stages: Stages | None = None
    ) -> list[Candidate]:
        """The nearest by vectors and by words."""
        where = (request.tenant, request.collection)
        sql: LiteralString = "SELECT passages, length FROM foreword.totals WHERE tenant = %s AND collection = %s"
        row = self._db.execute(sql, where).fetchone()
        if row is None or not row[0]:
            return []
        num_passages, length = row
        params: Params = []
        fits: LiteralString = "TRUE"
        if request.filters:
            compile_filter(request.filters)
            test = filter_sql(request.filters, "d.metadata", params)
            fits = (
                "serial IN (SELECT d.serial FROM foreword.documents d"
                f" WHERE d.tenant = %s AND d.collection = %s AND {test})"
            )
            params = [*where, *params]
        lexical, dense = dict[int, float](), list[int]()
        stages = stages or Stages()
        if request.mode is not SearchMode.DENSE:
            with stages.time("lexical"):
                lexical = self._by_words(request, num_passages, length / num_passages or 1.0, fits, params, limit)
        is_finite = bool(np.isfinite(vector).all())
        if request.mode is not SearchMode.LEXICAL and is_finite:
            with stages.time("dense"):
                dense = self._by_vector(where, vector, num_passages, fits, params, limit)
        found = list(dict.fromkeys([*dense, *lexical]))
        about = "SELECT key, -(vector <#> %s::vector), text_sum FROM foreword.passages WHERE key = ANY (%s)"
        by_key = {k: (c, s) for k, c, s in self._db.execute(about, (vector_text(vector * is_finite), found))}
        return [Candidate(k, float(by_key[k][0]), lexical.get(k, 0.0), by_key[k][1]) for k in found]

    def vectors(self, keys: Sequence[int]) -> Vectors:
        """Vectors [n, dim] of passages."""
        sql: LiteralString = "SELECT key, vector::real[] FROM foreword.passages WHERE key = ANY (%s)"
        found: dict[int, list[float]] = dict(self._db.execute(sql, (list(keys),)).fetchall())
        return np.array([found[k] for k in keys], np.float32).reshape(len(keys), self._dim)

    def passages(self, keys: Sequence[int]) -> list[tuple[Passage, Document]]:
        """Passages with their documents."""
        sql: LiteralString = (
            "SELECT p.key, p.record, d.record FROM foreword.passages p JOIN foreword.documents d USING (serial)"
            " WHERE p.key = ANY (%s)"
        )
        rows = {key: (p, d) for key, p, d in self._db.execute(sql, (list(keys),))}
        decode = msgspec.msgpack.decode
        return [(decode(rows[k][0], type=Passage), decode(rows[k][1], type=Document)) for k in keys]

    def _by_vector(
        self, where: tuple[str, str], vector: Vectors, num: int, fits: LiteralString, params: Params, limit: int
    ) -> list[int]:
        # An expression about the distance is no order that an index could give, so every vector is compared.
        is_exact = num <= EXACT_LIMIT or bool(params)
        exact: LiteralString = " + 0" if is_exact else ""
        if not is_exact:  # the planner thinks too well of comparing all
            self._db.execute("SET LOCAL enable_sort = off")
        sql = (
            f"SELECT key FROM foreword.passages WHERE tenant = %s AND collection = %s AND {fits}"
            f" ORDER BY (vector <#> %s::vector){exact} LIMIT %s"
        )
        keys = [key for (key,) in self._db.execute(sql, (*where, *params, vector_text(vector), limit))]
        if not is_exact:
            self._db.execute("SET LOCAL enable_sort = on")
        return keys

    def _by_words(
        self, request: SearchRequest, num: int, average: float, fits: LiteralString, params: Params, limit: int
    ) -> dict[int, float]:
        terms = query_terms(request.query)
        common = self._common(terms) if num > ALL_WORDS_LIMIT else {}
        finding = [t for t in terms if t not in common] or terms
        if not terms:
            return {}
        wanted = " | ".join(quoted(t) for t in finding)
        frequencies = [share * num for share in common.values()]
        head = (request.tenant, request.collection, wanted, terms, finding, list(common), frequencies)
        tail = (num, K1 * (1 - B), K1 * B / average, *params, limit)
        rows = self._db.execute(_BM25.replace("{fits}", "m." + fits if params else fits), (*head, *tail))
        return {key: float(score) for key, score in rows}

    def _common(self, terms: list[str]) -> dict[str, float]:
        """Those that stand in many passages, with the share, as the planner's statistics know it."""
        sql: LiteralString = (
            "SELECT e.term, e.share FROM pg_stats s, LATERAL unnest(s.most_common_elems::text::text[],"
            " s.most_common_elem_freqs[1:cardinality(s.most_common_elems::text::text[])]) e (term, share)"
            " WHERE s.schemaname = 'foreword' AND s.tablename = 'passages' AND s.attname = 'words'"
            " AND e.share > %s AND e.term = ANY (%s)"
        )
        return dict(self._db.execute(sql, (COMMON_SHARE, terms)).fetchall())


def vector_text(vector: Vectors) -> str:
    """A vector as pgvector reads it."""
    return "[" + ",".join(map(repr, vector.tolist())) + "]"


def quoted(term: str) -> str:
    """A term as `tsvector` and `tsquery` read it."""
    return "'" + term.replace("\\", "\\\\").replace("'", "''") + "'"
