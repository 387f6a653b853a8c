"""Real sockets: pytest-httpserver where HTTP is spoken well, a bare socket where it is not."""

import json
import socket
import ssl
import subprocess
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio import to_thread
from async_stage import EXPIRES_AT, Call, ManualClock, settle
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from volcano_sdk.async_client import AsyncVolcanoClient
from volcano_sdk.async_clock import AsyncSystemClock
from volcano_sdk.async_transport import (
    AsyncEventStream,
    AsyncTransport,
    InjectedStream,
    InjectedTransport,
    Lanes,
)
from volcano_sdk.errors import (
    ConflictError,
    ServerError,
    TransportError,
    ValidationError,
    VolcanoError,
)
from volcano_sdk.operations import Answer, Failure, Outcome, Try, get, watch
from volcano_sdk.settings import Settings

pytestmark = pytest.mark.anyio
KEY = "sk-test"
REQUEST_ID = "0d9c2f0e-6f9b-4b7a-9f0e-2a7f3c1b5d11"
GRANT = {"expires_at": EXPIRES_AT, "fencing_token": 2**53 - 1}
FREE = b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n" + b'{"held":false}'


def client_of(url: str, **options: Any) -> AsyncVolcanoClient:
    return AsyncVolcanoClient(api_url=url, service_key=KEY, trust_env=False, **options)


def url_of(server: HTTPServer) -> str:
    return server.url_for("").rstrip("/")


def attempt(timeout: float = 5.0, key: str = "k") -> Try:
    return Try(get(key, request_id=REQUEST_ID, service_key=KEY), timeout)


class SocketServer:
    """Accepts connections and treats each as its script says, one function a connection."""

    def __init__(self, *scripts: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self.release = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(scripts,), daemon=True)
        self._thread.start()

    def _serve(self, scripts: tuple[Callable[[socket.socket], None], ...]) -> None:
        for script in scripts:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            with connection:
                script(connection)

    def close(self) -> None:
        self.release.set()
        self._listener.close()


@contextmanager
def serving(*scripts: Callable[[socket.socket], None]) -> Iterator[SocketServer]:
    server = SocketServer(*scripts)
    try:
        yield server
    finally:
        server.close()


def answers(*responses: bytes) -> Callable[[socket.socket], None]:
    """Answers that many requests, then closes the connection."""

    def script(connection: socket.socket) -> None:
        for response in responses:
            if not connection.recv(65536):
                return
            connection.sendall(response)

    return script


async def test_what_goes_over_the_wire(httpserver: HTTPServer) -> None:
    seen: list[Request] = []

    def handle(request: Request) -> Response:
        seen.append(request)
        if request.method in {"POST", "PATCH"}:
            status = 201 if request.method == "POST" else 200
            return Response(json.dumps(GRANT), status, content_type="application/json")
        if request.method == "GET":
            return Response('{"held":false}', 200, content_type="application/json")
        return Response("", 204)

    httpserver.expect_request("/base/locks/A-1_2:b.c/lease").respond_with_handler(handle)
    httpserver.expect_request("/base/locks/A-1_2:b.c").respond_with_handler(handle)

    async with client_of(httpserver.url_for("/base/")) as client:
        lease = await client.locks.acquire("A-1_2:b.c", ttl=30)
        await client.locks.renew("A-1_2:b.c", lease, ttl=31)
        await client.locks.release("A-1_2:b.c", lease)
        await client.locks.get("A-1_2:b.c")
        await client.locks.force_release("A-1_2:b.c")

    assert lease.fencing_token == 2**53 - 1
    assert [request.method for request in seen] == ["POST", "PATCH", "DELETE", "GET", "DELETE"]
    for request in seen:
        assert "A-1_2%3Ab.c" in request.environ["RAW_URI"]
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        assert request.headers["Content-Type"] == "application/json"
        assert len(request.headers["X-Volcano-Request-Id"]) == 36
        assert request.headers["User-Agent"].startswith("volcano-sdk-python")
    assert [request.headers.get("X-Volcano-Lock-Token") for request in seen] == (
        [lease.token] * 3 + [None] * 2
    )
    assert [request.data for request in seen[:3]] == [
        b'{"ttl_seconds":30}',
        b'{"ttl_seconds":31}',
        b"",
    ]


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "invalid_request", ValidationError),
        (409, "lock_ownership_lost", ConflictError),
        (503, "lock_service_unavailable", ServerError),
        (307, "", VolcanoError),
    ],
)
async def test_an_error_answer_becomes_its_error(
    httpserver: HTTPServer, status: int, code: str, error: type[VolcanoError]
) -> None:
    httpserver.expect_request("/locks/k").respond_with_json(
        {"error": "A sentence.", "code": code}, status, {"Location": "/elsewhere"}
    )

    async with client_of(url_of(httpserver)) as client:
        with pytest.raises(error, match=r"A sentence\.") as caught:
            await client.locks.get("k", request_id=REQUEST_ID)

    assert type(caught.value) is error
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.request_id == REQUEST_ID
    assert len(httpserver.log) == 1


async def test_one_connection_serves_one_call_after_the_other() -> None:
    with serving(answers(FREE, FREE, FREE)) as server:
        async with client_of(server.url) as client:
            for _ in range(3):
                assert not (await client.locks.get("k")).held

        assert server.accepted == 1


async def test_a_kept_connection_that_the_server_closed_is_replaced_unseen() -> None:
    with serving(answers(FREE), answers(FREE)) as server:
        async with client_of(server.url) as client:
            assert not (await client.locks.get("k")).held
            await _until_closed_by_peer(client)
            assert not (await client.locks.get("k")).held

        assert server.accepted == 2


async def _until_closed_by_peer(client: AsyncVolcanoClient) -> None:
    """A bounded wait for the FIN of the idle lane's connection."""
    [lane] = client._transports[0]._idle  # type: ignore[attr-defined]
    with anyio.fail_after(5):
        while not all(one.has_expired() for one in lane._pool.connections):  # noqa: ASYNC110
            await anyio.sleep(0.001)  # the kernel has no event for us


async def test_a_connection_that_fails_after_the_send_is_never_sent_again() -> None:
    with serving(answers(FREE, b"")) as server:
        lanes = Lanes(Settings(server.url), AsyncSystemClock())
        now = AsyncSystemClock().now()
        assert isinstance(await lanes.exchange(attempt(), sent_at=now), Answer)
        outcome = await lanes.exchange(attempt(), sent_at=now)
        await lanes.aclose()

    assert isinstance(outcome, Failure)
    assert outcome.reached
    assert outcome.sent_at == now
    assert "got no answer" in str(outcome.error)
    assert server.accepted == 1
    assert lanes._idle == []


async def test_only_so_many_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volcano_sdk.async_transport.IDLE_LANES", 0)
    with serving(answers(FREE)) as server:
        lanes = Lanes(Settings(server.url), AsyncSystemClock())
        await lanes.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert lanes._idle == []


async def test_an_answer_that_comes_after_the_close_leaves_no_connection_open() -> None:
    held = Held()
    clock = ManualClock()
    go_on = threading.Event()

    def late(connection: socket.socket) -> None:
        connection.recv(65536)
        held.arrived.set()
        go_on.wait(10)
        connection.sendall(FREE)
        held(connection)

    with serving(late) as server:
        lanes = Lanes(Settings(server.url), clock)

        async def close_meanwhile() -> None:
            await happens(held.arrived)
            await lanes.aclose()
            go_on.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close_meanwhile)
            outcome = await lanes.exchange(attempt(), sent_at=clock.now())
        await happens(held.closed)

    assert isinstance(outcome, Answer)
    assert lanes._idle == []


async def test_a_refused_connection_reached_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    lanes = Lanes(Settings(url), AsyncSystemClock())

    outcome = await lanes.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)
    assert not outcome.reached
    assert f"could not reach {url}" in str(outcome.error)


class Held:
    """A script that reads what comes, answers nothing, and tells."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.closed = threading.Event()

    def __call__(self, connection: socket.socket) -> None:
        while connection.recv(65536):
            self.arrived.set()
        self.closed.set()


async def happens(event: threading.Event) -> None:
    """A bounded wait for what another thread sees."""
    assert await to_thread.run_sync(event.wait, 10)


async def exchange_until_over(lanes: Lanes, clock: ManualClock, held: Held) -> Outcome:
    """A try whose time is over as soon as its first bytes have arrived."""
    outcomes: list[Outcome] = []

    async def exchange() -> None:
        outcomes.append(await lanes.exchange(attempt(5), sent_at=clock.now()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange)
        await happens(held.arrived)
        await clock.advance(5)
    return outcomes[0]


async def test_a_try_that_takes_too_long_closes_its_connection() -> None:
    held = Held()
    clock = ManualClock()
    with serving(held, answers(FREE)) as server:
        lanes = Lanes(Settings(server.url), clock)
        outcome = await exchange_until_over(lanes, clock, held)
        again = await lanes.exchange(attempt(), sent_at=clock.now())
        await happens(held.closed)
        await lanes.aclose()

    assert isinstance(outcome, Failure)
    assert outcome.reached
    assert "the time for an answer was over" in str(outcome.error)
    assert isinstance(again, Answer)


async def test_a_server_that_dribbles_does_not_extend_a_try() -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while not server.release.wait(0.01):
                connection.sendall(b" ")
        except OSError:
            pass

    with serving(script) as server:
        lanes = Lanes(Settings(server.url), AsyncSystemClock())
        with anyio.fail_after(5):
            outcome = await lanes.exchange(attempt(0.1), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)


async def test_an_answer_without_end_is_not_read() -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(65536)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"
        try:
            connection.sendall(head + b" " * 3_000_000)
        except OSError:
            pass

    with serving(script) as server:
        lanes = Lanes(Settings(server.url), AsyncSystemClock())
        outcome = await lanes.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)
    assert "over 1 MiB" in str(outcome.error)


async def test_what_is_no_http_is_a_failure() -> None:
    with serving(answers(b"hello\r\n\r\n")) as server:
        lanes = Lanes(Settings(server.url), AsyncSystemClock())
        outcome = await lanes.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)
    assert outcome.reached


async def test_a_cancelled_call_closes_its_connection_and_harms_no_other() -> None:
    held = Held()
    with serving(held, answers(FREE)) as server:
        async with client_of(server.url) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.locks.get, "k")
                await happens(held.arrived)
                tasks.cancel_scope.cancel()
            assert not (await client.locks.get("k")).held
            await happens(held.closed)


async def test_each_call_in_flight_has_a_connection_of_its_own(httpserver: HTTPServer) -> None:
    def handle(request: Request) -> Response:
        number = int(request.path.rpartition("-")[2])
        body = f'{{"held":true,"expires_at":"{EXPIRES_AT}","fencing_token":{number}}}'
        return Response(body, 200)

    httpserver.expect_request(_AnyPath()).respond_with_handler(handle)
    got: dict[int, int | None] = {}

    async with client_of(url_of(httpserver)) as client, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            got[number] = (await client.locks.get(f"k-{number}")).fencing_token

        for number in range(40):
            tasks.start_soon(ask, number)
    assert got == {number: number for number in range(40)}


class _AnyPath(str):
    """pytest-httpserver compares the path with this."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    __hash__ = str.__hash__


async def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volcano_sdk.async_transport.IDLE_LANES", 0)
    with serving(answers(FREE), answers(FREE)) as server:
        async with client_of(server.url) as client:
            await client.locks.get("k")
            await client.locks.get("k")

        assert server.accepted == 2


async def test_the_environments_proxy_is_used_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answers(FREE)) as proxy:
        address = proxy.url.removeprefix("http://")
        monkeypatch.setenv("http_proxy", f"http://user:hunter2@{address}")
        monkeypatch.delenv("no_proxy", raising=False)
        async with AsyncVolcanoClient(api_url="http://volcano.test", service_key=KEY) as client:
            assert not (await client.locks.get("k")).held
            proxy.close()
            with pytest.raises(TransportError) as caught:
                await client.locks.get("k")

    assert f"through the proxy http://{address}" in str(caught.value)
    assert "trust_env=False" in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_a_proxy_that_refuses_reached_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answers(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")) as proxy:
        settings = Settings("https://volcano.test", proxy=proxy.url)
        lanes = Lanes(settings, AsyncSystemClock())
        outcome = await lanes.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)
    assert not outcome.reached
    assert "the proxy refused: 403 Forbidden" in str(outcome.error)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(path), "-out", str(path.with_suffix(".crt"))]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


def over_tls(certificate: Path, script: Callable[[Any], None]) -> Callable[[socket.socket], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def secured(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                script(secure)
        except OSError:
            pass  # the client did not trust us

    return secured


async def test_an_answer_comes_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(over_tls(certificate, answers(FREE, FREE))) as server:
        async with client_of(server.url.replace("http:", "https:")) as client:
            assert not (await client.locks.get("k")).held
            assert not (await client.locks.get("k")).held


async def test_an_unknown_certificate_is_refused_before_anything_is_sent(
    certificate: Path,
) -> None:
    with serving(over_tls(certificate, answers(FREE))) as server:
        settings = Settings(server.url.replace("http:", "https:"))
        lanes = Lanes(settings, AsyncSystemClock())
        outcome = await lanes.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)
    assert not outcome.reached


async def test_a_hung_handshake_ends_and_closes_its_socket() -> None:
    held = Held()
    clock = ManualClock()
    with serving(held) as server:
        lanes = Lanes(Settings(server.url.replace("http:", "https:")), clock)
        outcome = await exchange_until_over(lanes, clock, held)
        await happens(held.closed)

    assert isinstance(outcome, Failure)
    assert not outcome.reached


# --- an injected client ---------------------------------------------------------------------------


def mocked(handle: Callable[[httpx.Request], Any]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handle), follow_redirects=True)


async def test_an_injected_client_is_used_and_stays_open() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201 if request.method == "POST" else 204, json=GRANT)

    async with mocked(handle) as http:
        client = client_of("http://volcano.test/base", http_client=http)
        async with client, client.locks.with_lock("a:b", ttl=30):
            pass
        assert not http.is_closed

    assert [request.method for request in seen] == ["POST", "DELETE"]
    assert seen[0].url.raw_path == b"/base/locks/a%3Ab/lease"
    assert seen[0].content == b'{"ttl_seconds":30}'
    assert seen[0].headers["Authorization"] == f"Bearer {KEY}"


async def test_an_injected_client_works_outside_of_async_with() -> None:
    async with mocked(lambda _: httpx.Response(200, json={"held": False})) as http:
        client = client_of("http://volcano.test", http_client=http)
        assert not (await client.locks.get("k")).held
        await client.aclose()


async def test_an_injected_clients_redirects_are_not_followed() -> None:
    async with mocked(lambda _: httpx.Response(307, headers={"Location": "/x"})) as http:
        client = client_of("http://volcano.test", http_client=http)
        with pytest.raises(VolcanoError) as caught:
            await client.locks.get("k")

    assert caught.value.status == 307


@pytest.mark.parametrize(
    ("error", "reached"),
    [
        (httpx.ReadError("reset"), True),
        (httpx.ConnectError("refused"), False),
        (httpx.PoolTimeout("full"), False),
        (ValueError(), True),
    ],
)
async def test_an_injected_clients_errors_are_transport_errors(
    error: Exception, reached: bool
) -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        raise error

    async with mocked(handle) as http:
        transport = InjectedTransport(http, Settings("http://volcano.test"), AsyncSystemClock())
        outcome = await transport.exchange(attempt(), sent_at=AsyncSystemClock().now())

    assert isinstance(outcome, Failure)
    assert outcome.reached == reached
    assert type(error).__name__ in str(outcome.error)


async def test_a_request_on_an_injected_client_is_left_to_end_by_itself() -> None:
    """A cancelled request could leave the caller's pool dead."""
    goes_on = anyio.Event()
    ended: list[str] = []

    async def handle(_: httpx.Request) -> httpx.Response:
        try:
            await goes_on.wait()
            ended.append("well")
        except BaseException:
            ended.append("cancelled")
            raise
        return httpx.Response(200)

    async with mocked(handle) as http, anyio.create_task_group() as tasks:
        transport = InjectedTransport(http, Settings("http://volcano.test"), AsyncSystemClock())
        transport.start(tasks)
        outcome: Outcome = await transport.exchange(attempt(0.02), sent_at=AsyncSystemClock().now())
        assert isinstance(outcome, Failure)
        goes_on.set()
        await transport.aclose()

    assert ended == ["well"]


async def test_closing_cuts_off_what_hangs_on_an_injected_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("volcano_sdk.async_transport.EXIT_TRY_SECONDS", 0.02)

    async def handle(_: httpx.Request) -> httpx.Response:
        await anyio.sleep_forever()
        raise AssertionError

    async with mocked(handle) as http, anyio.create_task_group() as tasks:
        transport = InjectedTransport(http, Settings("http://volcano.test"), AsyncSystemClock())
        transport.start(tasks)
        await transport.exchange(attempt(0.02), sent_at=AsyncSystemClock().now())
        await transport.aclose()

    assert transport._running == {}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_client_may_be_made_before_there_is_an_event_loop(backend: str) -> None:
    client = client_of("http://127.0.0.1:1")

    async def use() -> None:
        async with client:
            with pytest.raises(TransportError, match="could not reach"):
                await client.locks.get("k")

    anyio.run(use, backend=backend)


def test_importing_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import volcano_sdk.async_client  # noqa: F401


# --- streams of events ----------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
STREAM = HEAD + b"Transfer-Encoding: chunked\r\n\r\n7\r\n: hello\r\n"
END = b"0\r\n\r\n"


def watching(timeout: float = 5.0) -> Try:
    request = watch(["k"], [], last_id="", request_id=REQUEST_ID, service_key=KEY)
    return Try(request, timeout)


async def opened(transport: AsyncTransport) -> AsyncEventStream:
    stream = await transport.stream(watching(), sent_at=soon(0))
    assert not isinstance(stream, Answer | Failure)
    return stream


def soon(seconds: float = 5.0) -> float:
    return AsyncSystemClock().now() + seconds


def streams(held: Held, *more: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        connection.recv(65536)
        for part in (STREAM, *more):
            connection.sendall(part)
        held(connection)

    return script


@asynccontextmanager
async def transport_to(url: str, *, is_injected: bool) -> AsyncIterator[AsyncTransport]:
    if not is_injected:
        yield Lanes(Settings(url), AsyncSystemClock())
        return
    async with httpx.AsyncClient(trust_env=False) as http, anyio.create_task_group() as tasks:
        transport = InjectedTransport(http, Settings(url), AsyncSystemClock())
        transport.start(tasks)
        yield transport


@pytest.mark.parametrize("is_injected", [False, True])
async def test_a_stream_is_read_as_it_comes(is_injected: bool) -> None:
    held = Held()
    with serving(streams(held, END)) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            stream = await opened(transport)

            assert await stream.read(soon()) == b": hello"
            assert await stream.read(soon()) == b""
            await stream.aclose()
        await happens(held.closed)


@pytest.mark.parametrize("is_injected", [False, True])
async def test_a_stream_of_which_nothing_comes_is_over(is_injected: bool) -> None:
    held = Held()
    with serving(streams(held)) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            stream = await opened(transport)
            await stream.read(soon())

            with anyio.fail_after(5):
                assert await stream.read(soon(0.05)) == b""
            await stream.aclose()
        await happens(held.closed)


@pytest.mark.parametrize("is_injected", [False, True])
async def test_a_stream_that_breaks_is_over(is_injected: bool) -> None:
    def breaks(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(STREAM + b"zz")

    with serving(breaks) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            stream = await opened(transport)
            await stream.read(soon())

            assert await stream.read(soon()) == b""
            await stream.aclose()


@pytest.mark.parametrize("is_injected", [False, True])
async def test_a_cancelled_reader_closes_its_stream(is_injected: bool) -> None:
    held = Held()
    with serving(streams(held)) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            stream = await opened(transport)
            with anyio.move_on_after(0.05):
                try:
                    while await stream.read(soon()):
                        pass
                finally:
                    await stream.aclose()

            await happens(held.closed)


async def test_closing_closes_what_streams() -> None:
    held = Held()
    with serving(streams(held)) as server:
        lanes = Lanes(Settings(server.url), AsyncSystemClock())
        stream = await opened(lanes)
        await stream.read(soon())

        await lanes.aclose()

        await happens(held.closed)
        with anyio.fail_after(5):
            assert await stream.read(soon()) == b""
        await stream.aclose()
        assert lanes._streaming == {}


@pytest.mark.parametrize("is_injected", [False, True])
async def test_what_is_no_stream_is_an_answer(is_injected: bool) -> None:
    refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
    with serving(answers(refusal)) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            answer = await transport.stream(watching(), sent_at=soon(0))

    assert isinstance(answer, Answer)
    assert (answer.status, answer.body) == (404, b"{}")


@pytest.mark.parametrize("is_injected", [False, True])
async def test_a_stream_that_cannot_be_opened_is_a_failure(is_injected: bool) -> None:
    with serving(answers(b"hello\r\n\r\n")) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            outcome = await transport.stream(watching(), sent_at=soon(0))

    assert isinstance(outcome, Failure)


@pytest.mark.parametrize("is_injected", [False, True])
async def test_a_stream_that_nobody_opens_in_time_is_a_failure(is_injected: bool) -> None:
    held = Held()
    with serving(held) as server:
        async with transport_to(server.url, is_injected=is_injected) as transport:
            outcome = await transport.stream(watching(0.05), sent_at=soon(0))
            assert isinstance(outcome, Failure)
            server.close()
            if is_injected:
                await _cut_off(transport)


async def _cut_off(transport: AsyncTransport) -> None:
    assert isinstance(transport, InjectedTransport)
    for running in transport._running.values():
        running.cancel()


async def test_an_injected_client_streams_outside_of_async_with() -> None:
    async with mocked(lambda _: httpx.Response(200, headers=EVENTS, content=b": x\n")) as http:
        transport = InjectedTransport(http, Settings("http://volcano.test"), AsyncSystemClock())
        stream = await opened(transport)

        assert await stream.read(soon()) == b": x\n"
        await stream.aclose()


EVENTS = {"Content-Type": "text/event-stream"}


async def test_an_injected_stream_that_opens_when_nobody_waits_for_it_is_closed() -> None:
    clock, goes_on, body = ManualClock(), anyio.Event(), Body()

    async def handle(_: httpx.Request) -> httpx.Response:
        await goes_on.wait()
        return httpx.Response(200, headers=EVENTS, stream=body)

    async with mocked(handle) as http, anyio.create_task_group() as tasks:
        transport = InjectedTransport(http, Settings("http://volcano.test"), clock)
        transport.start(tasks)
        call = Call(tasks, lambda: transport.stream(watching(5), sent_at=clock.now()))
        await clock.advance(5)
        assert isinstance(call.value, Failure)
        goes_on.set()

    assert body.is_closed


async def test_an_injected_streams_opening_is_left_to_end_by_itself() -> None:
    """A cancelled request could leave the caller's pool dead."""
    goes_on, body = anyio.Event(), Body()

    async def handle(_: httpx.Request) -> httpx.Response:
        await goes_on.wait()
        return httpx.Response(200, headers=EVENTS, stream=body)

    async with mocked(handle) as http, anyio.create_task_group() as tasks:
        transport = InjectedTransport(http, Settings("http://volcano.test"), AsyncSystemClock())
        transport.start(tasks)
        call = Call(tasks, lambda: transport.stream(watching(), sent_at=soon(0)))
        await settle()
        call.scope.cancel()
        await settle()
        assert call.was_cancelled
        goes_on.set()

    assert body.is_closed


async def test_an_injected_stream_that_opens_as_its_caller_is_cancelled_is_closed() -> None:
    body = Body()

    async def handle(_: httpx.Request) -> httpx.Response:
        call.scope.cancel()
        return httpx.Response(200, headers=EVENTS, stream=body)

    async with mocked(handle) as http, anyio.create_task_group() as tasks:
        transport = InjectedTransport(http, Settings("http://volcano.test"), AsyncSystemClock())
        transport.start(tasks)
        call = Call(tasks, lambda: transport.stream(watching(), sent_at=soon(0)))

    assert call.was_cancelled
    assert body.is_closed


class Body(httpx.AsyncByteStream):
    is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b": x\n"

    async def aclose(self) -> None:
        self.is_closed = True


async def test_of_a_successor_of_httpx_a_stream_may_have_empty_parts_and_end_in_any_way() -> None:
    class Response:
        async def aiter_bytes(self) -> AsyncIterator[bytes]:
            yield b""
            yield b": x\n"
            try:
                await anyio.sleep_forever()
            finally:
                raise ZeroDivisionError

    async with AsyncExitStack() as opening:
        stream = InjectedStream(opening, Response(), AsyncSystemClock())

        assert await stream.read(soon()) == b": x\n"
        await stream.aclose()
        assert await stream.read(soon()) == b""
