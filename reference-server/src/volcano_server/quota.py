"""How many operations a project may do in each minute of the wall clock.  Pure.

    spend(window, operations, limit=, now=) -> (window, spent)

Windows are fixed: each begins on the minute.  Only the present one is kept, so a wall clock that is
set, forward or back, begins a fresh one.  The rule in words: docs/semantics.md#quota.
"""

from dataclasses import dataclass

_SECOND = 1_000_000
_WINDOW = 60 * _SECOND


@dataclass(frozen=True, slots=True)
class Window:
    """What is kept per project.  `number`: of the minute since 1970."""

    number: int
    used: int


UNUSED = Window(number=-1, used=0)


@dataclass(frozen=True, slots=True)
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
    used = window.used if window.number == number else 0
    allowed = min(operations, max(0, limit - used)) if limit else operations
    used += allowed if limit else 0
    return Window(number, used), Spent(
        allowed=allowed,
        limit=limit,
        remaining=max(0, limit - used),
        reset_at=end // _SECOND,
        retry_after=-((now - end) // _SECOND),
    )


class Quota:
    """The windows of all projects, in memory: a restart forgets them."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}  # {"shop": Window(number=30000000, used=17)}

    def spend(self, project: str, operations: int = 1, *, limit: int, now: int) -> Spent:
        window = self._windows.get(project, UNUSED)
        self._windows[project], spent = spend(window, operations, limit=limit, now=now)
        return spent
