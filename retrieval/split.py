"""Cuts a parsed document into passages: along its structure, by the embedder's own token count, with nothing lost.

Neighbouring blocks under one heading and on one page are put together up to a target length. A block that is longer
than the limit is cut at the last line end, sentence end or word end that fits, and inside a word only if it must.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from retrieval.parsed import Block, Parsed

TokenOffsets = Callable[[str], Sequence[tuple[int, int]]]
"""Text -> character span of each token of the embedder's tokenizer, no special tokens."""

SMALL_SHARE = 4
"""A section below this fraction of the limit is put together with the next one."""

_CUTS = (re.compile(r"\n\s*"), re.compile(r"(?<=[.!?…。！？])\s+|(?<=[。！？])"), re.compile(r"\s+"))


@dataclass(frozen=True, slots=True)
class Span:
    """A passage as a span of the document's text."""

    start: int
    end: int
    heading: str
    page: int | None
    num_tokens: int


def split(parsed: Parsed, offsets: TokenOffsets, max_tokens: int, overlap: int = 0) -> list[Span]:
    """Passages of a document, in order; each has at most `max_tokens` tokens, and together they hold all its text.

    With `overlap`, a passage begins with up to that many tokens of the one before, whole sentences or else whole words,
    where both stand under the same headings and on the same page.
    """
    out: list[Span] = []
    room = max_tokens - overlap
    for group in _groups(parsed, offsets, room):
        start, end = group[0].start, group[-1].end
        out += _cut(parsed.text, start, end, common_heading(group), group[-1].page, offsets, room)
    if not overlap:
        return out
    return out[:1] + [
        _reach_back(parsed.text, before, span, offsets, max_tokens, overlap) for before, span in pairwise(out)
    ]


def _reach_back(text: str, before: Span, span: Span, offsets: TokenOffsets, max_tokens: int, overlap: int) -> Span:
    """The span, begun in the one before it."""
    if (before.heading, before.page) != (span.heading, span.page):
        return span
    tokens = offsets(text[before.start : before.end])
    earliest = before.start + tokens[-overlap][0] if len(tokens) > overlap else before.start
    for pattern in _CUTS[1:]:
        starts = [m.end() for m in pattern.finditer(text, max(0, earliest - 1), before.end) if m.end() < before.end]
        for start in [earliest, *starts] if earliest == before.start else starts:
            num_tokens = len(offsets(text[start : span.end]))
            if num_tokens <= max_tokens:
                return replace(span, start=start, num_tokens=num_tokens)
    return span


def _groups(parsed: Parsed, offsets: TokenOffsets, max_tokens: int) -> Iterator[list[Block]]:
    """Runs of blocks that fit together. A heading goes with what follows, and begins a new run unless one is small."""
    group: list[Block] = []
    size = 0
    for block in parsed.blocks:
        n = len(offsets(parsed.text[block.start : block.end])) + 2
        new_section = bool(group) and block.is_heading and not all(b.is_heading for b in group)
        is_small = size < max_tokens // SMALL_SHARE
        if group and ((new_section and not is_small) or size + n > max_tokens or block.page != group[-1].page):
            yield group
            group, size = [], 0
        group.append(block)
        size += n
    if group:
        yield group


def common_heading(blocks: Sequence[Block]) -> str:
    """The headings that all blocks stand under."""
    paths = [b.heading.split(" > ") for b in blocks]
    shared = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    return " > ".join(level[0] for level in shared)


def _cut(
    text: str, start: int, end: int, heading: str, page: int | None, offsets: TokenOffsets, max_tokens: int
) -> Iterator[Span]:
    """Cut text[start:end] into spans of at most `max_tokens` tokens."""
    while start < end:
        tokens = offsets(text[start:end])
        if len(tokens) <= max_tokens:
            yield Span(start, end, heading, page, len(tokens))
            return
        # A piece may tokenise to more tokens alone than inside its block, so the limit is checked again on the piece.
        limit, stop = max_tokens, start
        while limit > 0:
            stop = start + _best_cut(text[start:end], tokens[limit][0])
            n = len(offsets(text[start:stop]))
            if n <= max_tokens:
                break
            limit -= n - max_tokens
        piece = text[start:stop].rstrip()
        if piece:
            yield Span(start, start + len(piece), heading, page, len(offsets(piece)))
        start = stop
        while start < end and text[start].isspace():
            start += 1


def _best_cut(text: str, limit: int) -> int:
    """Best cut at or before `limit`: the latest line, sentence or word end in the second half, else `limit`."""
    for pattern in _CUTS:
        ends = [m.end() for m in pattern.finditer(text, 0, limit)]
        if ends and ends[-1] > limit // 2:
            return ends[-1]
    return max(limit, 1)
