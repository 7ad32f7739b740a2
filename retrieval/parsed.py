"""What parsing gives: text, its blocks with their place, and helpers that every format uses."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field


class ParseError(Exception):
    """A source cannot be read; `code` is one of those of `SourceError`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the extracted text that belongs together."""

    start: int
    end: int
    heading: str = ""
    """Headings above it, outermost first, joined by ' > '."""
    page: int | None = None
    is_heading: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """Extracted text, its blocks in order, and what the reader should know."""

    text: str
    blocks: tuple[Block, ...]
    title: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Headings:
    """The path of headings above the current place."""

    path: list[tuple[int, str]] = field(default_factory=list)

    def enter(self, level: int, text: str) -> None:
        """Stand below a heading now."""
        self.path = [(n, t) for n, t in self.path if n < level] + [(level, text)]

    def leave(self, level: int) -> None:
        """Stand below no heading of this level or deeper."""
        self.path = [(n, t) for n, t in self.path if n < level]

    def __str__(self) -> str:
        return " > ".join(text for _, text in self.path)


@dataclass(slots=True)
class Builder:
    """Extracted text under construction; blocks are separated by an empty line."""

    parts: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    length: int = 0

    def parsed(self, title: str | None = None, notes: tuple[str, ...] = ()) -> Parsed:
        """What was built."""
        return Parsed("".join(self.parts), tuple(self.blocks), title, notes)

    def add(self, text: str, heading: str = "", page: int | None = None, is_heading: bool = False) -> None:
        """Put a block below the others; one without text is left out."""
        if not text.strip():
            return
        if self.parts:
            self.parts.append("\n\n")
            self.length += 2
        self.parts.append(text)
        self.blocks.append(Block(self.length, self.length + len(text), heading, page, is_heading))
        self.length += len(text)


_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


def decode(name: str, data: bytes, declared: str | None = None) -> str:
    """Text of bytes: by byte order mark, as UTF-8, as declared, as UTF-16, CP1258 or GB18030 where it looks like that.

    Normalised to NFC and to single newlines. Raises `ParseError` (bad_encoding) rather than guess wildly.
    """
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return _clean(name, data[len(bom) :], encoding)
    for candidate in ("utf-8", declared, _looks_like(data)):
        if candidate is None:
            continue
        try:
            return _clean(name, data, candidate)
        except ParseError:
            continue
    raise ParseError(
        "bad_encoding", f"{name}: the text is not UTF-8, and its encoding cannot be told; save it as UTF-8"
    )


def _looks_like(data: bytes) -> str | None:
    """UTF-16 without a mark has a zero in about every second byte."""
    if len(data) > 1 and data[1::2].count(0) > len(data) // 5:
        return "utf-16-le"
    if len(data) > 1 and data[::2].count(0) > len(data) // 5:
        return "utf-16-be"
    if _is_vietnamese(data.decode("cp1258", errors="replace")):
        return "cp1258"
    return "gb18030" if _is_chinese(data.decode("gb18030", errors="replace")) else None


def _is_chinese(text: str) -> bool:
    """Whether bytes read as GB18030 make sense as it: pairs of other code pages' letters give rare characters."""
    foreign = [c for c in text if c > "\x7f"]
    known = [c for c in foreign if "\u4e00" <= c <= "\u9fff" or c in "，。、；：？！“”（）《》—…"]
    # The rows up to 0xD7 of GB 2312 hold the 3,755 commonest characters, and those before 0xB0 the signs.
    frequent = [c for c in known if (pair := c.encode("gb18030"))[0] <= 0xD7 and pair[1] >= 0xA1]
    return bool(foreign) and len(known) > 0.9 * len(foreign) and len(frequent) > 0.5 * len(foreign)


_TONES = "\u0300\u0301\u0303\u0309\u0323"
_VIETNAMESE = set("àáâãèéêìíòóôõùúýăđĩũơưÀÁÂÃÈÉÊÌÍÒÓÔÕÙÚÝĂĐĨŨƠƯ" + _TONES)


def _is_vietnamese(text: str) -> bool:
    """Whether bytes read as CP1258 make sense as it.

    CP1258 writes most tones as a sign of their own behind the vowel, where other Western code pages have letters. Text
    of another language in its code page has many letters that Vietnamese lacks, none of ă đ ơ ư, or no such signs.
    """
    foreign = [c for c in text if c > "\x7f" and (c.isalpha() or c in _TONES)]
    tones = len(re.findall(f"(?<=[aăâeêioôơuưyAĂÂEÊIOÔƠUƯY])[{_TONES}]", text))
    strange = sum(c not in _VIETNAMESE for c in foreign) + sum(c in _TONES for c in foreign) - tones
    is_its_own = any(c in "ăđơưĂĐƠƯ" for c in foreign)
    return is_its_own and tones > len(foreign) // 8 and strange <= len(foreign) // 20


def _clean(name: str, data: bytes, encoding: str) -> str:
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as e:
        raise ParseError("bad_encoding", f"{name}: not {encoding}: {e}") from e
    if "\0" in text:
        raise ParseError("bad_encoding", f"{name}: holds NUL characters, so it is no text in {encoding}")
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))


def paragraphs(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans between empty lines, without the white space around them."""
    for m in re.finditer(r"\S(?:.|\n(?!\s*\n))*", text[start:end]):
        yield start + m.start(), start + m.start() + len(m.group().rstrip())


def nfc(text: str) -> str:
    """Composed, as all text is kept, and without white space around it."""
    return unicodedata.normalize("NFC", text).strip()


def squeeze(text: str) -> str:
    """One line, one space between words, NFC."""
    return unicodedata.normalize("NFC", " ".join(text.split()))
