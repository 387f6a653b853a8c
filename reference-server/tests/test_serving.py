"""The port, uvicorn's settings, and connections that stall."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from volcano_server import serving
from volcano_server.serving import JsonProtocol, JsonServer, bind, url_of
from volcano_server.settings import SettingError
from volcano_server.testing import running_server
from volcano_server.wire import Reply

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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


class Wire(asyncio.Transport):
    """A connection in memory: what was written, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False
        self.aborted = False
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_reading(self) -> bool:
        return self.reads


def connect(app: ASGIApp, loop: asyncio.AbstractEventLoop) -> tuple[JsonProtocol, Wire]:
    config = JsonServer(app).config
    config.load()
    protocol, wire = JsonProtocol(config, ServerState(), {}, loop), Wire()
    protocol.connection_made(wire)
    return protocol, wire


def answering(*messages: Message) -> ASGIApp:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def head(*headers: tuple[bytes, bytes], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


LENGTH = (b"content-length", b"4")
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("messages", "writes"),
    [
        ([head(LENGTH), body(b"done")], 1),
        ([head(status=204), body(b"")], 1),
        ([head(LENGTH), body(b"do", more=True), body(b"ne")], 3),
        ([head(LENGTH), body(b"done", more=True), body(b"")], 2),
        ([head(), body(b"done")], 2),  # in chunks: uvicorn's way
        ([head(LENGTH, (b"connection", b"close")), body(b"done")], 2),
    ],
)
async def test_a_whole_answer_is_one_packet(messages: list[Message], writes: int) -> None:
    """Two wake its reader twice.  What is not whole is sent as it comes."""
    protocol, wire = connect(answering(*messages), asyncio.get_running_loop())

    protocol.data_received(GET)
    while not protocol.cycle.response_complete:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)

    assert len(wire.written) == writes
    assert b"".join(wire.written).startswith(b"HTTP/1.1 20")
    assert wire.closed == any((b"connection", b"close") in each["headers"] for each in messages[:1])
    protocol.connection_lost(None)


async def test_a_body_read_at_once_after_its_answer_is_not_taken_for_a_head() -> None:
    """A busy loop finds all of it in one read, which then ends outside the request."""
    protocol, wire = connect(answering(head(LENGTH), body(b"done")), asyncio.get_running_loop())

    protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n")
    while not protocol.cycle.response_complete:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)
    protocol.data_received(b"x" * 200_000)

    assert len(wire.written) == 1
    assert not wire.closed
    protocol.connection_lost(None)


async def test_a_head_without_its_body_is_a_500() -> None:
    protocol, wire = connect(answering(head(LENGTH)), asyncio.get_running_loop())

    protocol.data_received(GET)
    while not wire.closed:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)

    assert [part[:13] for part in wire.written[:1]] == [b"HTTP/1.1 500 "]
    protocol.connection_lost(None)


async def test_a_connection_is_closed_only_when_it_has_been_idle_for_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One timer a connection looks when it fires; it is not set again by each answer."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now, raising=False)
    go = asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await go.wait()
        await send(head(status=204))
        await send(body(b""))

    protocol, wire = connect(app, loop)
    protocol.data_received(GET)
    now += 80
    protocol.timeout_keep_alive_handler()
    assert not wire.is_closing(), "its request is not answered yet"

    go.set()
    while not protocol.cycle.response_complete:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)
    now += 70
    protocol.timeout_keep_alive_handler()
    assert not wire.is_closing(), "answered 70 s ago"
    now += 6
    protocol.timeout_keep_alive_handler()
    assert wire.is_closing()
    protocol.connection_lost(None)
    assert protocol.timeout_keep_alive_task is not None
    assert protocol.timeout_keep_alive_task.cancelled()


# Answers that go on: event streams.


async def turns() -> None:
    """More turns of the loop than anything here takes that waits for nothing."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_answer_that_goes_on_is_sent_as_it_comes() -> None:
    more = asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send(head((b"connection", b"keep-alive")))
        await send(body(b"one", more=True))
        await more.wait()
        await send(body(b"two", more=True))
        await send(body(b""))

    protocol, wire = connect(app, asyncio.get_running_loop())
    protocol.data_received(GET)
    await turns()

    first, second = wire.written
    assert first.startswith(b"HTTP/1.1 200 ")
    assert first.endswith(b"\r\n\r\n")
    assert second == b"3\r\none\r\n"
    more.set()
    await turns()
    assert wire.written[2:] == [b"3\r\ntwo\r\n", b"0\r\n\r\n"]
    assert not wire.closed
    protocol.connection_lost(None)


async def test_an_answer_waits_for_a_reader_that_does_not_read() -> None:
    sent = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send(head())
        for number in range(5):
            await send(body(b"%d" % number, more=True))
            sent.append(number)

    protocol, _ = connect(app, asyncio.get_running_loop())
    protocol.data_received(GET)
    protocol.pause_writing()  # as a transport does whose buffer is full
    await turns()
    assert sent == []

    protocol.resume_writing()
    await turns()
    assert sent == [0, 1, 2, 3, 4]
    protocol.connection_lost(None)


async def test_an_answer_that_breaks_off_does_not_wait_for_its_reader() -> None:
    """A close would wait until the reader has taken what is in the buffer."""
    protocol, wire = connect(answering(head(), body(b"one", more=True)), asyncio.get_running_loop())

    protocol.data_received(GET)
    await turns()

    assert wire.aborted
    assert b"0\r\n\r\n" not in wire.written
    protocol.connection_lost(None)


async def test_a_stop_tells_the_app_first() -> None:
    """Before it waits for the answers under way, one of which may go on for ever."""
    done: list[str] = []

    class App:
        state = SimpleNamespace(on_stop=lambda: done.append("told"))

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            raise AssertionError

    class Lifespan:
        async def shutdown(self) -> None:
            done.append("stopped")

    server = JsonServer(App())
    server.servers, server.lifespan = [], Lifespan()
    await server.shutdown()

    assert done == ["told", "stopped"]


# Whole requests: answered without ASGI in between.


class Direct:
    """An app that answers `/locks/...` directly, when told to, and all else by ASGI."""

    def __init__(self) -> None:
        self.whole_requests = self
        self.asked: list[tuple[bytes, dict[bytes, bytes], bytes]] = []
        self.answers: list[Callable[[bytes], None]] = []
        self.by_asgi: list[str] = []
        self.is_prompt = False
        self.is_faulty = False

    def find_whole(self, method: bytes, url: bytes) -> bytes | None:
        return method + b" " + url if url.startswith(b"/locks/") else None

    def answer_whole(
        self, target: bytes, headers: dict[bytes, bytes], body: bytes, tell: Callable[[Reply], None]
    ) -> None:
        self.asked.append((target, headers, body))
        if self.is_faulty:
            raise RuntimeError("a fault of ours")
        if self.is_prompt:
            tell((204, [], b""))
            return

        def answer(content: bytes) -> None:
            tell((200, [(b"content-length", b"%d" % len(content))], content))

        self.answers.append(answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.by_asgi.append(scope["path"])
        if scope["method"] == "POST":
            message = await receive()
            while message["more_body"]:
                message = await receive()
        await send(head(LENGTH))
        await send(body(b"asgi"))


def request(path: str, *headers: str, content: bytes = b"", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: a", *headers]
    if content:
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def answered(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


async def test_a_request_that_came_whole_is_answered_directly_and_in_one_packet() -> None:
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())

    protocol.data_received(request("/locks/a", "X-Volcano-Lock-Token: 1", content=b"{}"))
    headers = {b"host": b"a", b"x-volcano-lock-token": b"1", b"content-length": b"2"}
    assert app.asked == [(b"POST /locks/a", headers, b"{}")]
    assert wire.written == []
    app.answers[0](b"granted")
    await turns()

    assert wire.written == [answered(b"granted")]
    assert (app.by_asgi, wire.closed) == ([], False)
    protocol.connection_lost(None)


@pytest.mark.parametrize(
    "packets",
    [
        [request("/locks/a", content=b"{}")[:-1], b"}"],
        [request("/locks/a", content=b"{}")[:-2], b"{}"],
        [request("/locks/a", "Expect: 100-continue", content=b"{}")],
        [request("/locks/a", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"],
        [request("/locks/a", "X-Twice: 1", "X-Twice: 1")],
        [request("/locks/a", "Connection: close")],
        [request("/locks/a", "Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")],
        [request("/healthz")],
    ],
)
async def test_a_request_that_is_not_as_plain_goes_the_way_of_asgi(packets: list[bytes]) -> None:
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())

    for packet in packets:
        protocol.data_received(packet)
        await turns()

    assert (len(app.by_asgi), app.asked) == (1, [])
    assert b"".join(wire.written).endswith(b"asgi")
    protocol.connection_lost(None)


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())

    protocol.data_received(request("/locks/a") + request("/locks/b") + request("/locks/c"))
    await turns()
    assert ([target for target, _, _ in app.asked], app.by_asgi) == ([b"POST /locks/a"], [])
    app.answers[0](b"a")
    await turns()

    assert wire.written[0] == answered(b"a")
    assert b"".join(wire.written[1:]).count(b"asgi") == 2
    assert app.by_asgi == ["/locks/b", "/locks/c"]
    protocol.data_received(request("/locks/d"))
    assert len(app.asked) == 2
    protocol.connection_lost(None)


async def test_prompt_answers_do_not_add_up_to_a_large_head() -> None:
    app = Direct()
    app.is_prompt = True
    protocol, wire = connect(app, asyncio.get_running_loop())
    packet = request("/locks/a", f"X-Long: {'x' * 10_000}")

    for _ in range(20):
        protocol.data_received(packet)

    assert wire.written == [b"HTTP/1.1 204 No Content\r\n\r\n"] * 20
    assert not wire.closed
    protocol.connection_lost(None)


async def test_a_head_without_an_end_is_not_read_while_an_answer_is_on_its_way() -> None:
    """An event stream's may be for hours: all of the head would be kept until then."""
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())
    protocol.data_received(request("/locks/a"))

    protocol.data_received(b"GET / HTTP/1.1\r\n")
    for _ in range(6):
        protocol.data_received(b"X-Long: " + b"x" * 10_000 + b"\r\n")
        assert wire.is_reading()
    protocol.data_received(b"X-Long: " + b"x" * 10_000 + b"\r\n")
    assert not wire.is_reading()
    app.answers[0](b"a")

    assert wire.is_reading()
    assert wire.written == [answered(b"a")]
    protocol.data_received(b"X: y\r\n")
    assert wire.written[1].startswith(b"HTTP/1.1 400 ")
    assert wire.closed
    protocol.connection_lost(None)


async def test_a_stop_lets_a_whole_request_finish_and_closes_its_connection() -> None:
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())
    protocol.data_received(request("/locks/a"))

    protocol.shutdown()
    assert not wire.is_closing()
    app.answers[0](b"a")
    await turns()

    assert wire.is_closing()
    assert b"connection: close\r\n" in wire.written[0]
    protocol.connection_lost(None)


async def test_nothing_is_written_to_a_client_that_is_gone() -> None:
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())
    protocol.data_received(request("/locks/a"))

    protocol.connection_lost(None)
    app.answers[0](b"a")
    await turns()

    assert wire.written == []


async def test_nothing_is_written_to_a_client_that_is_gone_and_had_sent_more() -> None:
    """A real connection raises where it is lost, in the midst of all who share the commit."""
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())
    protocol.data_received(request("/locks/a") + request("/locks/b"))

    wire.abort()
    protocol.connection_lost(ConnectionResetError())
    app.answers[0](b"a")
    await turns()

    assert wire.written == []


async def test_a_client_that_reads_nothing_is_waited_for() -> None:
    """Answers that were written all the same would fill the memory."""
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())

    protocol.pause_writing()
    protocol.data_received(request("/locks/a"))
    await turns()
    assert wire.written == []
    protocol.resume_writing()
    await turns()

    assert b"".join(wire.written).endswith(b"asgi")
    protocol.connection_lost(None)


async def test_a_fault_in_a_whole_request_closes_its_connection() -> None:
    app = Direct()
    app.is_faulty = True
    protocol, wire = connect(app, asyncio.get_running_loop())

    protocol.data_received(request("/locks/a"))

    assert (wire.written, wire.closed) == ([], True)
    protocol.connection_lost(None)


async def test_what_is_no_http_after_a_whole_request_waits_for_its_answer() -> None:
    app = Direct()
    protocol, wire = connect(app, asyncio.get_running_loop())

    protocol.data_received(request("/locks/a") + b"nonsense\r\n\r\n")
    assert wire.written == []
    app.answers[0](b"a")
    await turns()

    assert wire.written[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert wire.closed
    protocol.connection_lost(None)


def test_the_command_line_is_quick_to_start() -> None:
    """What only a server needs is not imported for `keys` and `--help`."""
    script = "import sys, volcano_server.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20
    )

    assert not {"uvicorn", "starlette", "pydantic", "httpx", "pytest"} & set(done.stdout.split())
