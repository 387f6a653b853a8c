import time

import pytest

from volcano_sdk.clock import SystemClock


def test_the_clock_goes_on_while_the_host_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {7: 1234.5}.__getitem__)

    assert SystemClock().now() == 1234.5


class Host:
    """A host without CLOCK_BOOTTIME."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 1_000_000.0, 500.0
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


def test_elsewhere_a_suspend_shows_in_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    clock = SystemClock()
    start = clock.now()

    host.passes(10)
    assert clock.now() - start == 10
    host.wall += 60  # suspended
    assert clock.now() - start == 70
    host.passes(5)
    assert clock.now() - start == 75


def test_elsewhere_a_wall_clock_that_is_set_back_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    clock = SystemClock()
    start = clock.now()

    host.wall -= 3600
    host.passes(10)

    assert clock.now() - start == 10


def test_elsewhere_a_step_back_does_not_hide_a_later_suspend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch)
    clock = SystemClock()
    start = clock.now()

    host.wall -= 3600
    clock.now()
    host.wall += 60  # suspended

    assert clock.now() - start == 60


def test_the_wall_clock_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)

    assert SystemClock().wall() == host.wall
