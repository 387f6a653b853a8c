"""Event streams over a real port: who hangs up, who is slow, and a server that stops."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from listening import Heard, parse

from volcano_server import event_response
from volcano_server.clock import SystemClock
from volcano_server.stores.sqlite import SqliteStore
from volcano_server.subscription import MOST_WAITING, Ending
from volcano_server.testing import SERVICE_KEY, VolcanoServer, running_server

REQUEST_ID = str(uuid.uuid4())
PATIENCE = 10


def headers(service_key: str = SERVICE_KEY) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {service_key}",
        "X-Volcano-Lock-Token": str(uuid.uuid4()),
        "X-Volcano-Request-Id": REQUEST_ID,
    }


class Reader:
    """A connection with one event stream, which reads when it is told to."""

    def __init__(self, url: str, query: str, key: str = SERVICE_KEY, buffer: int = 0) -> None:
        address = httpx.URL(url)
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((address.host, address.port or 0))
        self.socket.sendall(
            f"GET /lock-events?{query} HTTP/1.1\r\nHost: a\r\n"
            f"Authorization: Bearer {key}\r\nX-Volcano-Request-Id: {REQUEST_ID}\r\n\r\n".encode()
        )
        self._input = self.socket.makefile("rb")
        self.head = b"".join(iter(self._input.readline, b"\r\n"))
        self.was_finished = False

    def block(self) -> bytes:
        """The next chunk; nothing at the end."""
        size = int(self._input.readline() or b"0", 16)
        block = self._input.read(size)
        self.was_finished = self._input.readline() == b"\r\n" and size == 0
        return block

    def heard(self) -> Iterator[Heard]:
        """Event by event, to the end."""
        while block := self.block():
            yield from parse(block)

    def rest(self) -> bytes:
        """What still comes, to whatever end."""
        came = b""
        with suppress(ConnectionResetError):
            while some := self._input.read1(65_536):
                came += some
        return came

    def close(self) -> None:
        self._input.close()
        self.socket.close()


@contextmanager
def reading(url: str, query: str, **options: Any) -> Iterator[Reader]:
    """A stream that listens already."""
    reader = Reader(url, query, **options)
    try:
        assert reader.head.startswith(b"HTTP/1.1 200 "), reader.head
        assert reader.block() == b":\n\n"
        yield reader
    finally:
        reader.close()


@pytest.fixture
def server() -> Iterator[VolcanoServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def http(server: VolcanoServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, headers=headers()) as http:
        yield http


def acquire_and_release(http: httpx.Client, key: str, times: int = 1) -> None:
    for _ in range(times):
        assert http.post(f"/locks/{key}/lease", json={"ttl_seconds": 30}).status_code == 201
        assert http.delete(f"/locks/{key}/lease").status_code == 204


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A test that fails must not wait for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def seconds_until(condition: Any, *, at_most: float = PATIENCE) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < at_most
        time.sleep(0.01)  # nothing announces it
    return time.monotonic() - began


def test_what_happens_is_heard_at_once_over_one_kept_connection(
    server: VolcanoServer, http: httpx.Client
) -> None:
    with reading(server.url, "key=nightly") as reader:
        acquire_and_release(http, "nightly", times=2)
        heard = reader.heard()

        assert [next(heard).kind for _ in range(4)] == ["acquired", "released"] * 2


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_reader_that_hangs_up_is_gone_within_a_second(server: VolcanoServer, how: str) -> None:
    with reading(server.url, "key=nightly") as reader:
        assert metric(server.url, "volcano_lock_event_streams ") == 1
        if how == "reset":
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    took = seconds_until(lambda: metric(server.url, "volcano_lock_event_streams ") == 0)

    assert took < 1
    assert metric(server.url, "volcano_lock_event_streams_ended_total") == 1


CUT_OFF = 'volcano_lock_event_streams_ended_total{reason="cut_off"}'


def tell_until_cut_off(url: str, service_key: str = SERVICE_KEY) -> None:
    """Thousands of events: what a socket takes in unread is the system's affair."""
    key = "k" * 128
    mine = "".join(f"{name}: {value}\r\n" for name, value in headers(service_key).items())
    begin = f"POST /locks/{key}/lease HTTP/1.1\r\n{mine}Content-Length: 18\r\n\r\n"
    end = f"DELETE /locks/{key}/lease HTTP/1.1\r\n{mine}\r\n"
    requests = (begin + '{"ttl_seconds":30}' + end).encode() * 500
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 0), PATIENCE) as connection:
        answers = connection.makefile("rb")
        while metric(url, CUT_OFF) == 0:
            connection.sendall(requests)
            released = 0
            while released < 500:
                released += b"HTTP/1.1 204 " in answers.readline()
        answers.close()


def test_a_reader_that_does_not_read_is_cut_off_and_hears_of_it(server: VolcanoServer) -> None:
    with reading(server.url, "prefix=k", buffer=4_096) as reader:
        tell_until_cut_off(server.url)
        *before, last = reader.heard()

        assert last.kind == "reset"
        assert reader.was_finished
    numbers = [int(each.id.split("-")[1]) for each in [*before, last]]
    assert numbers[:-1] == list(range(numbers[0], numbers[0] + len(before)))
    assert numbers[-1] == numbers[-2] + MOST_WAITING + 1


def test_a_reader_that_does_not_even_hear_of_it_is_disconnected(
    server: VolcanoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(event_response._PATIENCE, Ending.CUT_OFF, 0.05)

    with reading(server.url, "prefix=k", buffer=4_096) as reader:
        tell_until_cut_off(server.url)
        seconds_until(lambda: metric(server.url, "volcano_lock_event_streams ") == 0)

        assert not reader.rest().endswith(b"0\r\n\r\n")


def test_a_server_in_a_thread_ends_its_streams_when_it_stops() -> None:
    with ExitStack() as stack:
        with running_server() as server:
            reader = stack.enter_context(reading(server.url, "key=nightly"))
            began = time.monotonic()

        assert time.monotonic() - began < 1.5
        assert list(reader.heard()) == []
        assert reader.was_finished


@pytest.mark.parametrize("also", ["nobody", "a reader that is stuck"])
def test_a_sigterm_ends_the_streams_within_a_second(tmp_path: Path, also: str) -> None:
    with ended(
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "volcano_server",
                "dev",
                *["--port=0", "--json", "--quota=0", "--ephemeral"],
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    ) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        url, key = facts["url"], facts["service_key"]
        with (
            reading(url, "key=nightly", key=key) as reader,
            reading(url, "prefix=k", key=key, buffer=4_096),
            httpx.Client(base_url=url, trust_env=False, headers=headers(key)) as http,
        ):
            if also != "nobody":
                tell_until_cut_off(url, key)
            acquire_and_release(http, "nightly")
            sent = time.monotonic()
            process.send_signal(signal.SIGTERM)
            heard = list(reader.heard())
            heard_it = time.monotonic() - sent
            _, err = process.communicate(timeout=PATIENCE)
            stopped = time.monotonic() - sent

    assert [each.kind for each in heard] == ["acquired", "released"]
    assert reader.was_finished
    assert heard_it < 1
    assert stopped < 1.5
    assert (process.returncode, err) == (0, "")


def test_events_come_in_order_for_each_key_under_load(tmp_path: Path) -> None:
    clock = SystemClock()
    store = SqliteStore(tmp_path / "locks.db", clock)
    keys = [f"k{number}" for number in range(3)]
    held: dict[str, list[int]] = defaultdict(list)  # the fencing tokens that callers were given

    def work(url: str) -> None:
        with httpx.Client(base_url=url, trust_env=False) as http:
            for turn in range(60):
                key = keys[turn % 3]
                mine = headers()
                answer = http.post(f"/locks/{key}/lease", json={"ttl_seconds": 30}, headers=mine)
                if answer.status_code == 201:
                    held[key].append(answer.json()["fencing_token"])
                    path = f"/locks/{key}/lease" if turn % 2 else f"/locks/{key}"
                    assert http.delete(path, headers=mine).status_code == 204

    with running_server(store=store) as server, reading(server.url, "prefix=k") as reader:
        workers = [threading.Thread(target=work, args=(server.url,)) for _ in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wanted = 2 * sum(map(len, held.values()))
        events = reader.heard()
        heard = [next(events) for _ in range(wanted)]

    for key in keys:
        mine = [each for each in heard if each.key == key]
        begins = [each.fencing_token for each in mine if each.kind == "acquired"]
        assert begins == sorted(held[key])
        assert [each.kind == "acquired" for each in mine] == [True, False] * len(begins)
        assert [each.fencing_token for each in mine[1::2]] == begins
    assert wanted > 12
    numbers = [int(each.id.split("-")[1]) for each in heard]
    assert numbers == sorted(set(numbers))
