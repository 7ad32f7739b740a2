"""Metadata filters as SQL over a `jsonb` column, with the meaning that filters.py gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

import msgspec

from retrieval.filters import is_operators

Params = list[str | float | list[str]]
_ORDERS: dict[str, LiteralString] = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}


def filter_sql(spec: Mapping[str, Any], column: LiteralString, params: Params) -> LiteralString:
    """A condition that is never NULL; its parameters are appended. The filter has passed `compile_filter`."""
    parts = [_term(key, value, column, params) for key, value in spec.items()]
    return _join(parts, " AND ", "TRUE")


def jsonb(value: Any) -> str:
    """JSON as `jsonb` takes it: it has no NUL."""
    return msgspec.json.encode(value).decode().replace("\\u0000", "\\ufffd")


def _join(parts: list[LiteralString], by: LiteralString, empty: LiteralString) -> LiteralString:
    return "(" + by.join(parts) + ")" if parts else empty


def _term(key: str, value: Any, column: LiteralString, params: Params) -> LiteralString:
    if key in ("$and", "$or"):
        parts = [filter_sql(part, column, params) for part in value]
        return _join(parts, " AND " if key == "$and" else " OR ", "TRUE")
    if key == "$not":
        return "(NOT " + filter_sql(value, column, params) + ")"
    if not is_operators(value):
        return _equal(_found(key, column, params), value, params)
    return _join([_operator(op, operand, key, column, params) for op, operand in value.items()], " AND ", "TRUE")


def _found(key: str, column: LiteralString, params: Params) -> LiteralString:
    """What stands under a key, or under its dotted path; NULL where nothing does.

    `->` with a text enters objects only.
    """
    names = key.split(".")
    params += [clean_text(key), clean_text(key), *map(clean_text, names)]
    path: LiteralString = " -> ".join(["%s::text" for _ in names])
    return f"(CASE WHEN {column} ? %s::text THEN {column} -> %s::text ELSE {column} -> {path} END)"


def _operator(op: str, operand: Any, key: str, column: LiteralString, params: Params) -> LiteralString:
    found = _found(key, column, params)
    if op in ("$eq", "$ne"):
        equal = _equal(found, operand, params)
        return equal if op == "$eq" else f"(NOT {equal})"
    if op in ("$in", "$nin"):
        params.append([jsonb(x) for x in operand])
        among = _any(found, "x = ANY (%s::jsonb[])")
        return among if op == "$in" else f"(NOT {among})"
    if op == "$exists":
        return f"({found} IS NOT NULL)" if operand else f"({found} IS NULL)"
    order = _ORDERS[op]
    if isinstance(operand, str):
        params.append(clean_text(operand))
        test: LiteralString = f"jsonb_typeof(x) = 'string' AND (x #>> '{{}}') COLLATE \"C\" {order} %s::text"
    else:
        params.append(str(operand))
        test = f"CASE WHEN jsonb_typeof(x) = 'number' THEN (x #>> '{{}}')::numeric {order} %s::numeric ELSE FALSE END"
    return _any(found, test, or_whole=False)


def _equal(found: LiteralString, value: Any, params: Params) -> LiteralString:
    params.append(jsonb(value))
    return _any(found, "x = %s::jsonb")


def _any(found: LiteralString, test: LiteralString, or_whole: bool = True) -> LiteralString:
    """Whether the value, or where it is a list a member of it, passes a test of `x`."""
    whole: LiteralString = "f.v" if or_whole else "CASE WHEN jsonb_typeof(f.v) <> 'array' THEN f.v END"
    members: LiteralString = "jsonb_array_elements(CASE WHEN jsonb_typeof(f.v) = 'array' THEN f.v ELSE '[]' END)"
    return (
        f"EXISTS (SELECT FROM (SELECT {found} AS v) f,"
        f" LATERAL (SELECT {whole} AS x UNION ALL SELECT {members}) m WHERE {test})"
    )


def clean_text(value: str) -> str:
    """Nothing that is stored has a NUL, and PostgreSQL refuses to look for one."""
    return value.replace("\0", "\ufffd")
