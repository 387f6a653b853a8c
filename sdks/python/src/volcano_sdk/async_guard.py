"""What the body of an async `with_lock` receives."""

import math
from collections.abc import Callable

from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_renewal import Held
from volcano_sdk.errors import LockLostError
from volcano_sdk.lease import LockLease


class AsyncLockGuard:
    """Whether the lock is still ours.  Each question looks at the clock first, so the first look
    after a blocked event loop or a suspend sees the loss.  Lost once, it is never held again.

    `lost` and `check` may be asked from worker threads too.
    """

    def __init__(self, held: Held, clock: AsyncClock) -> None:
        self._held = held
        self._clock = clock

    @property
    def lease(self) -> LockLease:
        """As last renewed."""
        return self._held.holding.lease

    @property
    def lost(self) -> bool:
        return self._held.look() is not None

    def check(self) -> None:
        """Raise LockLostError when the lock is lost: ask before what cannot be undone."""
        self._held.check()

    async def wait_lost(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  as in sync
        """Wait for the loss, at most `timeout` seconds: True when the lock is lost.

        False when the time is over, or the body ended with the lock still ours.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout must be a number of seconds or None; got nan")
        until = math.inf if timeout is None else self._clock.now() + timeout
        while not self.lost and not self._held.over.is_set() and self._clock.now() < until:
            await self._clock.wait(self._held.over, until)
        return self.lost

    def on_lost(self, callback: Callable[[LockLostError], object]) -> None:
        """Have `callback(loss)` called once, in the event loop; at once if it is lost already.

        It must not block; what it raises is logged.
        """
        self._held.on_lost(callback)

    def __repr__(self) -> str:
        loss = self._held.holding.loss
        return f"<AsyncLockGuard {self.lease!r} {'lost' if loss else 'held'}>"
