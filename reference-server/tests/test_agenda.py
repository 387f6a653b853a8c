"""What is due when, by a clock that the test moves."""

import asyncio

import pytest

from volcano_server import agenda as module
from volcano_server.agenda import Agenda
from volcano_server.clock import ManualClock

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_things_are_done_when_they_are_due_and_not_before() -> None:
    clock = ManualClock()
    done: list[object] = []
    agenda = Agenda(clock)
    for due, what in ((3_000_000, "late"), (1_000_000, "soon"), (3_000_000, "later"), (0, "now")):
        agenda.note(due, done.append, what)

    agenda.run()
    assert done == ["now"]
    clock.advance(0.999999)
    agenda.run()
    assert done == ["now"]
    clock.advance(0.000001)
    agenda.run()
    assert done == ["now", "soon"]
    clock.advance(10)
    agenda.run()
    assert done == ["now", "soon", "late", "later"]


async def test_what_comes_up_while_it_works_is_done_in_its_turn() -> None:
    clock = ManualClock()
    done: list[object] = []
    agenda = Agenda(clock)

    def again(number: int) -> None:
        done.append(number)
        if number < 3:
            agenda.note(number, again, number + 1)

    agenda.note(0, again, 0)
    clock.advance(1)
    agenda.run()

    assert done == [0, 1, 2, 3]


def fail(_: object) -> None:
    raise ZeroDivisionError


async def test_a_fault_costs_nothing_but_itself() -> None:
    clock = ManualClock()
    done: list[object] = []
    agenda = Agenda(clock)
    agenda.note(0, fail, None)
    agenda.note(0, done.append, "the next")

    with pytest.raises(ZeroDivisionError):
        agenda.run()
    assert agenda._timer is not None
    agenda.run()

    assert done == ["the next"]


async def test_a_real_timer_looks_by_itself() -> None:
    """At the latest once a second, because it does not count a suspend: here the clock jumps."""
    clock, done = ManualClock(), asyncio.Event()
    agenda = Agenda(clock)
    agenda.note(60_000_000, lambda _: done.set(), None)
    module_longest, module._LONGEST_SLEEP = module._LONGEST_SLEEP, 0.01
    try:
        agenda.note(59_000_000, lambda _: None, None)
        clock.advance(60)
        await asyncio.wait_for(done.wait(), 5)
    finally:
        module._LONGEST_SLEEP = module_longest


async def test_an_earlier_thing_moves_the_timer_and_clearing_ends_it() -> None:
    clock, done = ManualClock(), asyncio.Event()
    agenda = Agenda(clock)
    agenda.note(900_000_000, lambda _: None, None)
    agenda.note(0, lambda _: done.set(), None)

    await asyncio.wait_for(done.wait(), 5)
    agenda.clear()

    assert agenda._timer is None
