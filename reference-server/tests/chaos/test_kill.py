"""kill -9 at random moments under load: what was acknowledged is there, none twice, tokens rise.

    VOLCANO_CHAOS_ROUNDS=200 nox -s chaos

Eight callers take and hold a few keys over HTTP while the server is killed and started again on the
same file.  Each writes down what it was told and when; then the history is judged.  Its leases are
long, so that none may lapse: whoever was told 201 must be able to renew until it sends a release.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

ROUNDS = int(os.environ.get("VOLCANO_CHAOS_ROUNDS", "20"))
CALLERS = 8
KEYS = ["nightly", "hourly", "weekly"]
TTL = 600


@dataclass
class Hold:
    """One lease, as its holder knows it.  Times are the test's monotonic seconds."""

    key: str
    fencing_token: int
    asked_at: float
    told_at: float
    last_certain_at: float  # from then on it may be released
    lost: str = ""  # what the server said instead of confirming it


def violations(history: list[Hold]) -> list[str]:
    """What must never be.  Pure."""
    found = [f"{hold.key} lost: {hold.lost}" for hold in history if hold.lost]
    for key in {hold.key for hold in history}:
        holds = sorted((h for h in history if h.key == key), key=lambda h: h.fencing_token)
        for earlier, later in itertools.pairwise(holds):
            if earlier.fencing_token == later.fencing_token:
                found.append(f"{key} has the fencing token {later.fencing_token} twice")
            elif later.told_at < earlier.asked_at:
                found.append(f"{key}: {later.fencing_token} came before {earlier.fencing_token}")
            elif later.told_at < earlier.last_certain_at:
                found.append(f"{key} held twice: {earlier} and {later}")
    return found


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


@dataclass
class Caller:
    """Takes a key, renews it a few times, gives it back; retries until it has an answer."""

    server: Server
    stop: threading.Event
    history: list[Hold] = field(default_factory=list)
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(timeout=5, trust_env=False) as http:
                while not self.stop.is_set():
                    self.hold(http, random.choice(KEYS), str(uuid.uuid4()))
        except BaseException as failure:  # noqa: BLE001 - told by the test itself
            self.failure = failure

    def hold(self, http: httpx.Client, key: str, token: str) -> None:
        asked_at = time.monotonic()
        answer = self.send(http, "POST", key, token)
        if answer.status_code == 409:
            time.sleep(random.uniform(0, 0.01))  # so that the holders get on
            return
        assert answer.status_code == 201, answer.text
        now = time.monotonic()
        hold = Hold(key, answer.json()["fencing_token"], asked_at, now, now)
        self.history.append(hold)
        for _ in range(random.randint(1, 4)):
            time.sleep(random.uniform(0, 0.02))
            asked_at = time.monotonic()
            answer = self.send(http, "PATCH", key, token)
            if answer.status_code != 200:
                hold.lost = f"{answer.status_code} {answer.text} to a renewal of {hold}"
                return
            if answer.json()["fencing_token"] != hold.fencing_token:
                hold.lost = f"another fencing token: {answer.text} to a renewal of {hold}"
                return
            hold.last_certain_at = asked_at
        hold.last_certain_at = time.monotonic()
        answer = self.send(http, "DELETE", key, token)
        # 409: the first try was done, its answer lost, and somebody else has it by now.
        assert answer.status_code in {204, 409}, answer.text

    def send(self, http: httpx.Client, method: str, key: str, token: str) -> httpx.Response:
        while True:
            try:
                answer = http.request(
                    method,
                    f"{self.server.url}/locks/{key}/lease",
                    headers={
                        "Authorization": f"Bearer {self.server.service_key}",
                        "X-Volcano-Lock-Token": token,
                        "X-Volcano-Request-Id": str(uuid.uuid4()),
                    },
                    json=None if method == "DELETE" else {"ttl_seconds": TTL},
                )
            except httpx.TransportError:
                if self.stop.is_set():
                    raise
                time.sleep(0.01)  # killed; it comes back
                continue
            if answer.status_code != 503:
                return answer


@contextmanager
def load(server: Server) -> Iterator[list[Caller]]:
    stop = threading.Event()
    callers = [Caller(server, stop) for _ in range(CALLERS)]
    threads = [threading.Thread(target=caller.run) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield callers
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def history_of(arguments: list[str], rounds: int) -> list[Hold]:
    server = Server(["--port", "0", "--quota", "0", "--json", *arguments])
    server.start()
    try:
        with load(server) as callers:
            for _ in range(rounds):
                time.sleep(random.uniform(0.02, 0.5))
                server.kill()
                server.start()
            time.sleep(0.2)
    finally:
        server.kill()
    assert [caller.failure for caller in callers if caller.failure] == []
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
