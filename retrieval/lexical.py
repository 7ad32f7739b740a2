"""BM25 over passages in memory (Robertson and Zaragoza 2009, section 3.2), in any language.

Words are folded to lower case without diacritics, so that text typed without them is found; a word that carries
diacritics is indexed a second time as it is, so that exact marks rank higher. Scripts without spaces, and
Korean with its endings, are indexed by characters and pairs of characters; identifiers whole and in parts.
"""

from __future__ import annotations

import math
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np

_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_RUN = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")


class LexicalIndex(Protocol):
    """Ranks passages by the words they share with a query."""

    def add(self, key: int, text: str) -> None:
        """Index a passage under a key that is not in use."""

    def remove(self, keys: Iterable[int]) -> None:
        """Forget passages for good."""

    def search(self, query: str, limit: int, allowed: frozenset[int] | None = None) -> list[tuple[int, float]]:
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
        if re.match(rf"[{_UNSPACED}]", run):
            out += [*run, *(run[i : i + 2] for i in range(len(run) - 1))]
            continue
        out += _word_terms(run)
    return out


def _word_terms(run: str) -> list[str]:
    lower, plain = run.casefold(), fold(run)
    out = [plain, "=" + lower] if lower != plain else [plain]
    parts = _PART.findall(run)
    if len(parts) > 1:
        out += [p for p in map(fold, parts) if p != plain and len(p) > 1]
    return out


class BM25:
    """`LexicalIndex` with postings in arrays. Not thread-safe: its owner holds a lock."""

    def __init__(self, k1: float = 0.9, b: float = 0.4) -> None:
        self._k1, self._b = k1, b
        self._postings: dict[str, tuple[array[int], array[int]]] = {}
        self._lengths: list[int] = []
        self._keys: list[int] = []
        self._rows: dict[int, int] = {}
        self._dead = 0
        self._texts: dict[int, Counter[str]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: int, text: str) -> None:
        """Index a passage."""
        self._append(key, Counter(terms(text)))

    def remove(self, keys: Iterable[int]) -> None:
        """Forget passages; postings are rebuilt once half of them are dead."""
        for key in keys:
            row = self._rows.pop(key, None)
            if row is not None:
                for term in self._texts.pop(key):
                    rows, counts = self._postings[term]
                    at = int(np.searchsorted(np.frombuffer(rows, np.int64), row))
                    del rows[at], counts[at]
                    if not rows:
                        del self._postings[term]
                self._lengths[row] = 0
                self._dead += 1
        if self._dead > max(1000, len(self._rows)):
            self._compact()

    def search(self, query: str, limit: int, allowed: frozenset[int] | None = None) -> list[tuple[int, float]]:
        """Best passages for a query; `allowed` keeps only these keys."""
        if not self._rows:
            return []
        lengths = np.asarray(self._lengths, np.float32)
        average = float(lengths.sum()) / len(self._rows) or 1.0  # passages without a single word have no length
        norm = self._k1 * (1 - self._b + self._b * lengths / average)
        scores = np.zeros(len(lengths), np.float32)
        for term in set(terms(query)):
            posting = self._postings.get(term)
            if posting is None:
                continue
            rows, counts = np.frombuffer(posting[0], np.int64), np.frombuffer(posting[1], np.int64).astype(np.float32)
            idf = math.log(1 + (len(self._rows) - len(rows) + 0.5) / (len(rows) + 0.5))
            scores[rows] += idf * counts / (counts + norm[rows])
        if allowed is not None:
            scores[[row for key, row in self._rows.items() if key not in allowed]] = 0
        best = np.argsort(-scores, kind="stable")[:limit]
        return [(self._keys[row], float(scores[row])) for row in best if scores[row] > 0]

    def _append(self, key: int, counts: Counter[str]) -> None:
        row = len(self._keys)
        self._keys.append(key)
        self._rows[key] = row
        self._texts[key] = counts
        self._lengths.append(sum(n for term, n in counts.items() if not term.startswith("=")))
        for term, n in counts.items():
            rows, numbers = self._postings.setdefault(term, (array("q"), array("q")))
            rows.append(row)
            numbers.append(n)

    def _compact(self) -> None:
        kept = {key: self._texts[key] for key in self._rows}
        self.__init__(self._k1, self._b)  # type: ignore[misc]
        for key, counts in kept.items():
            self._append(key, counts)
