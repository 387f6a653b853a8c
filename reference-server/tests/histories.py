"""What callers of a lock server were told under load, and a judge of it.

As a program: `python histories.py URL SECONDS KEY…` takes and holds the keys with one caller and
prints its history as JSON; the service key comes in VOLCANO_SERVICE_KEY.
"""

import itertools
import json
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import httpx

TTL = 600
"""So long that no lease may lapse: whoever was told 201 can renew until it sends a release."""

PATIENCE = 10.0
"""Seconds in which a server has to be back when the load is over."""


@dataclass
class Hold:
    """One lease, as its holder knows it.  Times are the machine's monotonic seconds."""

    key: str
    fencing_token: int
    asked_at: float
    told_at: float
    last_certain_at: float  # from then on it may be released
    lost: str = ""  # what the server said instead of confirming it


def violations(history: Sequence[Hold]) -> list[str]:
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
class Caller:
    """Takes a key, renews it a few times, gives it back; retries until it has an answer.

    `where`: the server's URL and service key, whichever they are at the moment.
    """

    where: Callable[[], tuple[str, str]]
    keys: Sequence[str]
    stop: threading.Event
    history: list[Hold] = field(default_factory=list)
    tries_without_answer: int = 0
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(timeout=5, trust_env=False, verify=False) as http:
                while not self.stop.is_set():
                    self.hold(http, random.choice(self.keys), str(uuid.uuid4()))
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
        began = time.monotonic()
        while True:
            url, service_key = self.where()
            try:
                answer = http.request(
                    method,
                    f"{url}/locks/{key}/lease",
                    headers={
                        "Authorization": f"Bearer {service_key}",
                        "X-Volcano-Lock-Token": token,
                        "X-Volcano-Request-Id": str(uuid.uuid4()),
                    },
                    json=None if method == "DELETE" else {"ttl_seconds": TTL},
                )
                if answer.status_code != 503:
                    return answer
                trouble = httpx.TransportError(answer.text)
            except httpx.TransportError as error:
                trouble = error
            if self.stop.is_set() and time.monotonic() - began > PATIENCE:
                raise trouble
            self.tries_without_answer += 1
            time.sleep(0.02)  # killed, or without its database; it comes back


@contextmanager
def load(
    where: Callable[[], tuple[str, str]], keys: Sequence[str], callers: int = 8
) -> Iterator[list[Caller]]:
    """Callers in threads; at the end none of them must have failed."""
    stop = threading.Event()
    all_callers = [Caller(where, keys, stop) for _ in range(callers)]
    threads = [threading.Thread(target=caller.run) for caller in all_callers]
    for thread in threads:
        thread.start()
    try:
        yield all_callers
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [caller.failure for caller in all_callers if caller.failure] == []


def go_on(callers: Sequence[Caller]) -> None:
    """Until ten leases more were granted, however slow the machine: there is a load."""
    enough = sum(len(caller.history) for caller in callers) + 10
    while sum(len(caller.history) for caller in callers) < enough:
        assert [caller.failure for caller in callers if caller.failure] == []
        time.sleep(0.01)


def main(url: str, seconds: str, *keys: str) -> int:
    where = (url, os.environ["VOLCANO_SERVICE_KEY"])
    with load(lambda: where, keys, callers=1) as (caller,):
        while not caller.history and caller.failure is None:
            time.sleep(0.05)
        time.sleep(float(seconds))
    json.dump([asdict(hold) for hold in caller.history], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
