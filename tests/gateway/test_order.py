"""Orders of passages: along earlier ones, within the bound, and no larger than the cache."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.bench_order import reused
from gateway.order import PassageOrder


def proposed(order: PassageOrder, passages: str, max_shift: int = 9, head: str = "h") -> str:
    return "".join(passages[i] for i in order.propose(head, passages, max_shift))


def test_passages_follow_the_longest_order_that_was_sent_and_then_relevance() -> None:
    order = PassageOrder(1000)
    assert proposed(order, "dcba") == "dcba"
    order.record("h", "abx", [1] * 3)
    assert proposed(order, "dcba") == "abdc"
    assert proposed(order, "bxcd") == "bxcd", "nothing sent began with one of these"
    order.record("h", "ay", [1] * 2)
    order.record("h", "cd", [1] * 2)
    assert proposed(order, "dcba") == "abdc", "what was sent more often goes first"
    assert proposed(order, "dcba", head="another system text") == "dcba"


def test_no_passage_moves_further_than_the_bound() -> None:
    order = PassageOrder(1000)
    order.record("h", "bacd", [1] * 4)
    for _ in range(2):
        order.record("h", "cdab", [1] * 4)
    for _ in range(3):
        order.record("h", "dcba", [1] * 4)
    assert [proposed(order, "abcd", n) for n in range(4)] == ["abcd", "bacd", "cdab", "dcba"]


@given(st.permutations(range(7)), st.integers(0, 7), st.integers(0, 1000))
def test_every_passage_stands_once_and_within_the_bound(passages: list[int], max_shift: int, seed: int) -> None:
    order, rng = PassageOrder(1000), random.Random(seed)
    for _ in range(10):
        order.record("h", rng.sample(range(7), 5), [1] * 5)
    got = order.propose("h", passages, max_shift)
    assert sorted(got) == list(range(7))
    assert all(abs(i - at) <= max_shift for at, i in enumerate(got))


def test_the_tree_is_as_large_as_the_cache_and_forgets_the_least_recently_used() -> None:
    order = PassageOrder(100)
    for name in "abcdefghijkl":
        order.record("h", name + "z", [5, 5])
        order.record("h", "az", [5, 5])
        assert order.num_tokens <= 100
    assert proposed(order, "zka") == "azk"
    assert proposed(order, "zkb") == "kzb"
    assert proposed(order, "zcb") == "zcb", "b and c were forgotten"


def test_the_bench_counts_what_an_exact_prefix_cache_finds() -> None:
    prompts, sizes = [(1, 2, 3), (2, 1, 4), (1, 2, 4)], {1: 10, 2: 20, 3: 30, 4: 40}
    assert reused(prompts, sizes, 0, 1000) == (30 / 200, 0.0)
    share, moved = reused(prompts, sizes, 1, 1000)
    assert share == (30 + 30 + 40) / 200
    assert moved == 2 / 9
