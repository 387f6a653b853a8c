"""The server that users put into their own tests."""

import socket
import threading
import uuid

import httpx
import pytest

from volcano_server import testing
from volcano_server.clock import ManualClock
from volcano_server.settings import SettingError
from volcano_server.stores.memory import MemoryStore
from volcano_server.testing import VolcanoServer, running_server

volcano_server = testing.volcano_server  # as a user's conftest.py does


def call(server: VolcanoServer, method: str, path: str, ttl: int | None = None) -> httpx.Response:
    headers = {
        "Authorization": f"Bearer {server.service_key}",
        "X-Volcano-Lock-Token": str(uuid.uuid4()),
        "X-Volcano-Request-Id": str(uuid.uuid4()),
    }
    body = None if ttl is None else {"ttl_seconds": ttl}
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        return http.request(method, path, headers=headers, json=body)


def test_the_fixture_is_a_server_whose_time_stands_still(volcano_server: VolcanoServer) -> None:
    granted = call(volcano_server, "POST", "/locks/a/lease", 5)
    held = call(volcano_server, "GET", "/locks/a")
    volcano_server.clock.advance(6)
    free = call(volcano_server, "GET", "/locks/a")

    assert granted.status_code == 201
    assert held.json()["held"] is True
    assert free.json() == {"held": False}


def test_each_test_has_a_server_of_its_own(volcano_server: VolcanoServer) -> None:
    assert call(volcano_server, "GET", "/locks/a").json() == {"held": False}


def test_a_server_leaves_no_thread_and_no_port_behind() -> None:
    before = set(threading.enumerate())

    with running_server() as server:
        assert call(server, "GET", "/locks/a").status_code == 200

    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx.ConnectError):
        call(server, "GET", "/locks/a")


def test_a_server_may_have_a_quota_and_a_store_of_its_own() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)

    with running_server(clock=clock, store=store, quota=1) as server:
        assert call(server, "POST", "/locks/a/lease", 30).status_code == 201
        assert call(server, "GET", "/locks/a").status_code == 429
    with running_server(clock=clock, store=store) as server:
        assert call(server, "GET", "/locks/a").json()["held"] is True


def test_a_store_that_cannot_be_opened_is_raised_to_the_test() -> None:
    class ClosedStore(MemoryStore):
        async def open(self) -> None:
            raise OSError("no way in")

    clock = ManualClock()

    with pytest.raises(OSError, match="no way in"), running_server(store=ClosedStore(clock)):
        pytest.fail("the server started")


def test_a_port_in_use_is_raised_to_the_test() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=str(port)), running_server(port=port):
            pytest.fail("the server started")
