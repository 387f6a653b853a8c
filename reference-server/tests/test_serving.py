"""The port, uvicorn's settings, and connections that stall."""

import socket
import subprocess
import sys
import time

import httpx
import pytest

from volcano_server import serving
from volcano_server.serving import JsonServer, bind, url_of
from volcano_server.settings import SettingError
from volcano_server.testing import running_server


def connected(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port or 0), timeout=5)


def test_port_zero_is_a_free_port() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", 0) as second:
        assert url_of(first) != url_of(second)
        assert url_of(first).startswith("http://127.0.0.1:")


def test_a_port_is_taken_from_the_moment_it_is_bound() -> None:
    """Also before the app is up, so that two servers that start at once do not both believe it."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(SettingError, match=f"port {port} on 127.0.0.1 is in use") as refusal:
            bind("127.0.0.1", port)

    assert refusal.value.exit_status == 69


def test_a_restart_takes_the_same_port_at_once() -> None:
    with running_server() as server:
        port = httpx.URL(server.url).port or 0
        httpx.get(f"{server.url}/healthz", trust_env=False)
    with running_server(port=port) as server:
        assert httpx.get(f"{server.url}/healthz", trust_env=False).status_code == 200


def test_kept_connections_outlive_the_idle_limit_of_every_client() -> None:
    """5 s, uvicorn's own, is httpx's too: a renewal then meets a connection that is closing."""
    with running_server() as server:
        config = JsonServer(server.app).config

    assert config.timeout_keep_alive == 75
    assert config.access_log is False


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: a\r\n"])
def test_a_connection_that_stalls_in_a_requests_head_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KEEP_ALIVE", 0.2)

    with running_server() as server, connected(server.url) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        answer = connection.recv(1)

    assert answer == b""
    assert 0.1 < time.monotonic() - began < 4


def test_a_connection_that_stalls_after_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes of a next request put uvicorn's own timer out."""
    monkeypatch.setattr(serving, "KEEP_ALIVE", 0.2)

    with running_server() as server, connected(server.url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /heal")
        answer = b""
        while chunk := connection.recv(65_536):
            answer += chunk

    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_slow_head_is_read_as_long_as_something_comes() -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

    with running_server() as server, connected(server.url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for position in range(len(request)):
            connection.sendall(request[position : position + 1])
        answer = connection.recv(65_536)

    assert answer.startswith(b"HTTP/1.1 200 ")


def test_the_command_line_is_quick_to_start() -> None:
    """What only a server needs is not imported for `keys` and `--help`."""
    script = "import sys, volcano_server.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20
    )

    assert not {"uvicorn", "starlette", "pydantic", "httpx", "pytest"} & set(done.stdout.split())
