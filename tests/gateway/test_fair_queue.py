"""Fair shares of tenants, by a model of what they were given."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fair_queue import FairQueue

COSTS = st.integers(1, 500)
TENANTS = st.sampled_from("abc")


@given(
    st.lists(st.tuples(TENANTS, COSTS), min_size=1, max_size=60), st.lists(st.integers(1, 5), min_size=3, max_size=3)
)
def test_tenants_with_requests_waiting_get_shares_by_weight(
    arrivals: list[tuple[str, int]], weights: list[int]
) -> None:
    """The theorem of start-time fair queueing: while both wait, shares differ by at most one request of each."""
    queue, weight = FairQueue[int](), dict(zip("abc", weights, strict=True))
    left = Counter(tenant for tenant, _ in arrivals)
    biggest = {t: max((c for x, c in arrivals if x == t), default=0) for t in "abc"}
    for i, (tenant, cost) in enumerate(arrivals):
        queue.push(i, tenant, cost, weight[tenant])
    got: Counter[str] = Counter()
    while (entry := queue.pop()) is not None:
        # Compared before this one is counted: all that wait now have waited since the beginning.
        waiting = [t for t in "abc" if left[t]]
        for a in waiting:
            for b in waiting:
                bound = biggest[a] / weight[a] + biggest[b] / weight[b]
                assert abs(got[a] / weight[a] - got[b] / weight[b]) <= bound
        got[entry.tenant] += int(entry.cost)
        left[entry.tenant] -= 1
    assert not +left


@given(st.lists(st.one_of(st.tuples(TENANTS, COSTS), st.just("pop"), st.just("remove")), max_size=80))
def test_each_request_comes_out_once_and_in_its_tenants_order(actions: list) -> None:
    queue, waiting = FairQueue[int](), {t: [] for t in "abc"}
    for i, action in enumerate(actions):
        everyone = [e for line in waiting.values() for e in line]
        if isinstance(action, tuple):
            waiting[action[0]].append(queue.push(i, *action))
        elif action == "pop":
            entry = queue.pop()
            assert (entry is None) == (not everyone), "work is kept back, or made up"
            if entry is not None:
                assert waiting[entry.tenant].pop(0) is entry
        elif everyone:
            entry = everyone[i % len(everyone)]
            queue.remove(entry)
            waiting[entry.tenant].remove(entry)
        assert len(queue) == sum(map(len, waiting.values()))
        assert [queue.num_waiting(t) for t in "abc"] == [len(waiting[t]) for t in "abc"]


def served(queue: FairQueue[str], n: int) -> str:
    return "".join(entry.item for _ in range(n) if (entry := queue.pop()) is not None)


def test_a_flood_of_one_tenant_passes_nobody_elses_request() -> None:
    queue = FairQueue[str]()
    for _ in range(50):
        queue.push("a", "a", 100)
    assert served(queue, 10) == "a" * 10
    for _ in range(3):
        queue.push("b", "b", 100)
    assert served(queue, 6) in ("bababa", "ababab")


def test_weights_give_tenants_that_many_times_more() -> None:
    queue = FairQueue[str]()
    for _ in range(40):
        queue.push("a", "a", 100, weight=3)
        queue.push("b", "b", 100)
    assert Counter(served(queue, 40)) == {"a": 30, "b": 10}


def test_cheap_requests_get_more_turns_for_the_same_tokens() -> None:
    queue = FairQueue[str]()
    for _ in range(40):
        queue.push("s", "short", 10)
        queue.push("l", "long", 90)
    assert Counter(served(queue, 20)) == {"s": 18, "l": 2}


def test_a_pause_earns_nothing() -> None:
    queue = FairQueue[str]()
    for _ in range(30):
        queue.push("a", "a", 100)
    served(queue, 20)
    for _ in range(10):
        queue.push("b", "b", 100)
    assert Counter(served(queue, 10)) == {"a": 5, "b": 5}


def test_what_a_request_did_cost_replaces_the_estimate() -> None:
    queue = FairQueue[str]()
    for _ in range(30):
        queue.push("a", "a", 100)
        queue.push("b", "b", 100)
    for _ in range(20):
        entry = queue.pop()
        assert entry is not None
        queue.settle(entry, 25 if entry.tenant == "a" else 100)
    # 10 of the 20 would have been a's if its estimates had been true; at a quarter of the cost it gets four times more.
    assert queue.num_waiting("a") == 30 - 16


def test_an_estimate_that_was_too_high_is_no_credit_for_a_tenant_that_paused() -> None:
    queue = FairQueue[str]()
    first = queue.push("a", "a", 1000)
    for _ in range(20):
        queue.push("b", "b", 100)
    assert served(queue, 6) == "abbbbb"
    queue.settle(first, 1)
    for _ in range(10):
        queue.push("a", "a", 100)
    assert Counter(served(queue, 6)) == {"a": 3, "b": 3}


def test_the_longest_line_for_its_weight_is_the_one_to_give_way() -> None:
    queue = FairQueue[str]()
    assert queue.longest() is None
    for i in range(6):
        queue.push(f"a{i}", "a", 1, weight=6)
    for i in range(2):
        queue.push(f"b{i}", "b", 1)
    entry = queue.longest()
    assert entry is not None
    assert entry.item == "b1"


@pytest.mark.parametrize(("cost", "weight"), [(0, 1), (1, 0), (-1, 1)])
def test_costs_and_weights_must_be_positive(cost: float, weight: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        FairQueue[str]().push("a", "a", cost, weight)


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue = FairQueue[int]()
    for i in range(1000):
        queue.push(i, f"tenant-{i}", 10)
        queue.pop()
    assert len(queue._lines) < 5
