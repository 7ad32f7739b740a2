"""Stop strings and sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api import SamplingParams
from engine.output import StopStrings
from engine.sampler import NON_FINITE, sample, uniform
from engine.scheduler import ScheduledRequest


def push_all(stops: StopStrings, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        text, met = stops.push(piece)
        out += text
        if met:
            return out
    return out + stops.flush()


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_streamed_text_ends_where_the_whole_text_would(text: str, stops: list[str], size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    out = push_all(StopStrings(stops), pieces)
    found = [text.find(s) for s in stops if s in text]
    if not found:
        assert out == text
    else:
        assert not any(s in out for s in stops)
        assert text.startswith(out)


def test_a_stop_string_over_two_pieces_never_leaks() -> None:
    stops = StopStrings(["DEFG"])
    assert stops.push("ABCD") == ("ABC", False)
    assert stops.push("EF") == ("", False)
    assert stops.push("GHI") == ("", True)


def make_request(name: str = "r", index: int = 0, seed: int = 1, **params: object) -> ScheduledRequest:
    empty = np.zeros(0, np.int32)
    return ScheduledRequest(
        name, (1,), 0, np.zeros(1, np.int64), empty, empty, empty, empty, True, SamplingParams(**params), seed, index
    )


def test_greedy_takes_the_best_and_non_finite_logits_are_a_fault() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0]])
    rows = [make_request(n, temperature=0.0) for n in "abc"]
    assert sample(logits, rows) == {"a": 1, "b": NON_FINITE, "c": NON_FINITE}


def draws(n: int = 2000, **params: object) -> np.ndarray:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).repeat(n, 1)
    got = sample(logits, [make_request(str(i), index=i, **params) for i in range(n)])
    return np.bincount(list(got.values()), minlength=4) / n


def test_draws_follow_the_distribution_that_is_left() -> None:
    assert np.abs(draws() - [0.5, 0.25, 0.15, 0.1]).max() < 0.04
    assert np.abs(draws(top_k=2) - [2 / 3, 1 / 3, 0, 0]).max() < 0.04
    assert np.abs(draws(top_p=0.7) - [2 / 3, 1 / 3, 0, 0]).max() < 0.04
    assert np.abs(draws(top_p=0.76) - np.array([0.5, 0.25, 0.15, 0]) / 0.9).max() < 0.04
    sharp = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    assert np.abs(draws(temperature=0.5) - sharp / sharp.sum()).max() < 0.04


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    alone = sample(logits, [make_request("a", index=3, seed=42)])["a"]
    crowd = sample(logits.repeat(3, 1), [make_request(n, index=3, seed=s) for n, s in (("x", 1), ("a", 42), ("y", 2))])
    assert crowd["a"] == alone
    assert uniform(42, 3) == uniform(42, 3) != uniform(42, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (99,)),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value}).verify(vocab_size=50)
