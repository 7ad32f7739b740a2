"""Files to text with structure: where each heading, paragraph, table and code block stands, and on which page.

Every block is a span of the extracted text, so whatever is later cut from it can be cited by exact position.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

SUPPORTED = {
    ".txt": "text/plain",
    ".text": "text/plain",
    ".rst": "text/plain",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".html": "text/html",
    ".htm": "text/html",
    ".pdf": "application/pdf",
}


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
class _Headings:
    """The path of headings above the current place."""

    path: list[tuple[int, str]] = field(default_factory=list)

    def enter(self, level: int, text: str) -> None:
        self.path = [(n, t) for n, t in self.path if n < level] + [(level, text)]

    def leave(self, level: int) -> None:
        self.path = [(n, t) for n, t in self.path if n < level]

    def __str__(self) -> str:
        return " > ".join(text for _, text in self.path)


@dataclass(slots=True)
class _Builder:
    """Extracted text under construction; blocks are separated by an empty line."""

    parts: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    length: int = 0

    def add(self, text: str, heading: str = "", page: int | None = None, is_heading: bool = False) -> None:
        if not text.strip():
            return
        if self.parts:
            self.parts.append("\n\n")
            self.length += 2
        self.parts.append(text)
        self.blocks.append(Block(self.length, self.length + len(text), heading, page, is_heading))
        self.length += len(text)


def parse(name: str, data: bytes, media_type: str | None = None) -> Parsed:
    """Extract a source's text. Raises `ParseError`: unsupported_type, bad_encoding, bad_document, no_text."""
    kind = media_type or SUPPORTED.get(PurePosixPath(name.lower()).suffix)
    match kind:
        case "text/plain":
            parsed = _plain(decode(name, data))
        case "text/markdown":
            parsed = _markdown(decode(name, data))
        case "text/html":
            parsed = _html(decode(name, data, _html_charset(data)))
        case "application/pdf":
            parsed = _pdf(name, data)
        case _:
            known = ", ".join(sorted(SUPPORTED))
            raise ParseError("unsupported_type", f"{name}: this type of file is not supported (supported: {known})")
    if not parsed.blocks:
        raise ParseError("no_text", f"{name} holds no text{' (only images?)' if kind == 'application/pdf' else ''}")
    return parsed


_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


def decode(name: str, data: bytes, declared: str | None = None) -> str:
    """Text of bytes: by byte order mark, as UTF-8, as declared, as UTF-16 or GB18030 where it looks like that.

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
    """UTF-16 without a mark has a zero in about every second byte; GB18030 text is mostly common Chinese characters."""
    if len(data) > 1 and data[1::2].count(0) > len(data) // 5:
        return "utf-16-le"
    if len(data) > 1 and data[::2].count(0) > len(data) // 5:
        return "utf-16-be"
    text = data.decode("gb18030", errors="replace")
    common = sum("\u4e00" <= c <= "\u9fff" or c in "，。、；：？！“”（）" for c in text)
    foreign = sum(ord(c) > 0x7F for c in text)
    return "gb18030" if foreign and common > 0.9 * foreign else None


def _clean(name: str, data: bytes, encoding: str) -> str:
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as e:
        raise ParseError("bad_encoding", f"{name}: not {encoding}: {e}") from e
    if "\0" in text:
        raise ParseError("bad_encoding", f"{name}: holds NUL characters, so it is no text in {encoding}")
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))


def _paragraphs(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans between empty lines, without the white space around them."""
    for m in re.finditer(r"\S(?:.|\n(?!\s*\n))*", text[start:end]):
        yield start + m.start(), start + m.start() + len(m.group().rstrip())


def _plain(text: str) -> Parsed:
    return Parsed(text, tuple(Block(a, b) for a, b in _paragraphs(text, 0, len(text))))


_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*\n(?:.*\n)*?(?: {0,3}\1[^\S\n]*(?:\n|\Z)|\Z)", re.M)
_HEADING = re.compile(r"^ {0,3}(#{1,6})[^\S\n]+(.+?)[^\S\n]*#*[^\S\n]*$", re.M)


def _markdown(text: str) -> Parsed:
    marks = sorted([(m.start(), m.end(), m) for p in (_FENCE, _HEADING) for m in p.finditer(text)], key=lambda x: x[0])
    blocks: list[Block] = []
    headings, at, title = _Headings(), 0, None
    for start, end, m in marks:
        if start < at:
            continue
        blocks += [Block(a, b, str(headings)) for a, b in _paragraphs(text, at, start)]
        if m.re is _HEADING:
            headings.enter(len(m.group(1)), m.group(2))
            title = title or m.group(2)
        stripped = start + len(m.group().rstrip())
        blocks.append(Block(start, stripped, str(headings), is_heading=m.re is _HEADING))
        at = end
    blocks += [Block(a, b, str(headings)) for a, b in _paragraphs(text, at, len(text))]
    return Parsed(text, tuple(blocks), title)


_HTML_NOISE = (
    "script,style,noscript,template,svg,iframe,nav,footer,header,form,button,[role=navigation],[role=banner],"
    "[role=contentinfo],div.sphinxsidebar,div.related,a.headerlink,[hidden]"
)
_HTML_BLOCKS = frozenset(
    {
        *("address", "article", "aside", "blockquote", "body", "center", "dd", "details", "dialog", "div", "dl", "dt"),
        *("fieldset", "figcaption", "figure", "hr", "li", "main", "ol", "p", "section", "summary", "table", "tbody"),
        *("thead", "tfoot", "tr", "ul", "br", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "td", "th", "caption"),
    }
)


def _html_charset(data: bytes) -> str | None:
    m = re.search(rb"<meta[^>]{0,200}charset=[\"']?([A-Za-z0-9_-]{2,40})", data[:4096], re.I)
    return m.group(1).decode("ascii") if m else None


def _html(source: str) -> Parsed:
    from selectolax.lexbor import LexborHTMLParser

    tree = LexborHTMLParser(source)
    title_node = tree.css_first("title")
    title = " ".join(title_node.text().split()) if title_node else None
    for node in tree.css(_HTML_NOISE):
        node.decompose()
    walker = _HtmlWalker()
    if tree.body is not None:
        walker.walk(tree.body)
        walker.flush()
    return Parsed("".join(walker.out.parts), tuple(walker.out.blocks), title or walker.first_heading)


_TERM_LEVEL = 7
"""Terms of a definition list stand below all headings, nested lists below outer ones."""


class _HtmlWalker:
    """Collects inline text until a block begins or ends; tables become lines of cells, code keeps its lines.

    A term of a definition list is the heading of its definition: manuals document their functions like that.
    """

    def __init__(self) -> None:
        self.out = _Builder()
        self.headings = _Headings()
        self.first_heading: str | None = None
        self._inline: list[str] = []
        self._list_depth = 0

    def flush(self) -> None:
        self.out.add(_squeeze("".join(self._inline)), str(self.headings))
        self._inline = []

    def walk(self, node: Any) -> None:
        for child in node.iter(include_text=True):
            tag = child.tag
            if tag == "-text":
                self._inline.append(child.text_content or "")
            elif tag not in _HTML_BLOCKS:
                self.walk(child)
            else:
                self.flush()
                self._block(child, tag)

    def _block(self, node: Any, tag: str) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            text = _squeeze(node.text())
            self.headings.enter(int(tag[1]), text)
            self.first_heading = self.first_heading or text
            self.out.add(text, str(self.headings), is_heading=True)
        elif tag == "dt":
            text = _squeeze(node.text())
            self.headings.enter(_TERM_LEVEL + self._list_depth, text)
            self.out.add(text, str(self.headings), is_heading=True)
        elif tag == "dl":
            self._list_depth += 1
            self.walk(node)
            self.flush()
            self.headings.leave(_TERM_LEVEL + self._list_depth)
            self._list_depth -= 1
        elif tag == "pre":
            self.out.add(unicodedata.normalize("NFC", node.text()).strip("\n"), str(self.headings))
        elif tag == "table" and not node.css("pre,table table"):
            rows = [[_squeeze(c.text(separator=" ")) for c in row.css("td,th")] for row in node.css("tr")]
            self.out.add("\n".join(" | ".join(row) for row in rows if any(row)), str(self.headings))
        else:
            self.walk(node)
            self.flush()


def _squeeze(text: str) -> str:
    return unicodedata.normalize("NFC", " ".join(text.split()))


_PDF_LOCK = threading.Lock()
"""pdfium is not thread-safe: two threads inside it crash the process."""


def _pdf(name: str, data: bytes) -> Parsed:
    import pypdfium2

    out, empty = _Builder(), []
    with _PDF_LOCK:
        try:
            document = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as e:
            raise ParseError("bad_document", f"{name}: damaged or encrypted PDF: {e}") from e
        try:
            title = _squeeze(document.get_metadata_dict().get("Title") or "") or None
            for number in range(len(document)):
                before = len(out.blocks)
                _pdf_page(out, document[number], number + 1)
                if len(out.blocks) == before:
                    empty.append(number + 1)
        finally:
            document.close()
    notes = (f"no text on page {', '.join(map(str, empty))}",) if empty and out.blocks else ()
    return Parsed("".join(out.parts), tuple(out.blocks), title, notes)


def _pdf_page(out: _Builder, page: Any, number: int) -> None:
    text_page = page.get_textpage()
    raw: str = text_page.get_text_bounded()
    text_page.close()
    page.close()
    text = unicodedata.normalize(
        "NFC", raw.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").replace("\ufffe", "-")
    )
    for start, end in _paragraphs(text, 0, len(text)):
        out.add(text[start:end], page=number)
