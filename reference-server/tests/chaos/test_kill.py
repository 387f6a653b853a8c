"""kill -9 at random moments under load: what was acknowledged is there, none twice, tokens rise.

    VOLCANO_CHAOS_ROUNDS=200 nox -s chaos

Eight callers take and hold a few keys over HTTP while the server is killed and started again on the
same file.  Each writes down what it was told and when; then the history is judged.  Its leases are
long, so that none may lapse: whoever was told 201 must be able to renew until it sends a release.
"""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from histories import Hold, load, violations

ROUNDS = int(os.environ.get("VOLCANO_CHAOS_ROUNDS", "20"))
KEYS = ["nightly", "hourly", "weekly"]


@dataclass
class Server:
    """The server's process, whichever it is at the moment."""

    arguments: list[str]
    url: str = ""
    service_key: str = ""
    process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "volcano_server", "dev", *self.arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.service_key = ready["service_key"]
        self.url = ready["url"]

    def kill(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def history_of(arguments: list[str], rounds: int) -> list[Hold]:
    server = Server(["--port", "0", "--quota", "0", "--json", *arguments])
    server.start()
    try:
        with load(lambda: (server.url, server.service_key), KEYS) as callers:
            for _ in range(rounds):
                time.sleep(random.uniform(0.02, 0.5))
                server.kill()
                server.start()
            time.sleep(0.2)
    finally:
        server.kill()
    return [hold for caller in callers for hold in caller.history]


@pytest.mark.timeout(ROUNDS * 10 + 60, method="thread")
def test_a_killed_server_loses_no_acknowledged_lease(tmp_path: Path) -> None:
    history = history_of(["--store", f"sqlite:///{tmp_path / 'locks.db'}"], ROUNDS)

    print(f"{ROUNDS} kills, {len(history)} leases")  # noqa: T201 - for whoever runs it by hand, with -s
    assert violations(history) == []
    assert len(history) > ROUNDS, "there was no load"


@pytest.mark.timeout(120, method="thread")
def test_a_server_that_forgets_is_found_out() -> None:
    """The same load and the same judge, on a store that keeps nothing."""
    assert violations(history_of(["--ephemeral"], 3))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (Hold("k", 1, 0, 1, 5), Hold("k", 1, 6, 7, 8), "twice"),
        (Hold("k", 1, 0, 1, 5), Hold("k", 2, 2, 3, 8), "held twice"),
        (Hold("k", 2, 0, 1, 1), Hold("k", 1, 2, 3, 3), "came before"),
        (Hold("k", 1, 0, 1, 5), Hold("k", 2, 6, 7, 8, lost="409"), "lost"),
    ],
)
def test_the_judge_sees_what_is_wrong(first: Hold, second: Hold, said: str) -> None:
    (found,) = violations([first, second])

    assert said in found


def test_the_judge_lets_right_histories_pass() -> None:
    assert violations([Hold("k", 1, 0, 1, 5), Hold("k", 2, 4, 6, 8), Hold("j", 1, 0, 1, 9)]) == []
