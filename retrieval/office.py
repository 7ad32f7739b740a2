"""Word, PowerPoint and Excel files to text with structure, by the libraries that know them.

A file of these is a zip archive: what it would unpack to is bounded first, so that a small one cannot fill the memory.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from retrieval.parsed import Builder, Headings, Parsed, ParseError, nfc, squeeze

MAX_UNPACKED = 512 << 20
MAX_RATIO = 200
"""Most bytes of text for a byte of the file; honest ones have about 10."""
MAX_ROWS = 200_000
"""Rows of a workbook that are read; more are said in the notes."""


def docx(name: str, data: bytes) -> Parsed:
    """Paragraphs under their headings, tables as lines of cells."""
    return _guarded(name, data, _docx)


def pptx(name: str, data: bytes) -> Parsed:
    """A page for each slide: its title as heading, texts, tables, and the speaker's notes."""
    return _guarded(name, data, _pptx)


def xlsx(name: str, data: bytes) -> Parsed:
    """Each sheet's rows under the sheet's name, as `column: value` where the first row names the columns."""
    return _guarded(name, data, _xlsx)


def _docx(data: bytes) -> Parsed:
    import docx as library

    document = library.Document(io.BytesIO(data))
    out, headings = Builder(), Headings()
    title = squeeze(document.core_properties.title or "") or None
    for item in document.iter_inner_content():
        if hasattr(item, "rows"):
            out.add("\n".join(_rows(item)), str(headings))
            continue
        text, style = nfc(item.text), (item.style.name or "") if item.style is not None else ""
        level = re.fullmatch(r"Heading (\d)", style)
        if text and (level or style == "Title"):
            headings.enter(int(level.group(1)) if level else 0, squeeze(text))
            title = title or squeeze(text)
        out.add(text, str(headings), is_heading=bool(level) or style == "Title")
    return out.parsed(title)


def _pptx(data: bytes) -> Parsed:
    import pptx as library

    deck = library.Presentation(io.BytesIO(data))
    out = Builder()
    title = squeeze(deck.core_properties.title or "") or None
    for number, slide in enumerate(deck.slides, 1):
        top = slide.shapes.title
        heading = squeeze(top.text_frame.text) if top is not None else ""
        title = title or heading or None
        out.add(heading, heading, number, is_heading=True)
        for shape in _shapes(slide.shapes):
            if top is not None and shape.shape_id == top.shape_id:
                continue
            if getattr(shape, "has_table", False):
                out.add("\n".join(_rows(shape.table)), heading, number)
            elif shape.has_text_frame:
                out.add(nfc(shape.text_frame.text), heading, number)
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            out.add(nfc(slide.notes_slide.notes_text_frame.text), heading, number)
    return out.parsed(title)


def _xlsx(data: bytes) -> Parsed:
    import openpyxl

    book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    out, notes = Builder(), []
    try:
        for sheet in book.worksheets:
            rows = list(_cells(sheet))
            if len(rows) > MAX_ROWS:
                notes.append(f"only the first {MAX_ROWS} rows of the sheet {sheet.title} were read")
            add_table(out, rows[:MAX_ROWS], sheet.title)
    finally:
        book.close()
    return out.parsed(None, tuple(notes))


def add_table(out: Builder, rows: list[list[str]], heading: str) -> None:
    """A table row by row, so that each row can be understood, found and cited alone."""
    rows = [row for row in rows if any(row)]
    if not rows:
        return
    names, has_names = rows[0], len(rows) > 1 and all(rows[0]) and len(set(rows[0])) == len(rows[0]) > 1
    if not has_names:
        for row in rows:
            out.add(" | ".join(row).strip(" |"), heading)
        return
    for row in rows[1:]:
        out.add("; ".join(f"{n}: {v}" for n, v in zip(names, row, strict=False) if v), heading)


def _cells(sheet: Any) -> Iterator[list[str]]:
    for i, row in enumerate(sheet.iter_rows(values_only=True)):
        if i > MAX_ROWS:
            return
        yield ["" if v is None else squeeze(str(v)) for v in row]


def _rows(table: Any) -> Iterator[str]:
    """Lines of cells; a merged cell stands once."""
    for row in table.rows:
        cells, before = [], None
        for cell in row.cells:
            if getattr(cell, "_tc", cell) is not before:
                cells.append(squeeze(cell.text if hasattr(cell, "text") else cell.text_frame.text))
            before = getattr(cell, "_tc", cell)
        if any(cells):
            yield " | ".join(cells)


def _shapes(shapes: Any) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        else:
            yield shape


def _check_archive(name: str, data: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(i.file_size for i in archive.infolist())
    except zipfile.BadZipFile as e:
        raise ParseError("bad_document", f"{name}: damaged, encrypted or of an older format: {e}") from e
    if size > MAX_UNPACKED or size > MAX_RATIO * max(len(data), 1 << 16):
        raise ParseError("bad_document", f"{name}: would unpack to {size >> 20} MiB, which is too much")


def _guarded(name: str, data: bytes, read: Callable[[bytes], Parsed]) -> Parsed:
    """The libraries raise whatever a damaged part makes them stumble over, on opening and on reading."""
    _check_archive(name, data)
    try:
        return read(data)
    except MemoryError:
        raise  # says nothing about the file
    except Exception as e:
        raise ParseError("bad_document", f"{name}: damaged, or not what its name says: {type(e).__name__}: {e}") from e
