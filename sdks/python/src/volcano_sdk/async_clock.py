"""Time for the async flavour: `clock.Clock`, and the two ways in which a task waits for it."""

from contextlib import AbstractContextManager
from typing import Protocol

import anyio

from volcano_sdk.clock import Clock, SystemClock

_SLICE = 1.0
"""Seconds.  The event loop's timers stand still while the host sleeps; a look at the clock each
second shows a suspend soon after the resume."""


class AsyncClock(Clock, Protocol):
    def move_on_at(self, at: float) -> AbstractContextManager[anyio.CancelScope, bool]:
        """A scope, to be entered at once, that is cancelled at `at`; never, if that is infinite."""

    async def wait(self, event: anyio.Event, until: float) -> None:
        """Wait for the event, at most until `until`.  May return early: look and wait again."""


class AsyncSystemClock(SystemClock):
    def move_on_at(self, at: float) -> anyio.CancelScope:
        return anyio.CancelScope(deadline=anyio.current_time() + at - self.now())

    async def wait(self, event: anyio.Event, until: float) -> None:
        with anyio.move_on_after(min(until - self.now(), _SLICE)):
            await event.wait()
