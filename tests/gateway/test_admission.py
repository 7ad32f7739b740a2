"""Bounds, quotas and turns, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.admission import Admission, Limits, Refused, Ticket, Turn
from gateway.keys import Caller
from gateway.quota import Bucket


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An admission whose turns note what they hear."""

    def __init__(self, **limits) -> None:
        self.clock = Clock()
        self.admission = Admission(Limits(**{"max_active": 1, **limits}), self.clock)
        self.refused: list[tuple[Turn | None, str]] = []

    def admit(self, tenant: str = "", num_bytes: int = 40, key: str = "") -> Ticket:
        return self.admission.admit(Caller(tenant, key_id=key), "/r", num_bytes)

    def ask(self, ticket: Ticket, num_tokens: int = 10, max_tokens: int = 10, seats: int = 1) -> Turn:
        heard: list[Turn] = []
        turn = self.admission.ask(
            ticket, num_tokens, max_tokens, seats, lambda: None, lambda e: self.refused.append((heard[0], e.code))
        )
        heard.append(turn)
        return turn

    def start(self, tenant: str = "", **kwargs) -> tuple[Ticket, Turn]:
        ticket = self.admit(tenant)
        return ticket, self.ask(ticket, **kwargs)

    def end(self, ticket: Ticket, turn: Turn, num_output_tokens: int = 10) -> None:
        turn.num_output_tokens = num_output_tokens
        self.admission.leave(turn)
        self.admission.close(ticket)


def test_seats_are_given_in_order_and_freed_by_whoever_ends() -> None:
    desk = Desk(max_active=2)
    jobs = [desk.start() for _ in range(4)]
    assert [turn.is_running for _, turn in jobs] == [True, True, False, False]
    desk.end(*jobs[1])
    assert [turn.is_running for _, turn in jobs] == [True, True, True, False]
    desk.end(*jobs[3])
    desk.end(*jobs[3])  # a second end changes nothing
    assert desk.admission.num_queued == 0
    assert desk.admission.num_running == 2


def test_requests_beyond_the_queue_are_refused_with_a_time_to_come_back() -> None:
    desk = Desk(max_queued_requests=2)
    tickets = [desk.admit() for _ in range(3)]
    desk.ask(tickets[0])
    with pytest.raises(Refused, match="2 requests are queued, 2 may be") as e:
        desk.admit()
    assert (e.value.code, e.value.status, e.value.reason) == ("queue_full", 429, "queue_full")
    assert 1 <= e.value.retry_after_s <= 60
    desk.admission.close(tickets[2])
    desk.admit()


def test_prompt_tokens_beyond_the_queue_are_refused() -> None:
    desk = Desk(max_queued_tokens=1000)
    desk.start()
    desk.admit(num_bytes=4 * 900)
    with pytest.raises(Refused, match="900 prompt tokens are queued and this request has about 101; 1000 may be"):
        desk.admit(num_bytes=404)
    desk.admit(num_bytes=400)


def test_a_free_engine_takes_any_prompt() -> None:
    desk = Desk(max_queued_tokens=10, max_queued_requests=0)
    ticket = desk.admit(num_bytes=10**6)
    assert desk.ask(ticket, num_tokens=250_000).is_running
    with pytest.raises(Refused):
        desk.admit(num_bytes=1)


def test_the_estimate_learns_what_retrieval_adds() -> None:
    desk = Desk(max_active=1000)
    for _ in range(60):
        desk.start(num_tokens=1310)
    assert desk.admit(num_bytes=40).num_tokens == pytest.approx(1310, rel=0.02)


def test_a_request_of_many_prompts_cannot_pass_the_bound() -> None:
    desk = Desk(max_queued_requests=3)
    ticket = desk.admit()
    turns = [desk.ask(ticket) for _ in range(4)]
    with pytest.raises(Refused):
        desk.ask(ticket)
    for turn in turns:
        desk.admission.leave(turn)
    desk.admission.close(ticket)
    assert (desk.admission.num_queued, desk.admission.num_running) == (0, 0)


def test_a_full_queue_of_one_tenant_does_not_keep_another_out() -> None:
    desk = Desk(max_queued_requests=4)
    jobs = [desk.start("flood") for _ in range(5)]
    with pytest.raises(Refused):
        desk.start("flood")
    desk.start("guest")
    assert desk.refused == [(jobs[4][1], "queue_full")]
    desk.start("guest")
    assert len(desk.refused) == 2
    with pytest.raises(Refused):  # now both have two
        desk.start("guest")
    assert desk.admission.num_queued == 4


def test_tenants_take_turns() -> None:
    desk = Desk(tenant_weights={"big": 2.0})
    running = desk.start("small")
    jobs = {f"{tenant}{i}": desk.start(tenant) for i in range(12) for tenant in ("small", "big")}
    order = []
    for _ in range(12):
        desk.end(*running)
        name, running = next((n, j) for n, j in jobs.items() if j[1].is_running)
        order.append(name.rstrip("0123456789"))
        del jobs[name]
    assert order.count("big") == 8


def test_what_waits_is_refused_when_the_server_ends() -> None:
    desk = Desk()
    jobs = [desk.start() for _ in range(3)]
    desk.admission.refuse_all(Refused("shutting_down", "shutting_down", "ending", 1))
    assert sorted(code for _, code in desk.refused) == ["shutting_down"] * 2
    assert desk.admission.num_running == 1
    for job in jobs:
        desk.end(*job)
    assert desk.admission.num_queued == 0


def test_a_ticket_tells_how_long_it_may_still_be_queued() -> None:
    desk = Desk(queue_timeout_s=7)
    ticket = desk.admit()
    desk.clock.now += 5
    assert desk.admission.left_s(ticket) == 2
    desk.clock.now += 5
    assert desk.admission.left_s(ticket) == 0
    assert Desk(queue_timeout_s=0).admission.left_s(ticket := Desk(queue_timeout_s=0).admit()) is None
    assert ticket.deadline_s is None


def test_a_keys_requests_at_once_are_bounded() -> None:
    desk = Desk(key_max_concurrent=2, max_active=10)
    jobs = [desk.admit(key="k") for _ in range(2)]
    with pytest.raises(Refused, match="concurrent requests") as e:
        desk.admit(key="k")
    assert (e.value.code, e.value.reason) == ("rate_limit_exceeded", "key_concurrent_requests")
    desk.admit(key="other")
    desk.admission.close(jobs[0])
    desk.admission.close(jobs[0])
    desk.admit(key="k")


def test_a_keys_requests_a_minute_come_back_bit_by_bit() -> None:
    desk = Desk(key_requests_per_minute=6, max_active=100)
    for _ in range(6):
        desk.admission.close(desk.admit(key="k"))
    with pytest.raises(Refused, match="requests per minute") as e:
        desk.admit(key="k")
    assert e.value.retry_after_s == 10
    desk.clock.now += e.value.retry_after_s
    desk.admit(key="k")
    with pytest.raises(Refused):
        desk.admit(key="k")


def test_a_keys_tokens_a_minute_are_what_was_used() -> None:
    desk = Desk(key_tokens_per_minute=600, max_active=100)
    ticket = desk.admit(num_bytes=400, key="k")
    desk.end(ticket, desk.ask(ticket, num_tokens=300), num_output_tokens=500)
    with pytest.raises(Refused, match="tokens per minute") as e:
        desk.admit(num_bytes=4, key="k")
    assert e.value.retry_after_s > 20  # 200 owed, and the estimate of the next
    desk.clock.now += e.value.retry_after_s
    desk.admit(num_bytes=4, key="k")


def test_a_prompt_above_the_quota_needs_a_full_bucket() -> None:
    desk = Desk(key_tokens_per_minute=100)
    desk.admission.close(desk.admit(num_bytes=4000, key="k"))  # the estimate is given back: nothing was computed
    desk.admission.close(desk.admit(num_bytes=4000, key="k"))


def test_a_refused_request_costs_no_quota() -> None:
    desk = Desk(key_requests_per_minute=2, max_queued_requests=0)
    ticket = desk.admit(key="k")
    for _ in range(5):
        with pytest.raises(Refused, match="queued"):
            desk.admit(key="k")
    desk.admission.close(ticket)
    desk.admit(key="k")


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 400)), max_size=50))
def test_a_bucket_never_gives_more_than_a_minutes_worth_and_what_flows_in(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    now, taken = 0.0, 0.0
    bucket = Bucket(rate, now)
    for pause_s, amount in steps:
        now += pause_s
        if bucket.wait_s(amount, now) == 0 and amount <= rate:
            bucket.take(amount, now)
            taken += amount
        assert taken <= rate + now * rate / 60 + 1e-6
        wait_s = bucket.wait_s(amount, now)
        assert bucket.wait_s(amount, now + wait_s + 1e-6) == 0


class AdmissionMachine(RuleBasedStateMachine):
    """Requests that come, ask, end or leave in any order, against plain counts."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(max_active=3, max_queued_requests=4, max_queued_tokens=200)
        self.jobs: list[tuple[Ticket, list[Turn]]] = []

    @rule(tenant=st.sampled_from("abc"), num_bytes=st.integers(0, 400))
    def arrive(self, tenant: str, num_bytes: int) -> None:
        try:
            self.jobs.append((self.desk.admit(tenant, num_bytes), []))
        except Refused:
            assert self.desk.admission.num_queued or self.desk.admission.num_running

    @rule(pick=st.integers(0, 50), tokens=st.integers(1, 90), seats=st.integers(1, 3))
    def ask(self, pick: int, tokens: int, seats: int) -> None:
        if self.jobs:
            ticket, turns = self.jobs[pick % len(self.jobs)]
            try:
                turns.append(self.desk.ask(ticket, tokens, 5, seats))
            except Refused:
                assert not ticket.holds_place

    @rule(pick=st.integers(0, 50), made=st.integers(0, 20))
    def end(self, pick: int, made: int) -> None:
        if self.jobs:
            ticket, turns = self.jobs.pop(pick % len(self.jobs))
            for turn in turns:
                turn.num_output_tokens = made
                self.desk.admission.leave(turn)
            self.desk.admission.close(ticket)

    @invariant()
    def counts_are_true(self) -> None:
        a = self.desk.admission
        pushed_out = {turn for turn, _ in self.desk.refused}
        turns = [t for _, ts in self.jobs for t in ts if t not in pushed_out]
        waiting = [t for t in turns if not t.is_running]
        assert a.num_running == len(turns) - len(waiting)
        assert a.num_waiting == len(waiting)
        preparing = [t for t, _ in self.jobs if t.holds_place]
        assert a.num_queued == len(waiting) + len(preparing)
        assert a.num_queued_tokens == sum(t.num_tokens for t in [*waiting, *preparing])
        seats = sum(t.seats for t in turns if t.is_running)
        assert not waiting or seats >= 3, "a seat is free and somebody waits"
        assert a.num_queued <= 4 + 3
        if not self.jobs:
            assert (a.num_queued, a.num_running, a.num_queued_tokens, a._seats_used) == (0, 0, 0, 0)


TestAdmissionMachine = AdmissionMachine.TestCase
