"""What the body of a `with_lock` receives."""

import math

from volcano_sdk.held import HeldLock, OnLost
from volcano_sdk.lease import LockLease


class LockGuard:
    """Tells whether the lock is still held.  Every look checks the clock first; thread-safe.

    Once lost, never held again.  After the body has ended nothing more happens to it.
    """

    __slots__ = ("_held", "_owner")

    def __init__(self, held: HeldLock, owner: object) -> None:
        self._held = held
        self._owner = owner  # a lock that is in use is not abandoned

    def __repr__(self) -> str:
        return f"<LockGuard {self.lease!r} {'lost' if self.lost else 'not lost'}>"

    @property
    def lease(self) -> LockLease:
        """The lease as of its latest renewal."""
        return self._held.holding.lease

    @property
    def lost(self) -> bool:
        return self._held.look() is not None

    def check(self) -> None:
        """LockLostError if the lock is lost."""
        loss = self._held.look()
        if loss is not None:
            raise loss

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until it is lost; False after `timeout` seconds, or if the body ended first."""
        if timeout is not None and math.isnan(timeout):
            raise ValueError("timeout must be a number of seconds or None; got nan")
        return self._held.wait_lost(timeout)

    def on_lost(self, callback: OnLost) -> None:
        """Call `callback(error)` once, on a thread of the SDK's, when the lock is lost.

        At once if it is lost already.  An error that it raises is logged.
        """
        self._held.on_lost(callback)
