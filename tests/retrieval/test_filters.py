"""Metadata filters: every operator, closed on what does not fit, and clear about what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.filters import MAX_TERMS, compile_filter

DOC = {"lang": "en", "year": 2021, "tags": ["a", "b"], "ok": True, "none": None, "author": {"name": "Ann"}, "a.b": 1}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, True),
        ({"lang": "en"}, True),
        ({"lang": "EN"}, False),
        ({"lang": "en", "year": 2021}, True),
        ({"lang": "en", "year": 2020}, False),
        ({"year": 2021.0}, True),
        ({"ok": True}, True),
        ({"ok": 1}, False),
        ({"year": True}, False),
        ({"none": None}, True),
        ({"missing": None}, False),
        ({"tags": "a"}, True),
        ({"tags": ["a", "b"]}, True),
        ({"tags": "c"}, False),
        ({"author": {"name": "Ann"}}, True),
        ({"author.name": "Ann"}, True),
        ({"author.age": 3}, False),
        ({"a.b": 1}, True),
        ({"lang": {"$eq": "en"}}, True),
        ({"lang": {"$ne": "en"}}, False),
        ({"lang": {"$ne": "vi"}}, True),
        ({"missing": {"$ne": "vi"}}, True),
        ({"tags": {"$ne": "a"}}, False),
        ({"lang": {"$in": ["vi", "en"]}}, True),
        ({"lang": {"$in": []}}, False),
        ({"tags": {"$in": ["x", "b"]}}, True),
        ({"lang": {"$nin": ["vi"]}}, True),
        ({"tags": {"$nin": ["b"]}}, False),
        ({"missing": {"$nin": ["b"]}}, True),
        ({"missing": {"$in": ["b", None]}}, False),
        ({"year": {"$gt": 2020}}, True),
        ({"year": {"$gt": 2021}}, False),
        ({"year": {"$gte": 2021, "$lt": 2022}}, True),
        ({"year": {"$lte": 2020.5}}, False),
        ({"year": {"$gt": "2020"}}, False),
        ({"lang": {"$gte": "e", "$lt": "f"}}, True),
        ({"ok": {"$gt": 0}}, False),
        ({"missing": {"$lt": 5}}, False),
        ({"none": {"$lt": 5}}, False),
        ({"lang": {"$exists": True}}, True),
        ({"none": {"$exists": True}}, True),
        ({"missing": {"$exists": True}}, False),
        ({"missing": {"$exists": False}}, True),
        ({"author.age": {"$exists": False}}, True),
        ({"$and": [{"lang": "en"}, {"year": 2021}]}, True),
        ({"$and": [{"lang": "en"}, {"year": 1}]}, False),
        ({"$or": [{"lang": "vi"}, {"year": 2021}]}, True),
        ({"$or": [{"lang": "vi"}, {"year": 1}]}, False),
        ({"$not": {"lang": "vi"}}, True),
        ({"$not": {"lang": "en"}}, False),
        ({"$not": {"missing": 1}}, True),
        ({"lang": "en", "$or": [{"year": 1}, {"$not": {"tags": "z"}}]}, True),
    ],
)
def test_every_operator(spec: dict[str, Any], fits: bool) -> None:
    assert compile_filter(spec)(DOC) is fits


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"a": {"$near": 1}}, r"filters\.a\.\$near: there is no operator \$near"),
        ({"$nor": []}, r"filters\.\$nor: there is no operator \$nor"),
        ({"$or": []}, r"filters\.\$or must be a list of filters that is not empty"),
        ({"$and": {"a": 1}}, r"filters\.\$and must be a list"),
        ({"$or": [{"a": 1}, 2]}, r"filters\.\$or\[1\] must be an object, got 2"),
        ({"$not": []}, r"filters\.\$not must be an object"),
        ({"a": {"$in": "x"}}, r"filters\.a\.\$in must be a list, got 'x'"),
        ({"a": {"$gt": None}}, r"filters\.a\.\$gt must be a number or a string"),
        ({"a": {"$gt": True}}, r"filters\.a\.\$gt must be a number or a string"),
        ({"a": {"$exists": 1}}, r"filters\.a\.\$exists must be true or false"),
        ({"a": {"$gt": 1, "b": 2}}, r"filters\.a\.b: there is no operator b"),
        ({"a": {"$in": list(range(MAX_TERMS + 1))}, "b": 1}, "more than"),
    ],
)
def test_what_is_wrong_is_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_filter(spec)


def test_depth_is_bounded() -> None:
    spec: dict[str, Any] = {"a": 1}
    for _ in range(50):
        spec = {"$not": spec}
    with pytest.raises(ValueError, match="nested deeper"):
        compile_filter(spec)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_any_json_is_a_filter_or_a_clear_error(spec: dict[str, Any], metadata: dict[str, Any]) -> None:
    test, error = None, ""
    try:
        test = compile_filter(spec)
    except ValueError as e:
        error = str(e)
    if test is None:
        assert error.startswith("filters")
    else:
        assert test(metadata) in (True, False)
        assert compile_filter({"$not": spec})(metadata) is not test(metadata)
