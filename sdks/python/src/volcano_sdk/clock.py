"""Time, and the only file that touches it.

`now` counts seconds on a clock that nobody sets and that goes on while the host sleeps.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """What the SDK asks of time."""

    def now(self) -> float:
        """Seconds since some moment; never set, and a suspend is included."""


class SystemClock:
    """CLOCK_BOOTTIME where there is one, else whichever of monotonic and wall clock went further.

    So a suspend shows everywhere, and a wall clock set forward costs a lease, never a lock.
    """

    def __init__(self) -> None:
        self._behind = 0.0
        self._wall_offset = time.time() - time.monotonic()

    def now(self) -> float:
        if hasattr(time, "CLOCK_BOOTTIME"):
            return time.clock_gettime(time.CLOCK_BOOTTIME)
        monotonic = time.monotonic()
        self._behind = max(self._behind, time.time() - monotonic - self._wall_offset)
        return monotonic + self._behind
