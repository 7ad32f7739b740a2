"""BM25 over passages in memory (Robertson and Zaragoza 2009, section 3.2), in any language.

Words are folded to lower case without diacritics, so that text typed without them is found; a word that carries
diacritics is indexed a second time as it is, so that exact marks rank higher. Scripts without spaces, and
Korean with its endings, are indexed by characters and pairs of characters; identifiers whole and in parts. Languages
that write syllables as words, as Vietnamese does, are indexed by pairs of words too.
"""

from __future__ import annotations

import math
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_RUN = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")


MAX_TERM = 128
"""Characters of a term that count: a longer one is a blob, not a word."""
K1, B = 0.9, 0.4
"""Saturation of repeated words, and how much a passage's length counts."""


class LexicalIndex(Protocol):
    """Ranks passages by the words they share with a query."""

    def add(self, key: int, text: str) -> None:
        """Index a passage under a key that is not in use."""

    def remove(self, keys: Iterable[int]) -> None:
        """Forget passages for good."""

    def search(self, query: str, limit: int, allowed: npt.NDArray[np.int64] | None = None) -> list[tuple[int, float]]:
        """Keys and scores, best first; a passage that shares no word is never among them."""


def fold(word: str) -> str:
    """Lower case without diacritics; the Vietnamese crossed d becomes d."""
    plain = unicodedata.normalize("NFD", word.casefold())
    return "".join(c for c in plain if not unicodedata.combining(c)).replace("đ", "d")


def terms(text: str) -> list[str]:
    """Index terms of a text, in order. An exact form with diacritics is marked by a leading '='."""
    out: list[str] = []
    for m in _RUN.finditer(unicodedata.normalize("NFC", text)):
        run = m.group()
        if _is_unspaced(run):
            out += [*run, *(run[i : i + 2] for i in range(len(run) - 1))]
            continue
        out += _word_terms(run)
    return out


def pairs(text: str) -> list[str]:
    """Neighbouring words, folded, as terms of their own: `mat troi`."""
    words = [
        fold(m.group()[:MAX_TERM])
        for m in _RUN.finditer(unicodedata.normalize("NFC", text))
        if not _is_unspaced(m.group())
    ]
    return [f"{a} {b}" for a, b in pairwise(words)]


_VIETNAMESE = re.compile("[\u0309\u0323\u031b\u0111]")
"""Hook, dot below and horn, decomposed, and the crossed d: in nearly half of Vietnamese syllables, seldom elsewhere."""


def has_syllables(text: str) -> bool:
    """Whether a text writes syllables as words, as Vietnamese does.

    A syllable says little, a pair of them is a word; in other languages pairs only dilute.
    """
    words = [m.group() for m in _RUN.finditer(unicodedata.normalize("NFC", text)) if not _is_unspaced(m.group())]
    marked = sum(_VIETNAMESE.search(unicodedata.normalize("NFD", w.casefold())) is not None for w in words)
    return marked > 0.15 * len(words)


def _is_unspaced(run: str) -> bool:
    return re.match(rf"[{_UNSPACED}]", run) is not None


def _word_terms(run: str) -> list[str]:
    run = run[:MAX_TERM]
    lower, plain = run.casefold(), fold(run)
    out = [plain, "=" + lower] if lower != plain else [plain]
    parts = _PART.findall(run)
    if len(parts) > 1:
        out += [p for p in map(fold, parts) if p != plain and len(p) > 1]
    return out


def passage_terms(text: str) -> tuple[Counter[str], int]:
    """What a passage is indexed by, how often each stands in it, and its length in words."""
    counts = Counter(terms(text))
    length = sum(n for term, n in counts.items() if not term.startswith("="))
    if has_syllables(text):
        counts.update(pairs(text))
    return counts, length


def query_terms(query: str) -> list[str]:
    """What a question is looked for by, each once.

    Typed without marks a question does not show its language; its pairs are found in passages that have pairs.
    """
    return list(dict.fromkeys([*terms(query), *pairs(query)]))


class BM25:
    """`LexicalIndex` with postings in arrays. Not thread-safe: its owner holds a lock."""

    def __init__(self, k1: float = K1, b: float = B) -> None:
        self._k1, self._b = k1, b
        self._vocabulary: dict[str, int] = {}
        self._postings: list[tuple[array[int], array[int]]] = []
        """By term: rows, ascending, and how often the term stands in each."""
        self._frequencies: list[int] = []
        """By term: how many living passages hold it."""
        self._terms: list[array[int]] = []
        """By row: its terms."""
        self._lengths, self._keys = array("f"), array("q")
        """By row; a dead row has the key -1."""
        self._rows: dict[int, int] = {}
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: int, text: str) -> None:
        """Index a passage."""
        (counts, length), row = passage_terms(text), len(self._keys)
        ids = array("I")
        for term, n in counts.items():
            at = self._vocabulary.setdefault(term, len(self._postings))
            if at == len(self._postings):
                self._postings.append((array("I"), array("H")))
                self._frequencies.append(0)
            rows, numbers = self._postings[at]
            rows.append(row)
            numbers.append(min(n, 65535))
            self._frequencies[at] += 1
            ids.append(at)
        self._terms.append(ids)
        self._lengths.append(length)
        self._keys.append(key)
        self._rows[key] = row
        self._total += length

    def remove(self, keys: Iterable[int]) -> None:
        """Forget passages: no search finds them or counts them; their postings go once half of all rows are dead."""
        for key in keys:
            row = self._rows.pop(key, None)
            if row is None:
                continue
            for term in self._terms[row]:
                self._frequencies[term] -= 1
            self._total -= self._lengths[row]
            self._keys[row] = -1
            self._terms[row] = array("I")
        if len(self._keys) > 2 * len(self._rows) + 1000:
            self._compact()

    def search(self, query: str, limit: int, allowed: npt.NDArray[np.int64] | None = None) -> list[tuple[int, float]]:
        """Best passages for a query; `allowed` keeps only these keys."""
        if not self._rows:
            return []
        lengths, keys = np.frombuffer(self._lengths, np.float32), np.frombuffer(self._keys, np.int64)
        average = self._total / len(self._rows) or 1.0  # passages without a single word have no length
        norm = self._k1 * (1 - self._b + self._b * lengths / average)
        scores = np.zeros(len(keys), np.float32)
        for term in query_terms(query):
            at = self._vocabulary.get(term)
            if at is None or not (frequency := self._frequencies[at]):
                continue
            rows = np.frombuffer(self._postings[at][0], np.uint32)
            counts = np.frombuffer(self._postings[at][1], np.uint16).astype(np.float32)
            idf = math.log(1 + (len(self._rows) - frequency + 0.5) / (frequency + 0.5))
            scores[rows] += idf * counts / (counts + norm[rows])
        scores[keys < 0] = 0
        if allowed is not None:
            scores[~np.isin(keys, allowed)] = 0
        return [(int(keys[row]), float(scores[row])) for row in best_rows(scores, limit)]

    def snapshot(self) -> dict[str, bytes]:
        """The index as bytes by name, for `from_snapshot`: postings one after the other, and how long each is."""
        if len(self._keys) > len(self._rows):
            self._compact()
        return {
            "terms": "\n".join(self._vocabulary).encode(),
            "rows": b"".join(rows.tobytes() for rows, _ in self._postings),
            "counts": b"".join(counts.tobytes() for _, counts in self._postings),
            "lengths": np.array([len(rows) for rows, _ in self._postings], np.uint32).tobytes(),
            "row_terms": b"".join(row.tobytes() for row in self._terms),
            "row_lengths": np.array([len(row) for row in self._terms], np.uint32).tobytes(),
            "passage_lengths": self._lengths.tobytes(),
            "keys": self._keys.tobytes(),
        }

    @classmethod
    def from_snapshot(cls, parts: dict[str, bytes]) -> BM25:
        """The index that `snapshot` was taken of."""
        new = cls()
        lengths, row_lengths = (np.frombuffer(parts[n], np.uint32).tolist() for n in ("lengths", "row_lengths"))
        rows, counts = parts["rows"], parts["counts"]
        at = 0
        for n in lengths:
            new._postings.append((array("I", rows[4 * at : 4 * (at + n)]), array("H", counts[2 * at : 2 * (at + n)])))
            at += n
        row_terms, at = parts["row_terms"], 0
        for n in row_lengths:
            new._terms.append(array("I", row_terms[4 * at : 4 * (at + n)]))
            at += n
        if lengths:
            new._vocabulary = {term: i for i, term in enumerate(parts["terms"].decode().split("\n"))}
        new._frequencies = lengths
        new._lengths, new._keys = array("f", parts["passage_lengths"]), array("q", parts["keys"])
        new._rows = {key: row for row, key in enumerate(new._keys)}
        new._total = math.fsum(new._lengths)
        return new

    def _compact(self) -> None:
        """Leave the dead rows out, and the terms that only they had."""
        old = np.frombuffer(self._keys, np.int64)
        alive = np.flatnonzero(old >= 0)
        new_row = np.full(len(old), -1, np.int64)
        new_row[alive] = np.arange(len(alive))
        terms_left: dict[str, int] = {}
        postings: list[tuple[array[int], array[int]]] = []
        new_term = np.zeros(len(self._postings), np.int64)
        for term, at in self._vocabulary.items():
            rows = new_row[np.frombuffer(self._postings[at][0], np.uint32)]
            counts = np.frombuffer(self._postings[at][1], np.uint16)
            if (kept := rows >= 0).any():
                new_term[at] = terms_left[term] = len(postings)
                postings.append(
                    (array("I", rows[kept].astype(np.uint32).tobytes()), array("H", counts[kept].tobytes()))
                )
        self._terms = [array("I", new_term[self._terms[row]].astype(np.uint32).tobytes()) for row in alive]
        self._lengths = array("f", np.frombuffer(self._lengths, np.float32)[alive].tobytes())
        self._keys = array("q", old[alive].tobytes())
        self._vocabulary, self._postings = terms_left, postings
        self._frequencies = [len(rows) for rows, _ in postings]
        self._rows = {key: row for row, key in enumerate(self._keys)}


def best_rows(scores: npt.NDArray[np.float32], limit: int) -> list[int]:
    """Places of the greatest positive scores, best first, of equal ones the earlier first."""
    if len(scores) > limit:
        least = np.partition(scores, len(scores) - limit)[len(scores) - limit]
        found = np.flatnonzero((scores >= least) & (scores > 0))
    else:
        found = np.flatnonzero(scores > 0)
    order = np.argsort(-scores[found], kind="stable")[:limit]
    return [int(i) for i in found[order]]
