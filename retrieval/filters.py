"""Metadata filters: which documents a search may find.

A filter is a JSON object. `{"field": value}` asks for equality, `{"field": {"$op": operand}}` for more;
several fields or operators must all hold. A dot goes into objects (`"author.name"`). `$and`, `$or` (lists of filters)
and `$not` (one filter) combine.

  $eq $ne           equal, not equal (a document without the field is not equal to anything)
  $in $nin          one of a list, none of it
  $gt $gte $lt $lte numbers by size, strings by code points; a value of another type does not fit
  $exists           whether the field is there (true or false)

A field that holds a list fits where one of its members does; `$ne` and `$nin` where none of them does. A document
without the field fits only `$exists: false`, `$ne` and `$nin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH, MAX_TERMS = 16, 1000
Test = Callable[[Mapping[str, Any]], bool]
_MISSING = object()


def compile_filter(spec: Mapping[str, Any]) -> Test:
    """A filter as a test of a document's metadata. Raises `ValueError` that says where and what is wrong."""
    return _all_of(spec, "filters", [MAX_TERMS], 0)


def _all_of(spec: Any, at: str, left: list[int], depth: int) -> Test:
    if not isinstance(spec, Mapping):
        raise ValueError(f"{at} must be an object, got {_short(spec)}")
    if depth > MAX_DEPTH:
        raise ValueError(f"{at}: nested deeper than {MAX_DEPTH}")
    tests = [_term(key, value, f"{at}.{key}", left, depth) for key, value in spec.items()]
    return lambda metadata: all(test(metadata) for test in tests)


def _term(key: str, value: Any, at: str, left: list[int], depth: int) -> Test:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"filters hold more than {MAX_TERMS} conditions")
    if key in ("$and", "$or"):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{at} must be a list of filters that is not empty, got {_short(value)}")
        parts = [_all_of(part, f"{at}[{i}]", left, depth + 1) for i, part in enumerate(value)]
        combine = all if key == "$and" else any
        return lambda metadata: combine(part(metadata) for part in parts)
    if key == "$not":
        inner = _all_of(value, at, left, depth + 1)
        return lambda metadata: not inner(metadata)
    if key.startswith("$"):
        raise ValueError(f"{at}: there is no operator {key}; there are $and, $or, $not, and for a field {_known()}")
    if is_operators(value):
        tests = [_operator(op, operand, f"{at}.{op}", left) for op, operand in value.items()]
    else:
        tests = [_equal(value)]
    path = key.split(".")

    def test(metadata: Mapping[str, Any]) -> bool:
        found = metadata[key] if key in metadata else _look_up(metadata, path)
        return all(t(found) for t in tests)

    return test


def is_operators(value: Any) -> bool:
    """Whether a field's value asks for operators, not for equality with an object."""
    return isinstance(value, Mapping) and any(isinstance(k, str) and k.startswith("$") for k in value)


def _operator(op: str, operand: Any, at: str, left: list[int]) -> Callable[[Any], bool]:
    left[0] -= 1
    if op in ("$eq", "$ne"):
        equal = _equal(operand)
        return equal if op == "$eq" else lambda found: not equal(found)
    if op in ("$in", "$nin"):
        if not isinstance(operand, list):
            raise ValueError(f"{at} must be a list, got {_short(operand)}")
        left[0] -= len(operand)
        tests = [_equal(x) for x in operand]
        is_in = op == "$in"
        return lambda found: any(t(found) for t in tests) is is_in
    if op == "$exists":
        if not isinstance(operand, bool):
            raise ValueError(f"{at} must be true or false, got {_short(operand)}")
        return lambda found: (found is not _MISSING) is operand
    if op in _ORDERS:
        if isinstance(operand, bool) or not isinstance(operand, int | float | str):
            raise ValueError(f"{at} must be a number or a string, got {_short(operand)}")
        return _ordered(_ORDERS[op], operand)
    raise ValueError(f"{at}: there is no operator {op}; there are {_known()}")


_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": lambda a, b: a > b,
    "$gte": lambda a, b: a >= b,
    "$lt": lambda a, b: a < b,
    "$lte": lambda a, b: a <= b,
}


def _known() -> str:
    return ", ".join(("$eq", "$ne", "$in", "$nin", *_ORDERS, "$exists"))


def _equal(value: Any) -> Callable[[Any], bool]:
    def test(found: Any) -> bool:
        if found is _MISSING:
            return False
        return _same(found, value) or (isinstance(found, list) and any(_same(x, value) for x in found))

    return test


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _ordered(compare: Callable[[Any, Any], bool], operand: Any) -> Callable[[Any], bool]:
    def fits(x: Any) -> bool:
        if (
            isinstance(x, bool)
            or isinstance(x, str) != isinstance(operand, str)
            or not isinstance(x, int | float | str)
        ):
            return False
        return compare(x, operand)

    return lambda found: any(map(fits, found)) if isinstance(found, list) else fits(found)


def _look_up(metadata: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(metadata, Mapping) or name not in metadata:
            return _MISSING
        metadata = metadata[name]
    return metadata


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
