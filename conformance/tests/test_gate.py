"""The gate parks each request until its verdict, and knows on what the SDK still waits."""

import http.client
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.gate import Gate, Parked, _flaw_of_many
from conformance.target import Answer

HEADERS = {
    "Authorization": "Bearer sk-test",
    "X-Volcano-Request-Id": str(uuid.uuid4()),
    "X-Volcano-Lock-Token": str(uuid.uuid4()),
    "Content-Type": "application/json",
}


@pytest.fixture(scope="module")
def running() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.stop()


@pytest.fixture
def gate(running: Gate) -> Iterator[Gate]:
    yield running
    running.clear()


class Client:
    """One request, sent from a thread of its own."""

    def __init__(self, gate: Gate, method: str, path: str, body: str = "", **headers: str) -> None:
        self.connection = http.client.HTTPConnection(gate.host, gate.port, timeout=5)
        self.outcome: Any = None
        self._sent = (method, path, body.encode(), {**HEADERS, **headers})
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        method, path, body, headers = self._sent
        try:
            self.connection.request(method, path, body, headers)
            response = self.connection.getresponse()
            self.outcome = (response.status, response.read(), dict(response.getheaders()))
        except (OSError, http.client.HTTPException) as error:
            self.outcome = error
        finally:
            self.connection.close()

    def end(self) -> Any:
        self.thread.join(5)
        return self.outcome


def taken(gate: Gate) -> Parked:
    gate.wait(5)
    (parked,) = gate.waiting()
    gate.take(parked)
    return parked


def test_a_request_waits_for_its_answer(gate: Gate) -> None:
    client = Client(gate, "POST", "/locks/a%3Ab/lease", '{"ttl_seconds": 30}')
    parked = taken(gate)

    seen = parked.seen()
    assert (parked.operation(), seen["key"], seen["ttl"]) == ("acquire", "a:b", 30)
    assert client.outcome is None
    assert gate.open_count() == 1

    parked.answer(Answer(201, [("X-Ours", "1")], b"{}"), patience=5)

    status, body, headers = client.end()
    assert (status, body, headers["X-Ours"]) == (201, b"{}", "1")
    assert gate.open_count() == 0


def test_a_204_has_no_body(gate: Gate) -> None:
    client = Client(gate, "DELETE", "/locks/a/lease")

    taken(gate).answer(Answer(204, [], b""), patience=5)

    assert client.end()[:2] == (204, b"")


def test_a_lost_exchange_is_an_error_and_no_answer(gate: Gate) -> None:
    client = Client(gate, "GET", "/locks/a")

    taken(gate).lose(patience=5)

    assert isinstance(client.end(), OSError | http.client.HTTPException)


def test_a_request_that_hangs_is_open_until_the_sdk_gives_it_up(gate: Gate) -> None:
    client = Client(gate, "GET", "/locks/a")
    parked = taken(gate)
    parked.hang()

    assert gate.open_count() == 1
    assert client.connection.sock is not None
    client.connection.sock.shutdown(2)
    client.end()

    assert gate.open_count() == 0


def test_an_outage_decides_what_comes(gate: Gate) -> None:
    gate.outage = lambda parked: parked.decide_at_once(Answer(503, [], b"{}"))

    assert Client(gate, "GET", "/locks/a").end()[0] == 503
    assert gate.waiting() == []


def test_a_request_that_is_answered_by_itself_is_waited_for(gate: Gate) -> None:
    """It is not held: whoever waits for rest waits until the SDK has its answer."""
    came = threading.Event()
    decide: list[Parked] = []

    def outage(parked: Parked) -> None:
        decide.append(parked)
        came.set()

    gate.outage, gate.outage_answers = outage, True
    client = Client(gate, "GET", "/locks/a")
    assert came.wait(5)

    assert decide[0].is_open()
    assert gate.open_count() == 0
    decide[0].decide_at_once(Answer(200, [], b"{}"))
    assert client.end()[0] == 200


def test_the_leases_of_a_shared_renewal_are_seen_by_key(gate: Gate) -> None:
    one, two = str(uuid.uuid4()), str(uuid.uuid4())
    body = (
        f'{{"leases": [{{"key": "b", "token": "{two.upper()}", "ttl_seconds": 6}},'
        f' {{"key": "a", "token": "{one}", "ttl_seconds": 5}}]}}'
    )
    client = Client(gate, "PATCH", "/lock-leases", body)
    parked = taken(gate)

    assert parked.operation() == "renew_many"
    assert parked.seen()["leases"] == [
        {"key": "a", "token": one, "ttl": 5},
        {"key": "b", "token": two, "ttl": 6},
    ]
    parked.answer(Answer(200, [], b"{}"), 5)
    client.end()


@pytest.mark.parametrize(
    ("leases", "said"),
    [
        ([{"key": "a"}, {"key": "b"}], None),
        ([], "2 to 500"),
        ([{"key": "a"}], "2 to 500"),
        ([{"key": "a"}] * 501, "2 to 500"),
        ([{"key": "a"}, 5], "other members"),
        ([{"key": "a"}, {"key": "b", "lease": 1}], "other members"),
        ([{"key": "a"}, {"key": "b", "token": "secret"}], "token is not a UUID"),
    ],
)
def test_what_no_sdk_may_send_as_a_shared_renewal_is_a_flaw(leases: Any, said: str | None) -> None:
    fine = {"token": str(uuid.uuid4()), "ttl_seconds": 5}
    body = {"leases": [{**fine, **each} if isinstance(each, dict) else each for each in leases]}

    flaw = _flaw_of_many(body)

    assert flaw is None if said is None else said in (flaw or "")


def test_flushing_does_not_wait_for_a_connection_that_is_kept_for_later(gate: Gate) -> None:
    longer_than_a_test_may_take = 60
    with socket.create_connection((gate.host, gate.port)):
        gate.flush(longer_than_a_test_may_take)


def test_a_request_that_is_on_its_way_is_no_quiet(gate: Gate) -> None:
    with socket.create_connection((gate.host, gate.port)) as slow:
        slow.sendall(b"GET /locks/a HTTP/1.1\r\n")
        later = http.client.HTTPConnection(gate.host, gate.port, timeout=5)
        later.request("HEAD", "/flush")
        later.getresponse().close()  # so the slow one was accepted

        assert not gate.server.is_quiet()

        slow.sendall(b"Host: x\r\n\r\n")
        with gate.server.changed:
            assert gate.server.changed.wait_for(gate.server.is_quiet, 5)


def test_flushing_waits_for_what_was_sent_and_given_up(gate: Gate) -> None:
    for _ in range(20):
        connection = http.client.HTTPConnection(gate.host, gate.port, timeout=5)
        connection.request("GET", "/locks/a", headers=HEADERS)
        connection.close()

    gate.flush(5)

    assert len(gate.waiting()) == 20
    assert gate.open_count() == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "said"),
    [
        ("POST", "/locks/a/lease", '{"ttl_seconds": 5}', {}, None),
        ("PATCH", "/locks/a/lease", '{"ttl_seconds": 5}', {}, None),
        ("DELETE", "/locks/a/lease", "", {}, None),
        ("POST", "/locks/a/lease", '{"ttl_seconds": 5, "x": 1}', {}, "the body is not"),
        ("POST", "/locks/a/lease", "5", {}, "the body is not"),
        ("DELETE", "/locks/a/lease", '{"ttl_seconds": 5}', {}, "carries a body"),
        ("GET", "/locks/a", "", {}, "carries a lock token"),
        ("PATCH", "/lock-leases", '{"leases": []}', {}, "carries a lock token"),
        ("POST", "/locks/a/lease", "", {"X-Volcano-Lock-Token": "secret"}, "Lock-Token is not"),
        ("DELETE", "/locks/a/lease", "", {"X-Volcano-Request-Id": "7"}, "Request-Id is not"),
        ("DELETE", "/locks/a/lease", "", {"Authorization": "Bearer sk-x"}, "Authorization is"),
        ("POST", "/locks/a/lease", '{"ttl_seconds": 5}', {"Content-Type": "text/plain"}, "Content"),
    ],
)
def test_what_no_sdk_may_send_is_a_flaw(
    gate: Gate, method: str, path: str, body: str, headers: dict[str, str], said: str | None
) -> None:
    client = Client(gate, method, path, body, **headers)
    parked = taken(gate)

    flaw = parked.flaw("sk-test")

    parked.lose(patience=5)
    client.end()
    assert flaw is None if said is None else said in (flaw or "")
