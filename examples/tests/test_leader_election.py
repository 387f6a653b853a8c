import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from running import line_with, load, showing, started, until

from volcano_sdk import VolcanoClient
from volcano_server.testing import VolcanoServer

NAME = "leader-election"

Shown = Callable[[], list[str]]


@pytest.fixture(scope="module", autouse=True)
def shown() -> Iterator[Shown]:
    """The show, which waits for a lease to lapse: beside the other tests."""
    with showing(NAME) as lines:
        yield lines


def test_the_losers_skip_until_the_leader_loses_its_lock(
    server: VolcanoServer, volcano: VolcanoClient, tmp_path: Path
) -> None:
    digest = tmp_path / "digest.db"

    def sent_by() -> str | None:
        with closing(sqlite3.connect(digest)) as database:
            return str(database.execute("select sent_by from digest").fetchone()[0])

    load(NAME, "replica").send_digest("nobody", str(digest), 0)  # makes the table
    with ExitStack() as stack:
        ann = stack.enter_context(started(server, NAME, "replica.py", "ann", digest))
        line_with(ann, "ann leads")
        bob = stack.enter_context(started(server, NAME, "replica.py", "bob", digest))
        until(lambda: sent_by() == "ann")
        ann.send_signal(signal.SIGSTOP)  # or it might be the leader again before bob is awake
        volcano.locks.force_release("job:digest")

        line_with(bob, "bob leads")
        until(lambda: sent_by() == "bob")
        ann.send_signal(signal.SIGCONT)
        line_with(ann, "ann no longer leads")


def test_a_leader_that_was_asleep_sends_nothing(tmp_path: Path) -> None:
    send = load(NAME, "replica").send_digest

    assert send("bob", str(tmp_path / "digest.db"), 8)
    assert send("bob", str(tmp_path / "digest.db"), 8)
    assert not send("ann", str(tmp_path / "digest.db"), 7)


@pytest.mark.timeout(90)
def test_another_replica_takes_over_from_a_dead_leader(shown: Shown) -> None:
    first, killed, second = shown()

    assert "ann leads" == first
    assert "ann was killed" == killed
    assert second in ("bob leads", "cleo leads")
