import signal
import subprocess
from pathlib import Path

import pytest
from running import PATIENCE, counted, need, show, started, until

from volcano_sdk import VolcanoClient
from volcano_server.testing import VolcanoServer

NAME = "nightly-rollup"
DAY = "2026-11-28"


def sales(folder: Path, files: int) -> Path:
    (folder / DAY).mkdir(parents=True)
    for number in range(files):
        (folder / DAY / f"{number}.csv").write_text("tea,3\ncoffee,4\n")
    return folder


def total(store: Path) -> str:
    program = "PStore.new(ARGV[0]).transaction(true) { |s| print s[ARGV[1]] }"
    command = ["ruby", "-rpstore", "-e", program, str(store), DAY]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.timeout(90)
def test_one_host_does_it_and_the_others_do_not() -> None:
    lines = show(NAME)

    assert 4 == len(lines)
    assert 1 == counted(lines, "is rolled up")
    assert f"{DAY} was rolled up before" == lines[-1]


def test_the_next_run_does_what_a_killed_one_left(server: VolcanoServer, tmp_path: Path) -> None:
    need(NAME)
    arguments = (DAY, sales(tmp_path / "sales", 2), tmp_path / "totals.pstore")
    with (
        started(server, NAME, "rollup.rb", *arguments) as killed,
        VolcanoClient(api_url=server.url, service_key=server.service_key) as volcano,
    ):
        until(lambda: volcano.locks.get("nightly-rollup").held)
        killed.kill()
        killed.wait()
    server.clock.advance(31)

    with started(server, NAME, "rollup.rb", *arguments) as second:
        printed, complaints = second.communicate(timeout=PATIENCE)

    assert (f"{DAY} is rolled up\n", "") == (printed, complaints)
    assert "14" == total(tmp_path / "totals.pstore")


def test_a_host_that_slept_through_its_lease_is_refused(
    server: VolcanoServer, tmp_path: Path
) -> None:
    """Its own clock did not move, so its guard says nothing: the data has to know."""
    need(NAME)
    arguments = (DAY, sales(tmp_path / "sales", 2), tmp_path / "totals.pstore")
    with (
        started(server, NAME, "rollup.rb", *arguments) as sleeper,
        VolcanoClient(api_url=server.url, service_key=server.service_key) as volcano,
    ):
        until(lambda: volcano.locks.get("nightly-rollup").held)
        sleeper.send_signal(signal.SIGSTOP)
        server.clock.advance(31)
        with started(server, NAME, "rollup.rb", *arguments) as second:
            assert f"{DAY} is rolled up\n" == second.communicate(timeout=PATIENCE)[0]
        sleeper.send_signal(signal.SIGCONT)

        printed, complaints = sleeper.communicate(timeout=PATIENCE)

    assert ("", 75) == (printed, sleeper.returncode)
    assert "rollup: " in complaints
    assert "14" == total(tmp_path / "totals.pstore")
