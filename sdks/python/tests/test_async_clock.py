import math

import anyio
import anyio.lowlevel
import pytest

from volcano_sdk.async_clock import AsyncSystemClock

pytestmark = pytest.mark.anyio


async def test_a_scope_ends_at_its_moment() -> None:
    clock = AsyncSystemClock()

    with clock.move_on_at(clock.now() + 0.01) as scope:
        await anyio.sleep_forever()

    assert scope.cancelled_caught


async def test_a_scope_without_end_never_ends() -> None:
    clock = AsyncSystemClock()

    with clock.move_on_at(math.inf) as scope:
        await anyio.lowlevel.checkpoint()

    assert not scope.cancelled_caught


async def test_waiting_ends_with_the_event() -> None:
    event = anyio.Event()
    event.set()

    await AsyncSystemClock().wait(event, math.inf)


async def test_waiting_is_cut_into_slices_so_that_a_suspend_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("volcano_sdk.async_clock._SLICE", 0.01)
    event = anyio.Event()

    await AsyncSystemClock().wait(event, math.inf)

    assert not event.is_set()


async def test_what_is_over_is_not_waited_for() -> None:
    clock = AsyncSystemClock()

    await clock.wait(anyio.Event(), clock.now() - 1)
