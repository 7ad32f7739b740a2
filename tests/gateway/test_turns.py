"""Waiting for turns on an event loop, and where work is done."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.admission import ANYONE, Admission, Limits, Refused, Ticket
from gateway.turns import LONG_TEXT, TICKET, assemble, before_deadline, turn_of


def make_admission(**limits: float) -> Admission:
    return Admission(Limits(**{"max_active": 1, **limits}), lambda: asyncio.get_running_loop().time())


def test_long_texts_are_made_into_prompts_in_a_thread_and_noted_as_a_stage() -> None:
    async def run() -> None:
        ticket = make_admission().admit(ANYONE, "/r", 1)
        TICKET.set(ticket)
        here = threading.get_ident()
        assert await assemble(LONG_TEXT - 1, threading.get_ident) == here
        assert await assemble(LONG_TEXT, threading.get_ident) != here
        assert [s.name for s in ticket.stages] == ["assemble"] * 2
        with pytest.raises(ZeroDivisionError):
            await assemble(LONG_TEXT, lambda: 1 // 0)

    asyncio.run(run())


def test_turns_are_waited_for_and_given_up_by_whoever_is_cancelled() -> None:
    async def run() -> None:
        admission = make_admission()
        order: list[str] = []
        may_end = asyncio.Event()

        async def work(name: str) -> None:
            ticket = admission.admit(ANYONE, "/r", 1)
            async with turn_of(admission, ticket, 10, 10, 1):
                order.append(name)
                await may_end.wait()
            admission.close(ticket)

        tasks = [asyncio.create_task(work(name)) for name in "abc"]
        for _ in range(10):  # each gets as far as it can
            await asyncio.sleep(0)
        assert order == ["a"]
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert admission.num_waiting == 1
        may_end.set()
        await asyncio.gather(tasks[0], tasks[2])
        assert order == ["a", "c"]
        assert admission.num_running == admission.num_waiting == 0

    asyncio.run(run())


def test_the_time_in_the_queue_ends_a_wait_and_frees_the_place() -> None:
    async def run() -> None:
        admission = make_admission(queue_timeout_s=0.01)
        first, second = (admission.admit(ANYONE, "/r", 1) for _ in range(2))

        async def wait(ticket: Ticket) -> None:
            async with turn_of(admission, ticket, 10, 10, 1):
                raise AssertionError("it had no turn")

        async with turn_of(admission, first, 10, 10, 1):
            with pytest.raises(Refused, match=r"queued for 0\.01 s") as e:
                await wait(second)
            assert (e.value.code, e.value.status) == ("queue_timeout", 503)
            assert admission.num_waiting == 0
            never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with pytest.raises(Refused):
                await before_deadline(admission, first, never)

    asyncio.run(run())
