"""Tables, JSON and source code to text with structure."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

from retrieval.office import add_table
from retrieval.parsed import Block, Builder, Parsed, ParseError, nfc, paragraphs, squeeze

TITLES, BODIES = ("title", "name", "headline"), ("text", "content", "body", "contents", "abstract")
"""Fields whose values are a record's heading and running text, if they are strings."""


def csv_table(name: str, text: str, delimiter: str | None = None) -> Parsed:
    """Rows as `column: value`; the delimiter is told from the first lines."""
    if delimiter is None:
        try:
            delimiter = csv.Sniffer().sniff(text[:8192], ",;\t|").delimiter
        except csv.Error:
            delimiter = ","
    try:
        rows = [[squeeze(cell) for cell in row] for row in csv.reader(io.StringIO(text), delimiter=delimiter)]
    except csv.Error as e:
        raise ParseError("bad_document", f"{name}: no table: {e}") from e
    out = Builder()
    add_table(out, rows, "")
    return out.parsed()


def json_document(name: str, text: str) -> Parsed:
    """A list record by record, an object field by field."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ParseError("bad_document", f"{name}: no JSON: {e}") from e
    out = Builder()
    _records(out, value if isinstance(value, list) else [value])
    return out.parsed()


def json_lines(name: str, text: str) -> Parsed:
    """A record for each line."""
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as e:
                raise ParseError("bad_document", f"{name}: line {number} is no JSON: {e}") from e
    out = Builder()
    _records(out, values)
    return out.parsed()


def _records(out: Builder, values: list[Any]) -> None:
    for value in values:
        heading, body = "", []
        if isinstance(value, dict):
            heading = next((squeeze(v) for k in TITLES if isinstance(v := value.get(k), str)), "")
            texts = [k for k in BODIES if isinstance(value.get(k), str)]
            fields = [
                f"{path}: {leaf}"
                for path, leaf in _leaves({k: v for k, v in value.items() if k not in texts}, "")
                if leaf != heading
            ]
            body = [nfc(value[k]) for k in texts]
            out.add(heading, heading, is_heading=True)
            out.add("\n".join(fields), heading)
        else:
            body = ["\n".join(f"{path}: {leaf}" if path else leaf for path, leaf in _leaves(value, ""))]
        for text in body:
            for start, end in paragraphs(text, 0, len(text)):
                out.add(text[start:end], heading)


def _leaves(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in _leaves(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list):
        if all(not isinstance(v, dict | list) for v in value):
            return [(path, ", ".join(map(_text, value)))] if value else []
        return [x for i, v in enumerate(value) for x in _leaves(v, f"{path}[{i}]")]
    return [] if value is None or value == "" else [(path, _text(value))]


def _text(value: Any) -> str:
    return squeeze(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_TOP = re.compile(r"^(?:[A-Za-z_@#/*\[\"'(<$.-]|--)")
_NAMED = re.compile(
    r"^\s*(?:(?:export|default|public|private|protected|internal|static|final|abstract|async|unsafe|pub(?:\([a-z]+\))?|inline)\s+)*"
    r"(?:def|class|func|function|fn|struct|enum|trait|impl|interface|module|type|namespace|create\s+table|message|service)\s+"
    r"([A-Za-z_$][\w$.]*)",
    re.I,
)


def source_code(text: str) -> Parsed:
    """Blocks that begin at a line without indentation behind an empty one, under the name they define, where they do.

    Told by layout alone, so it works for most languages, and never loses or moves a line.
    """
    starts = [0]
    is_free = True
    at = 0
    for line in text.splitlines(keepends=True):
        if at and is_free and _TOP.match(line):
            starts.append(at)
        is_free = not line.strip()
        at += len(line)
    blocks, heading = [], ""
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        body = text[start:end]
        named = next(
            (m for line in body.split("\n") if not line.startswith((" ", "\t")) and (m := _NAMED.match(line))), None
        )
        heading = named.group(1) if named else ""
        begin = start + len(body) - len(body.lstrip("\n"))
        if body.strip():
            blocks.append(Block(begin, start + len(body.rstrip()), heading))
    return Parsed(text, tuple(blocks))
