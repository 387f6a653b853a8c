"""What has to be done when, by the host's clock: one timer over a heap.

Whoever moves a clock in a test calls `run`; a suspend is noticed within a second, as the timer
never sleeps for longer.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from volcano_server.clock import HostClock

_LONGEST_SLEEP = 1.0


class Agenda:
    """Used from one event loop.  Times are µs of the clock's `elapsed`."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._order = count()  # what is due at the same moment is done in the order it was noted
        # By due: (31_000_000, 17, do, what), ...
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        """Once there was something to do."""

    def now(self) -> int:
        return self._clock.elapsed()

    def note(self, due: int, do: Callable[[Any], None], what: Any) -> None:
        """Call `do(what)` at `due`, or soon if that is past.  There is no way to take it back."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
        heapq.heappush(self._heap, (due, next(self._order), do, what))
        if self._timer is None or due < self._timer_due:
            self._set_timer()

    def run(self) -> None:
        """Do now what is due by now."""
        now = self._clock.elapsed()
        try:
            while self._heap and self._heap[0][0] <= now:
                _, _, do, what = heapq.heappop(self._heap)
                do(what)
        finally:
            self._set_timer()

    def clear(self) -> None:
        """Nothing is to be done any more."""
        self._heap.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            assert self.loop is not None
            self._timer_due = self._heap[0][0]
            left = max(0, self._timer_due - self._clock.elapsed()) / 1_000_000
            self._timer = self.loop.call_later(min(left, _LONGEST_SLEEP), self.run)
