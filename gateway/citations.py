"""Citations are made after decoding: each sentence of the answer is aligned with the stretch of a passage that says it.

A sentence is supported as far as a passage's stretch contains its content words, weighted: words that the question
already had count little, since repeating the question proves nothing, and numbers count double. Below `THRESHOLD` a
sentence cites nothing. Numbers in brackets that the model wrote itself are not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from retrieval import Passage, fold

THRESHOLD = 0.7
"""Least support for a citation; see README.md, Citations."""
MAX_WINDOW = 2
"""Sentences of a passage that may support one sentence together."""

_WORD = re.compile(r"\w+")
_OWN_NUMBERS = re.compile(r"\[\d+(?:\s*,\s*\d+)*\]")
"""Citation marks that a model writes by itself."""
_SENTENCE = re.compile(r"[^.!?。！？\n]*(?:[.!?](?=\w)[^.!?。！？\n]*)*[.!?。！？\n]*")
_LIST_NUMBER = re.compile(r"\d{1,3}\.")
_SAME_LINE = re.compile(r"[ \t]*[^\s]")
_STOP_WORDS = """
    a an the of in on at to for from by with and or but not no is
    are was were be been being it its this that these those as if then than so such
    which who whom what when where how why do does did can could will would should may might
    must have has had i you he she we they them his her their our your my me
    us there here also into about over under la cua va cac nhung mot cho trong voi duoc
    khong co den tu khi da se nay do thi ma
"""
"""Words that carry no meaning of their own, folded: English and Vietnamese."""

_STOP = frozenset(_STOP_WORDS.split())


@dataclass(frozen=True, slots=True)
class Citation:
    """A stretch of a passage that supports a sentence of the answer."""

    passage: Passage
    start: int
    """First character, in the document's extracted text."""
    end: int
    text: str
    score: float
    """Share of the sentence that the stretch supports, 0 to 1."""
    answer_start: int
    """The sentence's span in the answer."""
    answer_end: int


def cite(answer: str, question: str, passages: Sequence[Passage], threshold: float = THRESHOLD) -> list[Citation]:
    """Citations of an answer, at most one for each of its sentences, in order."""
    asked = content_words(question)
    windows = [(p, w) for p in passages for w in _windows(p.text)]
    out = []
    for start, end in sentences(answer):
        best = _best(answer[start:end], asked, windows)
        if best is not None and best[0] >= threshold:
            score, passage, (a, b) = best
            out.append(Citation(passage, passage.start + a, passage.start + b, passage.text[a:b], score, start, end))
    return out


def sentences(text: str) -> list[tuple[int, int]]:
    """Spans of the sentences of a text, without the white space around them and without the numbers of a list."""
    out = []
    for m in _SENTENCE.finditer(text):
        stripped = m.group().strip()
        start = m.start() + m.group().index(stripped)
        end = start + len(stripped)
        is_list_number = _LIST_NUMBER.fullmatch(stripped) and _SAME_LINE.match(text, end)
        if stripped and not is_list_number:
            out.append((start, end))
    return out


def content_words(text: str) -> frozenset[str]:
    """Folded words that carry meaning."""
    words = (fold(w) for w in _WORD.findall(text))
    return frozenset(w for w in words if w not in _STOP and (len(w) > 1 or w.isdigit() or ord(w[0]) > 0x2E80))


def _windows(text: str) -> list[tuple[int, int, frozenset[str]]]:
    """Stretches of one or two sentences, with their words."""
    spans = sentences(text)
    out = []
    for n in range(1, MAX_WINDOW + 1):
        for first, last in zip(spans, spans[n - 1 :], strict=False):
            out.append((first[0], last[1], content_words(text[first[0] : last[1]])))
    return out


def _best(
    sentence: str, asked: frozenset[str], windows: list[tuple[Passage, tuple[int, int, frozenset[str]]]]
) -> tuple[float, Passage, tuple[int, int]] | None:
    words = content_words(_OWN_NUMBERS.sub(" ", sentence))
    if not words or not words - asked:
        return None
    weights = {w: (2.0 if any(c.isdigit() for c in w) else 1.0) * (0.25 if w in asked else 1.0) for w in words}
    total = sum(weights.values())
    best: tuple[float, Passage, tuple[int, int]] | None = None
    for passage, (a, b, there) in windows:
        shared = words & there
        if not shared - asked:
            continue
        score = sum(weights[w] for w in shared) / total
        if best is None or score > best[0] + 1e-9:
            best = (score, passage, (a, b))
    return best
