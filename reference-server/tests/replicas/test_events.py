"""What the readers of three replicas are told of what each of them does, over real processes."""

import json
import queue
import threading
import time
import uuid
from collections.abc import Iterator

import httpx
import psycopg
import pytest
from balancer import Replica, Service, service
from postgres import Cluster

pytestmark = pytest.mark.timeout(120, method="thread")

ROUNDS = 30


class Reader:
    """One stream of a replica, read by a thread: (when, kind, fencing token)."""

    def __init__(self, replica: Replica, service_key: str) -> None:
        self.told: queue.Queue[tuple[float, str, int]] = queue.Queue()
        self._opened = threading.Event()
        self._replica, self._service_key = replica, service_key
        threading.Thread(target=self._read, daemon=True).start()
        assert self._opened.wait(10)

    def next(self) -> tuple[float, str, int]:
        return self.told.get(timeout=10)

    def _read(self) -> None:
        url, kind = f"{self._replica.url}/lock-events?key=nightly", ""
        try:
            with httpx.stream(
                "GET", url, headers=headers(self._service_key), timeout=60, trust_env=False
            ) as answer:
                for line in answer.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        token = json.loads(value).get("fencing_token", 0)
                        self.told.put((time.monotonic(), kind, token))
                    elif line == ":":
                        self._opened.set()
        except httpx.TransportError:
            pass  # the test is over


def headers(service_key: str, token: str = "") -> dict[str, str]:
    return {
        "Authorization": f"Bearer {service_key}",
        "X-Volcano-Request-Id": str(uuid.uuid4()),
        **({"X-Volcano-Lock-Token": token} if token else {}),
    }


def acquire(three: Service, number: int, token: str, ttl: int = 30) -> int:
    url = f"{three.replicas[number].url}/locks/nightly/lease"
    answer = httpx.post(
        url, headers=headers(three.service_key, token), json={"ttl_seconds": ttl}, trust_env=False
    )
    assert answer.status_code == 201, answer.text
    fencing_token: int = answer.json()["fencing_token"]
    return fencing_token


def release(three: Service, number: int, token: str) -> None:
    url = f"{three.replicas[number].url}/locks/nightly/lease"
    answer = httpx.delete(url, headers=headers(three.service_key, token), trust_env=False)
    assert answer.status_code == 204, answer.text


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> Iterator[Service]:
    with service(cluster.database()) as three:
        yield three


def test_nobody_leaves_word_while_nobody_listens(three: Service) -> None:
    token = str(uuid.uuid4())
    acquire(three, 0, token)
    release(three, 0, token)

    with psycopg.connect(three.replicas[0].store) as sql:
        assert sql.execute("SELECT count(*) FROM volcano.news").fetchone() == (0,)


def test_readers_of_all_replicas_are_told_within_half_a_second(three: Service) -> None:
    readers = [Reader(replica, three.service_key) for replica in three.replicas]
    delays = []

    for number in range(ROUNDS):
        token = str(uuid.uuid4())
        fencing_token = acquire(three, number % 3, token)
        for reader in readers:
            assert reader.next()[1:] == ("acquired", fencing_token)
        done = time.monotonic()
        release(three, number % 3, token)
        for reader in readers:
            at, *event = reader.next()
            assert event == ["released", fencing_token]
            delays.append(at - done)

    delays.sort()
    print(f"release to event: p50 {delays[len(delays) // 2]:.3f} s, most {delays[-1]:.3f} s")  # noqa: T201
    assert delays[len(delays) * 9 // 10] < 0.5
    assert all(reader.told.empty() for reader in readers)


def test_a_lapse_is_told_once_by_each_replica_to_its_own_readers(three: Service) -> None:
    readers = [Reader(replica, three.service_key) for replica in three.replicas]
    started = time.monotonic()
    fencing_token = acquire(three, 0, str(uuid.uuid4()), ttl=5)

    for reader in readers:
        assert reader.next()[1:] == ("acquired", fencing_token)
        at, *event = reader.next()
        assert event == ["lapsed", fencing_token]
        assert at - started >= 6
    assert all(reader.told.empty() for reader in readers)


def test_a_lost_connection_is_a_reset_and_what_comes_later_is_told(
    three: Service, cluster: Cluster
) -> None:
    reader = Reader(three.replicas[1], three.service_key)
    name = psycopg.conninfo.conninfo_to_dict(three.replicas[1].store)["dbname"]
    cluster.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    )
    assert reader.next()[1] == "reset"

    fencing_token = acquire(three, 0, str(uuid.uuid4()))

    assert reader.next()[1:] == ("acquired", fencing_token)
