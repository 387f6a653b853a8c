import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from running import PATIENCE, line_with, load, showing, started

from volcano_server.testing import VolcanoServer

NAME = "durable-step"

Shown = Callable[[], list[str]]


@pytest.fixture(scope="module", autouse=True)
def shown() -> Iterator[Shown]:
    """The show, which waits for a lease to lapse: beside the other tests."""
    with showing(NAME) as lines:
        yield lines


def balance(accounts: Path) -> int:
    with closing(sqlite3.connect(accounts)) as database:
        return int(database.execute("select balance from account").fetchone()[0])


@pytest.mark.timeout(90)
def test_a_stale_twin_is_refused_and_nothing_is_booked_twice(
    server: VolcanoServer, tmp_path: Path
) -> None:
    """The first process only seemed dead: it was stopped, and goes on beside its replacement."""
    files = (tmp_path / "accounts.db", tmp_path / "state.db")
    with started(server, NAME, "payouts.py", *files, "start", "order-1", PAUSE_SECONDS="1") as twin:
        line_with(twin, "holds")
        twin.send_signal(signal.SIGSTOP)
        server.clock.advance(7)  # its TTL and the grace: for the server it is gone
        with started(server, NAME, "payouts.py", *files, "resume") as heir:
            assert "order-1: booked" in line_with(heir, "order-1")
        assert 10 == balance(files[0])
        twin.send_signal(signal.SIGCONT)

        assert "is refused" in line_with(twin, str(twin.pid))
        assert "order-1: booked" in line_with(twin, str(twin.pid))
        twin.communicate(timeout=PATIENCE)

    assert 0 == twin.returncode, "it has the result of its replacement"
    assert 10 == balance(files[0])


def test_a_step_that_died_after_its_effect_has_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next run has a later lease, and finds the order noted with the booking."""
    accounts = tmp_path / "accounts.db"
    monkeypatch.setattr("sys.argv", ["payouts.py", str(accounts), "unused"])
    payouts = load(NAME, "payouts")

    assert "booked" == payouts.write("order-1", fencing_token=7)
    assert "was booked before" == payouts.write("order-1", fencing_token=8)
    with pytest.raises(payouts.StaleWriteError):
        payouts.write("order-2", fencing_token=7)

    assert 10 == balance(accounts)


@pytest.mark.timeout(90)
def test_a_payout_survives_kill_9(shown: Shown) -> None:
    holds, killed, holds_again, booked = shown()

    first, second = holds.split()[0], holds_again.split()[0]
    assert first != second
    assert f"{first} was killed" == killed
    assert f"{second} order-1: booked" == booked
