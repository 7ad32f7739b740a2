"""Office files, tables, JSON and source code: text with its structure, and clear errors for what is damaged."""

from __future__ import annotations

import io
import json
import zipfile

import docx
import openpyxl
import pptx
import pytest
from pptx.util import Inches

from retrieval.parse import SUPPORTED, parse
from retrieval.parsed import Parsed, ParseError
from retrieval.split import split


def texts(parsed: Parsed) -> list[tuple[str, str]]:
    return [(b.heading, parsed.text[b.start : b.end]) for b in parsed.blocks]


def test_word_keeps_headings_and_tables() -> None:
    document = docx.Document()
    document.core_properties.title = "Handbook"
    document.add_heading("Engines", 1)
    document.add_paragraph("Oil them daily.")
    document.add_heading("Diesel", 2)
    table = document.add_table(2, 2)
    for cell, text in zip(
        [c for row in table.rows for c in row.cells], ["Part", "Price", "Filter", "9 €"], strict=True
    ):
        cell.text = text
    document.add_paragraph("Tiê\u0301ng Việt.")
    raw = io.BytesIO()
    document.save(raw)
    parsed = parse("h.docx", raw.getvalue())
    assert parsed.title == "Handbook"
    assert texts(parsed) == [
        ("Engines", "Engines"),
        ("Engines", "Oil them daily."),
        ("Engines > Diesel", "Diesel"),
        ("Engines > Diesel", "Part | Price\nFilter | 9 €"),
        ("Engines > Diesel", "Tiếng Việt."),
    ]


def test_slides_are_pages_with_their_notes() -> None:
    deck = pptx.Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = "Plan"
    box = slide.shapes.add_textbox(Inches(1), Inches(1), Inches(3), Inches(1))
    box.text_frame.text = "Build it."
    table = slide.shapes.add_table(1, 2, Inches(1), Inches(3), Inches(3), Inches(1)).table
    table.cell(0, 0).text, table.cell(0, 1).text = "Q1", "done"
    slide.notes_slide.notes_text_frame.text = "Speak slowly."
    raw = io.BytesIO()
    deck.save(raw)
    parsed = parse("p.pptx", raw.getvalue())
    assert [t for _, t in texts(parsed)] == ["Plan", "Build it.", "Q1 | done", "Speak slowly."]
    assert {b.page for b in parsed.blocks} == {1}
    assert {b.heading for b in parsed.blocks} == {"Plan"}


def test_sheets_name_the_columns_in_every_row() -> None:
    book = openpyxl.Workbook()
    book.active.title = "Prices"
    for row in (("item", "price"), ("bolt", 2), ("nut", None)):
        book.active.append(row)
    other = book.create_sheet("Free")
    other.append(("only text",))
    raw = io.BytesIO()
    book.save(raw)
    assert texts(parse("x.xlsx", raw.getvalue())) == [
        ("Prices", "item: bolt; price: 2"),
        ("Prices", "item: nut"),
        ("Free", "only text"),
    ]


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.xlsx"])
def test_damaged_files_and_bombs_are_refused(name: str) -> None:
    for data in (b"", b"PK\x03\x04 no archive", b"%PDF-1.4"):
        with pytest.raises(ParseError, match=r"a\.\w+: damaged") as e:
            parse(name, data)
        assert e.value.code == "bad_document"
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("other.txt", "not an office file")
    with pytest.raises(ParseError, match="damaged, or not what its name says"):
        parse(name, raw.getvalue())
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b" " * (64 << 20))
    with pytest.raises(ParseError, match="would unpack to 64 MiB"):
        parse(name, bomb.getvalue())


def test_a_file_damaged_inside_is_refused_when_it_is_read() -> None:
    """It opens; what its rows are made of is broken."""
    book, raw, broken = openpyxl.Workbook(), io.BytesIO(), io.BytesIO()
    book.active.append(("a", "b"))
    book.save(raw)
    with zipfile.ZipFile(raw) as whole, zipfile.ZipFile(broken, "w") as archive:
        for name in whole.namelist():
            data = whole.read(name)
            archive.writestr(name, data[: len(data) // 2] if "sheet1" in name else data)
    with pytest.raises(ParseError, match=r"a\.xlsx: damaged, or not what its name says") as e:
        parse("a.xlsx", broken.getvalue())
    assert e.value.code == "bad_document"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_rows_stand_alone(delimiter: str) -> None:
    rows = [["name", "city"], ["Ann", "Hà Nội"], ["Bob", '"a, b; c"'.replace(delimiter, " ")]]
    data = "\n".join(delimiter.join(r) for r in rows).encode()
    assert [t for _, t in texts(parse("p.csv", data))][:1] == ["name: Ann; city: Hà Nội"]
    assert texts(parse("p.tsv", b"a\tb\n1\t2\n")) == [("", "a: 1; b: 2")]
    assert texts(parse("one.csv", b"just one line")) == [("", "just one line")]


def test_json_by_record_and_field() -> None:
    data = [{"title": "Zed", "text": "He is 41.\n\nHe sails.", "tags": ["x", "y"], "more": {"n": 1, "none": None}}, 5]
    expected = [("Zed", "Zed"), ("Zed", "tags: x, y\nmore.n: 1"), ("Zed", "He is 41."), ("Zed", "He sails."), ("", "5")]
    assert texts(parse("a.json", json.dumps(data).encode())) == expected
    lines = "\n\n".join(map(json.dumps, data)).encode()
    assert texts(parse("a.jsonl", lines)) == expected
    with pytest.raises(ParseError, match="line 3 is no JSON"):
        parse("a.jsonl", b'{"a": 1}\n\n{"a": ')
    with pytest.raises(ParseError, match="no JSON") as e:
        parse("a.json", b"[1,")
    assert e.value.code == "bad_document"
    with pytest.raises(ParseError) as e:
        parse("a.json", b"{}")
    assert e.value.code == "no_text"


CODE = '''"""Doc."""
import os


class Engine:
    """Runs."""

    def start(self):
        return 1


def stop(engine):
    if engine:

        return 2
'''


def test_code_is_cut_between_definitions_and_no_line_is_lost() -> None:
    parsed = parse("engine.py", CODE.encode())
    assert [b.heading for b in parsed.blocks] == ["", "Engine", "stop"]
    assert parsed.text == CODE
    spans = split(parsed, lambda t: [(m, m + 1) for m in range(len(t))], 90)
    assert "".join(CODE.split()) == "".join("".join(CODE[s.start : s.end].split()) for s in spans)
    go = parse("m.go", b"package m\n\nfunc Add(a int) int {\n\treturn a\n}\n\ntype T struct {\n\tx int\n}\n")
    assert [b.heading for b in go.blocks] == ["", "Add", "T"]
    sql = parse("s.sql", b"CREATE TABLE users (\n  id int\n);\n\nSELECT 1;\n")
    assert [b.heading for b in sql.blocks] == ["users", ""]


def test_all_types_are_named_where_one_is_not_known() -> None:
    with pytest.raises(ParseError, match=r"supported: .*\.docx.*\.jsonl.*\.pptx.*\.rs") as e:
        parse("a.exe", b"MZ")
    assert e.value.code == "unsupported_type"
    assert set(SUPPORTED) >= {
        ".txt",
        ".md",
        ".html",
        ".pdf",
        ".docx",
        ".pptx",
        ".xlsx",
        ".csv",
        ".json",
        ".jsonl",
        ".py",
    }
