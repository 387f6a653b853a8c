"""Time on one machine, and the clock of a store that keeps its leases there.

The host has three facts: the wall clock (which people and time servers set), the time since boot
(suspend-aware, never set by anybody) and the boot's id.  `LeaseClock` makes of them a clock that
never runs backwards and never jumps with the wall clock: docs/semantics.md#the-clock-on-sqlite.
"""

import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SYSCTL = "/usr/sbin/sysctl"  # where there is no /proc: macOS


class HostClock(Protocol):
    """What a store may ask of its host.  Times are whole microseconds."""

    def wall(self) -> int:
        """Since 1970, as the host believes."""

    def elapsed(self) -> int:
        """Since some moment of this boot, a suspend included."""

    def boot_id(self) -> str:
        """The same for all processes between two boots; another one after each boot."""


class SystemClock:
    """The real host."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def wall(self) -> int:
        return time.time_ns() // 1000

    def elapsed(self) -> int:
        return time.clock_gettime_ns(_SUSPEND_AWARE) // 1000

    def boot_id(self) -> str:
        return self._boot_id


# macOS counts a suspend in CLOCK_MONOTONIC; Linux has a clock of its own for it.
_SUSPEND_AWARE = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        pass  # not Linux
    try:
        return subprocess.check_output(  # noqa: S603 - fixed words
            [_SYSCTL, "-n", "kern.bootsessionuuid"], text=True, timeout=5
        ).strip()
    except (OSError, subprocess.SubprocessError):
        # Every start counts as a reboot, which only ever lets leases live longer.
        return str(uuid.uuid4())


class Movable:
    """A clock that a test moves on; whoever waits for a moment of it is called then."""

    def __init__(self) -> None:
        self._moved = 0
        self._waiting: list[Callable[[], None]] = []

    def advance(self, seconds: float) -> None:
        """Time passes: both clocks move."""
        self._move(round(seconds * 1_000_000))
        for call in list(self._waiting):
            call()

    def call_when_moved(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` from whatever thread moves the clock.  What is returned ends that."""
        self._waiting.append(call)
        return lambda: self._waiting.remove(call)

    def _move(self, micros: int) -> None:
        self._moved += micros


class ManualClock(Movable):
    """A host whose time a test moves.  Starts at `wall` microseconds since 1970."""

    def __init__(self, wall: int = 1_800_000_000_000_000) -> None:
        super().__init__()
        self._wall = wall
        self._booted = 0  # how far the clock had been moved then
        self._boots = 0

    def wall(self) -> int:
        return self._wall + self._moved

    def elapsed(self) -> int:
        return self._moved - self._booted

    def boot_id(self) -> str:
        return f"boot-{self._boots}"

    def step_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock: nothing else moves."""
        self._wall += round(seconds * 1_000_000)

    def reboot(self) -> None:
        """The time since boot starts again, under another boot id; the wall clock goes on."""
        self._booted = self._moved
        self._boots += 1


class MovableClock(Movable, SystemClock):
    """The real host, except that a test may let time pass: for development servers."""

    def __init__(self) -> None:
        Movable.__init__(self)
        SystemClock.__init__(self)

    def wall(self) -> int:
        return super().wall() + self._moved

    def elapsed(self) -> int:
        return super().elapsed() + self._moved


@dataclass(frozen=True, slots=True)
class Anchor:
    """What each commit stores of the clock: at `elapsed` of this boot it was `now`."""

    boot_id: str
    elapsed: int
    now: int


class LeaseClock:
    """The `now` of the lease rules, and how far a reboot moved it on."""

    def __init__(self, host: HostClock, latest: Anchor | None) -> None:
        self._host = host
        boot_id, elapsed = host.boot_id(), host.elapsed()
        self.jump = 0
        """Microseconds by which leases that lived at the latest seen `now` have to be moved."""
        if latest is None:
            now = host.wall()
        elif latest.boot_id == boot_id:
            now = latest.now + max(0, elapsed - latest.elapsed)
        else:
            now = max(host.wall(), latest.now)
            self.jump = now - latest.now
        self._start = Anchor(boot_id, elapsed, now)

    def anchor(self) -> Anchor:
        """The present moment, in the form in which a commit stores it."""
        elapsed = self._host.elapsed()
        now = self._start.now + max(0, elapsed - self._start.elapsed)
        return Anchor(self._start.boot_id, elapsed, now)

    def now(self) -> int:
        return self.anchor().now
