"""Files to text with structure: where each heading, paragraph, table and code block stands, and on which page.

Every block is a span of the extracted text, so whatever is later cut from it can be cited by exact position.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from retrieval.office import docx, pptx, xlsx
from retrieval.parsed import Block, Builder, Headings, Parsed, ParseError, decode, paragraphs, squeeze
from retrieval.records import csv_table, json_document, json_lines, source_code

_CODE = (
    ".py",
    ".js",
    ".ts",
    ".jsx",
    ".tsx",
    ".java",
    ".go",
    ".rs",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cs",
    ".rb",
    ".php",
)
_MORE_CODE = (
    ".swift",
    ".kt",
    ".scala",
    ".sh",
    ".sql",
    ".lua",
    ".r",
    ".toml",
    ".yaml",
    ".yml",
    ".ini",
    ".css",
    ".proto",
)
_WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
_SLIDES = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
_SHEET = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
SUPPORTED = {
    **dict.fromkeys((".txt", ".text", ".rst", ".log"), "text/plain"),
    **dict.fromkeys((".md", ".markdown"), "text/markdown"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "text/html"),
    ".pdf": "application/pdf",
    ".docx": _WORD,
    ".pptx": _SLIDES,
    ".xlsx": _SHEET,
    ".csv": "text/csv",
    ".tsv": "text/tab-separated-values",
    ".json": "application/json",
    **dict.fromkeys((".jsonl", ".ndjson"), "application/jsonl"),
    **dict.fromkeys((*_CODE, *_MORE_CODE), "text/x-source"),
}
"""Suffix -> media type."""


def parse(name: str, data: bytes, media_type: str | None = None) -> Parsed:
    """Extract a source's text. Raises `ParseError`: unsupported_type, bad_encoding, bad_document, no_text."""
    kind = media_type or SUPPORTED.get(PurePosixPath(name.lower()).suffix)
    if kind not in _PARSERS:
        known = ", ".join(sorted(SUPPORTED))
        raise ParseError("unsupported_type", f"{name}: this type of file is not supported (supported: {known})")
    parsed = _PARSERS[kind](name, data)
    if not parsed.blocks:
        raise ParseError("no_text", f"{name} holds no text{' (only images?)' if kind == 'application/pdf' else ''}")
    return parsed


def _plain(text: str) -> Parsed:
    return Parsed(text, tuple(Block(a, b) for a, b in paragraphs(text, 0, len(text))))


_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*\n(?:.*\n)*?(?: {0,3}\1[^\S\n]*(?:\n|\Z)|\Z)", re.M)
_HEADING = re.compile(r"^ {0,3}(#{1,6})[^\S\n]+(.+?)[^\S\n]*#*[^\S\n]*$", re.M)


def _markdown(text: str) -> Parsed:
    marks = sorted([(m.start(), m.end(), m) for p in (_FENCE, _HEADING) for m in p.finditer(text)], key=lambda x: x[0])
    blocks: list[Block] = []
    headings, at, title = Headings(), 0, None
    for start, end, m in marks:
        if start < at:
            continue
        blocks += [Block(a, b, str(headings)) for a, b in paragraphs(text, at, start)]
        if m.re is _HEADING:
            headings.enter(len(m.group(1)), m.group(2))
            title = title or m.group(2)
        stripped = start + len(m.group().rstrip())
        blocks.append(Block(start, stripped, str(headings), is_heading=m.re is _HEADING))
        at = end
    blocks += [Block(a, b, str(headings)) for a, b in paragraphs(text, at, len(text))]
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
        self.out = Builder()
        self.headings = Headings()
        self.first_heading: str | None = None
        self._inline: list[str] = []
        self._list_depth = 0

    def flush(self) -> None:
        self.out.add(squeeze("".join(self._inline)), str(self.headings))
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
            text = squeeze(node.text())
            self.headings.enter(int(tag[1]), text)
            self.first_heading = self.first_heading or text
            self.out.add(text, str(self.headings), is_heading=True)
        elif tag == "dt":
            text = squeeze(node.text())
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
            rows = [[squeeze(c.text(separator=" ")) for c in row.css("td,th")] for row in node.css("tr")]
            self.out.add("\n".join(" | ".join(row) for row in rows if any(row)), str(self.headings))
        else:
            self.walk(node)
            self.flush()


_PDF_LOCK = threading.Lock()
"""pdfium is not thread-safe: two threads inside it crash the process."""


def _pdf(name: str, data: bytes) -> Parsed:
    import pypdfium2

    out, empty = Builder(), []
    with _PDF_LOCK:
        try:
            document = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as e:
            raise ParseError("bad_document", f"{name}: damaged or encrypted PDF: {e}") from e
        try:
            title = squeeze(document.get_metadata_dict().get("Title") or "") or None
            for number in range(len(document)):
                before = len(out.blocks)
                _pdf_page(out, document[number], number + 1)
                if len(out.blocks) == before:
                    empty.append(number + 1)
        finally:
            document.close()
    notes = (f"no text on page {', '.join(map(str, empty))}",) if empty and out.blocks else ()
    return Parsed("".join(out.parts), tuple(out.blocks), title, notes)


def _pdf_page(out: Builder, page: Any, number: int) -> None:
    text_page = page.get_textpage()
    raw: str = text_page.get_text_bounded()
    text_page.close()
    page.close()
    text = unicodedata.normalize(
        "NFC", raw.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").replace("\ufffe", "-")
    )
    for start, end in paragraphs(text, 0, len(text)):
        out.add(text[start:end], page=number)


_PARSERS: dict[str, Callable[[str, bytes], Parsed]] = {
    "text/plain": lambda name, data: _plain(decode(name, data)),
    "text/markdown": lambda name, data: _markdown(decode(name, data)),
    "text/html": lambda name, data: _html(decode(name, data, _html_charset(data))),
    "application/pdf": _pdf,
    _WORD: docx,
    _SLIDES: pptx,
    _SHEET: xlsx,
    "text/csv": lambda name, data: csv_table(name, decode(name, data)),
    "text/tab-separated-values": lambda name, data: csv_table(name, decode(name, data), "\t"),
    "application/json": lambda name, data: json_document(name, decode(name, data)),
    "application/jsonl": lambda name, data: json_lines(name, decode(name, data)),
    "text/x-source": lambda name, data: source_code(decode(name, data)),
}
