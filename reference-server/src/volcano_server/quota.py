"""How many operations a project may do in each minute of the wall clock.  Pure.

    spend(window, operations, limit=, now=) -> (window, spent)

Windows are fixed: each begins on the minute.  Only the present one is kept, so a wall clock that is
set, forward or back, begins a fresh one.  The rule in words: docs/semantics.md#quota.

Servers that share a store tell each other from time to time: each adds what it has let through
since to one sum, and counts with what the others have added.  So a project gets at most its limit,
and what the other servers let through since they were last heard of.
"""

from collections.abc import Mapping

from volcano_server.value import value

_SECOND = 1_000_000
_WINDOW = 60 * _SECOND


@value
class Window:
    """What is kept per project.  `number`: of the minute since 1970; `used`: at this server."""

    number: int
    used: int
    told: int = 0
    """How much of `used` is in the sum."""
    elsewhere: int = 0
    """What was in the sum beside that."""


UNUSED = Window(number=-1, used=0)


@value
class Spent:
    """What became of some operations: the first `allowed` of them may be done."""

    allowed: int
    limit: int
    remaining: int
    reset_at: int  # when the window ends: seconds since 1970
    retry_after: int  # whole seconds until then, at least 1


def spend(window: Window, operations: int, *, limit: int, now: int) -> tuple[Window, Spent]:
    """Count operations in their order.

    `limit`: per window, 0 for none (then nothing is counted); `now`: the wall clock in µs.
    """
    number = now // _WINDOW
    end = (number + 1) * _WINDOW
    before = window if window.number == number else Window(number, used=0)
    left = max(0, limit - before.used - before.elsewhere)
    allowed = min(operations, left) if limit else operations
    counted = allowed if limit else 0
    after = Window(number, before.used + counted, before.told, before.elsewhere)
    return after, Spent(
        allowed=allowed,
        limit=limit,
        remaining=left - counted if limit else 0,
        reset_at=end // _SECOND,
        retry_after=-((now - end) // _SECOND),
    )


def exchanged(window: Window, *, told: int, total: int) -> Window:
    """After `told` operations were added to the sum, which is `total` now."""
    all_told = window.told + told
    return Window(window.number, window.used, all_told, elsewhere=max(0, total - all_told))


class Quota:
    """The windows of all projects, in memory: a restart forgets them."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}  # {"shop": Window(number=30000000, used=17)}

    def spend(self, project: str, operations: int = 1, *, limit: int, now: int) -> Spent:
        window = self._windows.get(project, UNUSED)
        self._windows[project], spent = spend(window, operations, limit=limit, now=now)
        return spent

    def untold(self, now: int) -> dict[tuple[str, int], int]:
        """What this server has let through in the present windows and not told yet, zeros too.

        {("shop", 30000000): 4, ...}: by project and number of the window.
        """
        number = now // _WINDOW
        return {
            (project, number): window.used - window.told
            for project, window in self._windows.items()
            if window.number == number
        }

    def exchange(
        self, told: Mapping[tuple[str, int], int], totals: Mapping[tuple[str, int], int]
    ) -> None:
        """`told` was added to the sums, which are `totals` now."""
        for (project, number), count in told.items():
            window = self._windows[project]
            if window.number == number:
                total = totals[project, number]
                self._windows[project] = exchanged(window, told=count, total=total)
