import time
from pathlib import Path

import pytest

from volcano_server import clock
from volcano_server.clock import Anchor, LeaseClock, ManualClock, SystemClock

HOUR = 3_600_000_000


def test_the_first_start_takes_the_wall_clock() -> None:
    host = ManualClock(wall=1000)

    lease_clock = LeaseClock(host, None)

    assert (lease_clock.now(), lease_clock.jump) == (1000, 0)


def test_it_advances_with_the_time_since_boot() -> None:
    host = ManualClock(wall=1000)
    lease_clock = LeaseClock(host, None)

    host.advance(1.5)

    assert lease_clock.now() == 1_501_000


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wall_clock_that_is_set_while_running_changes_nothing(hours: int) -> None:
    host = ManualClock()
    lease_clock = LeaseClock(host, None)
    before = lease_clock.now()

    host.step_wall(hours * 3600)

    assert before == lease_clock.now()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_restart_in_the_same_boot_goes_on_however_the_wall_clock_was_set(hours: int) -> None:
    host = ManualClock(wall=HOUR * 10)
    latest = LeaseClock(host, None).anchor()
    host.advance(7)
    host.step_wall(hours * 3600)

    restarted = LeaseClock(host, latest)

    assert (latest.now + 7_000_000, 0) == (restarted.now(), restarted.jump)


def test_a_time_since_boot_that_went_back_does_not_take_the_clock_back() -> None:
    """A virtual machine that was resumed from a snapshot."""
    host = ManualClock()
    latest = Anchor(host.boot_id(), elapsed=5_000_000, now=HOUR)

    restarted = LeaseClock(host, latest)

    assert restarted.now() == HOUR
    host.advance(1)
    assert restarted.now() == HOUR + 1_000_000


def test_after_a_reboot_the_clock_jumps_to_the_wall_clock() -> None:
    host = ManualClock(wall=HOUR)
    latest = LeaseClock(host, None).anchor()
    host.reboot()
    host.step_wall(3600)

    restarted = LeaseClock(host, latest)

    assert (restarted.now(), restarted.jump) == (2 * HOUR, HOUR)


def test_after_a_reboot_with_the_wall_clock_behind_the_clock_stays_where_it_was() -> None:
    host = ManualClock(wall=2 * HOUR)
    latest = LeaseClock(host, None).anchor()
    host.reboot()
    host.step_wall(-3600)

    restarted = LeaseClock(host, latest)

    assert (restarted.now(), restarted.jump) == (2 * HOUR, 0)


def test_an_anchor_leads_back_to_the_same_time() -> None:
    host = ManualClock()
    lease_clock = LeaseClock(host, None)
    host.advance(3)

    anchor = lease_clock.anchor()

    assert Anchor(host.boot_id(), host.elapsed(), lease_clock.now()) == anchor
    assert LeaseClock(host, anchor).now() == lease_clock.now()


def test_the_real_host_tells_microseconds() -> None:
    host = SystemClock()

    assert abs(host.wall() - time.time() * 1_000_000) < 60_000_000
    first = host.elapsed()
    assert 0 <= host.elapsed() - first < 60_000_000


def test_the_boot_is_the_same_for_every_process_of_a_boot() -> None:
    assert SystemClock().boot_id() == SystemClock().boot_id() != ""


def test_without_a_boot_id_every_start_counts_as_a_reboot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clock, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(clock, "_SYSCTL", str(tmp_path / "sysctl"))

    assert SystemClock().boot_id() != SystemClock().boot_id()


def test_the_boot_id_of_macos_is_its_boot_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sysctl = tmp_path / "sysctl"
    sysctl.write_text('#!/bin/sh\necho "$2 is 7"\n')
    sysctl.chmod(0o755)
    monkeypatch.setattr(clock, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(clock, "_SYSCTL", str(sysctl))

    assert SystemClock().boot_id() == "kern.bootsessionuuid is 7"
