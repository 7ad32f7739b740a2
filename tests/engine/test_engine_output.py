"""Stop strings and sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api import SamplingParams
from engine.output import StopStrings
from engine.sampler import NO_TOKEN, NON_FINITE, sample, uniform
from engine.step import ScheduledRequest, StepResult

EMPTY = np.zeros(0, np.int32)


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


def make_request(key: int = 0, index: int = 0, seed: int = 1, **params: object) -> ScheduledRequest:
    extra = {k: params.pop(k) for k in ("stream", "banned_ids", "prompt_ids", "output_ids") if k in params}
    for k in ("prompt_ids", "output_ids"):
        extra[k] = np.asarray(extra.get(k, ()), np.int64)
    return ScheduledRequest(
        key=key,
        token_ids=(1,),
        start=0,
        slots=np.zeros(1, np.int64),
        block_ids=EMPTY,
        block_starts=EMPTY,
        block_valids=EMPTY,
        block_deltas=EMPTY,
        needs_token=True,
        params=SamplingParams(**params),
        seed=seed,
        output_index=index,
        **extra,
    )


def sample_one(row: list[float], **params: object) -> StepResult:
    return sample(torch.tensor([row]), [make_request(**params)])[0]


def test_greedy_takes_the_best_and_non_finite_logits_are_a_fault() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0]])
    fault = StepResult(fault=NON_FINITE, is_non_finite=True)
    assert sample(logits, [make_request(k, temperature=0.0) for k in range(3)]) == {
        0: StepResult(1),
        1: fault,
        2: fault,
    }


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert sample_one([0.0, 3.0, 1.0], temperature=temperature).token_id == 1


def test_bias_penalties_and_bans_change_what_is_best() -> None:
    row = [1.0, 3.0, 2.0, -1.0]
    assert sample_one(row, temperature=0.0, logit_bias={3: 5.0}).token_id == 3
    assert sample_one(row, temperature=0.0, logit_bias={1: -100.0}).token_id == 2
    assert sample_one(row, temperature=0.0, presence_penalty=1.5, output_ids=[1]).token_id == 2
    assert sample_one(row, temperature=0.0, presence_penalty=1.5, output_ids=[1, 2]).token_id == 1
    assert sample_one(row, temperature=0.0, frequency_penalty=0.6, output_ids=[1]).token_id == 1
    assert sample_one(row, temperature=0.0, frequency_penalty=0.6, output_ids=[1, 1]).token_id == 2
    assert sample_one(row, temperature=0.0, repetition_penalty=2.0, prompt_ids=[1]).token_id == 2
    assert sample_one(row, temperature=0.0, repetition_penalty=2.0, prompt_ids=[1], output_ids=[2, 1]).token_id == 1
    # A negative logit gets more negative: here the penalty must not lift token 1 above token 0.
    assert sample_one([-1.5, -1.0], temperature=0.0, repetition_penalty=2.0, prompt_ids=[1]).token_id == 0
    assert sample_one(row, temperature=0.0, banned_ids=(1, 2)).token_id == 0
    assert sample_one(row, banned_ids=(0, 1, 2, 3)).fault == NO_TOKEN


def test_logprobs_are_the_models_own() -> None:
    row = [1.0, 3.0, 2.0, -1.0]
    own = torch.tensor(row).log_softmax(-1).tolist()
    result = sample_one(row, temperature=0.0, logprobs=2, logit_bias={3: 9.0})
    assert result.logprobs is not None
    assert (result.token_id, result.logprobs.token_id, result.logprobs.rank) == (3, 3, 4)
    assert result.logprobs.logprob == pytest.approx(own[3])
    assert [t for t, _ in result.logprobs.top] == [1, 2]
    assert [p for _, p in result.logprobs.top] == pytest.approx([own[1], own[2]])
    none = sample_one(row, temperature=0.0, logprobs=0).logprobs
    assert none is not None
    assert (none.rank, none.top) == (1, ())


def draws(n: int = 2000, **params: object) -> np.ndarray:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).repeat(n, 1)
    got = sample(logits, [make_request(i, index=i, **params) for i in range(n)])
    return np.bincount([r.token_id for r in got.values()], minlength=4) / n


def test_draws_follow_the_distribution_that_is_left() -> None:
    assert np.abs(draws() - [0.5, 0.25, 0.15, 0.1]).max() < 0.04
    assert np.abs(draws(top_k=2) - [2 / 3, 1 / 3, 0, 0]).max() < 0.04
    assert np.abs(draws(top_p=0.7) - [2 / 3, 1 / 3, 0, 0]).max() < 0.04
    assert np.abs(draws(top_p=0.76) - np.array([0.5, 0.25, 0.15, 0]) / 0.9).max() < 0.04
    assert np.abs(draws(min_p=0.4) - [2 / 3, 1 / 3, 0, 0]).max() < 0.04
    assert np.abs(draws(min_p=1.0) - [1, 0, 0, 0]).max() == 0
    assert np.abs(draws(min_p=0.25, top_k=2, top_p=0.5) - [1, 0, 0, 0]).max() == 0
    sharp = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    assert np.abs(draws(temperature=0.5) - sharp / sharp.sum()).max() < 0.04


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    alone = sample(logits, [make_request(5, index=3, seed=42)])[5]
    crowd = sample(logits.repeat(3, 1), [make_request(k, index=3, seed=s) for k, s in ((1, 1), (5, 42), (6, 2))])
    assert crowd[5] == alone
    assert uniform(42, 3) == uniform(42, 3) != uniform(42, 4)
    assert len({uniform(42, i, stream) for i in range(4) for stream in range(4)}) == 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {99: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
        ("n", 0),
        ("n", 65),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (99,)),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value}).verify(vocab_size=50)
