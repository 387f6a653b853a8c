import asyncio

import anyio
import pytest
from async_stage import Call, ManualClock, settle

from volcano_sdk.async_shield import finish

pytestmark = pytest.mark.anyio


async def test_work_that_nobody_interrupts_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert await finish(work, clock=ManualClock()) == (7, None)


async def test_an_error_of_the_work_comes_out_bare() -> None:
    async def work() -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await finish(work, clock=ManualClock())


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_ctrl_c_in_the_work_is_an_interruption() -> None:
    """trio raises KeyboardInterrupt in whichever task is running."""

    async def work() -> int:
        raise KeyboardInterrupt

    result, interruption = await finish(work, clock=ManualClock())

    assert result is None
    assert isinstance(interruption, KeyboardInterrupt)


async def test_interrupted_work_is_brought_to_its_end() -> None:
    clock = ManualClock()
    work_goes_on = anyio.Event()

    async def work() -> int:
        await work_goes_on.wait()
        return 7

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: finish(work, clock=clock))
        await settle()
        call.scope.cancel()
        await clock.advance(1000)
        assert not call.ended.is_set()
        work_goes_on.set()

    result, interruption = call.value
    assert result == 7
    assert isinstance(interruption, anyio.get_cancelled_exc_class())


async def test_interrupted_work_is_cut_off_when_patience_ends() -> None:
    clock = ManualClock()
    was_cut = anyio.Event()

    async def work() -> int:
        try:
            await anyio.sleep_forever()
        finally:
            was_cut.set()
        return 7

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: finish(work, clock=clock, patience=2))
        await settle()
        call.scope.cancel()
        await clock.advance(1.9)
        assert not was_cut.is_set()
        await clock.advance(0.2)
        assert was_cut.is_set()

    result, interruption = call.value
    assert result is None
    assert isinstance(interruption, anyio.get_cancelled_exc_class())


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_task_cancel_at_any_moment_neither_stops_the_work_nor_is_forgotten() -> None:
    """asyncio alone: `task.cancel()` goes through scopes, also while the task group closes."""
    for turns in range(12):
        clock = ManualClock()
        ended: list[int] = []

        async def work(ended: list[int] = ended) -> int:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(7)
            return 7

        task = asyncio.create_task(finish(work, clock=clock))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await settle()

        if turns == 0:
            assert task.cancelled()
            assert not ended
        elif task.cancelling():
            assert ended
            result, interruption = task.result()
            assert result == 7
            assert interruption is None or isinstance(interruption, asyncio.CancelledError)
