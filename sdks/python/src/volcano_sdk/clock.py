"""Time, and the only file that touches it.

`now` counts seconds on a clock that nobody sets and that goes on while the host sleeps.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """What the SDK asks of time."""

    def now(self) -> float:
        """Seconds since some moment; never set, and a suspend is included."""

    def wall(self) -> float:
        """Seconds since 1970, as the host's clock has it: for what a server says of instants."""


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
        missed = time.time() - monotonic - self._wall_offset
        if missed > self._behind:
            self._behind = missed
        elif missed < self._behind - _STEP_BACK:
            self._wall_offset -= self._behind - missed  # or it would hide the next suspend
        return monotonic + self._behind

    def wall(self) -> float:
        return time.time()


_STEP_BACK = 1.0
"""Seconds from which the wall clock was set back; less is what passes between two readings."""
