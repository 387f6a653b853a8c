"""Work that is brought to an end although whoever waits for it is cancelled.

A shielded cancel scope alone is not enough: asyncio's `task.cancel()` goes through it.  So the work
runs in a task of its own, which nobody but us can cancel.
"""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from volcano_sdk.async_clock import AsyncClock

T = TypeVar("T")


async def finish(
    work: Callable[[], Awaitable[T]], *, clock: AsyncClock, patience: float = math.inf
) -> tuple[T | None, BaseException | None]:
    """What came of the work, and by what its caller was interrupted meanwhile (a cancellation,
    KeyboardInterrupt): the caller raises that when it has cleaned up.

    Once interrupted, the work has `patience` seconds left; then it is cut off, with None for its
    result.  What it raises itself is raised here.
    """
    result: T | None = None
    failure: Exception | None = None
    interruption: BaseException | None = None
    ended = anyio.Event()
    shield = anyio.CancelScope(shield=True)

    async def run() -> None:
        nonlocal result, failure, interruption
        try:
            with shield:
                result = await work()
        except Exception as error:  # noqa: BLE001  raised below, outside of the task group
            failure = error
        except (KeyboardInterrupt, SystemExit) as error:  # trio raises it in any running task
            interruption = error
        finally:
            ended.set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                await ended.wait()
            except BaseException as error:  # noqa: BLE001  handed to the caller
                interruption = interruption or error
                await _wait_out(ended, clock.now() + patience, clock)
                shield.cancel()
    except BaseException as error:  # noqa: BLE001  cancelled once more, while the task ended
        interruption = interruption or error
    if failure is not None:
        raise failure
    return result, interruption


async def _wait_out(ended: anyio.Event, until: float, clock: AsyncClock) -> None:
    """Wait, however often somebody cancels us."""
    while not ended.is_set() and clock.now() < until:
        try:
            with anyio.CancelScope(shield=True):
                await clock.wait(ended, until)
        except BaseException:  # noqa: BLE001, S112  the first interruption is the one that counts
            continue
