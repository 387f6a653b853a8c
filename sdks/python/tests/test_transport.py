import contextlib
import gc
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpcore
import httpx
import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from volcano_sdk import lane, operations, transport
from volcano_sdk.clock import SystemClock
from volcano_sdk.lane import Connection, Lane, Shield
from volcano_sdk.operations import Answer, Failure, Outcome, Try
from volcano_sdk.settings import Settings
from volcano_sdk.threads import Timer, TimerThread
from volcano_sdk.transport import EventStream, Injected, Lanes

PATIENCE = 10.0
TOKEN = "4b5c3f7e-8f0c-4c3b-9a55-0d9d3c0f7a11"
OK = b"HTTP/1.1 204 No Content\r\n\r\n"
Handler = Callable[[socket.socket], object]


def attempt(operation: str = "acquire", timeout: float = PATIENCE) -> Try:
    identity = {"request_id": TOKEN, "service_key": "sk-wire"}
    if operation == "acquire":
        return Try(operations.acquire("a:b", ttl=30, token=TOKEN, **identity), timeout)
    return Try(operations.get("a:b", **identity), timeout)


def real_timers() -> TimerThread:
    return TimerThread(SystemClock(), lambda: False)


def lanes(url: str, timers: TimerThread | None = None, **settings: str | None) -> Lanes:
    found = Settings.resolve(api_url=url, service_key="sk-wire", trust_env=False)
    if settings:
        found = Settings(found.api_url, service_key="sk-wire", **settings)  # type: ignore[arg-type]
    return Lanes(found, timers or real_timers())


class RawServer:
    """Each connection gets the next handler; the last one serves all further ones."""

    def __init__(self, *handlers: Handler) -> None:
        self._handlers = list(handlers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            handler = self._handlers[0] if len(self._handlers) == 1 else self._handlers.pop(0)
            threading.Thread(target=self._handle, args=(handler, connection), daemon=True).start()

    def _handle(self, handler: Handler, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            handler(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)
        for connection in self._open:
            connection.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    servers: list[RawServer] = []

    def start(*handlers: Handler) -> RawServer:
        servers.append(RawServer(*handlers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def heard(connection: socket.socket) -> bytes:
    """One request's head, and what came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return data
        data += part
    return data


def answers(data: bytes, *, then: Handler | None = None) -> Handler:
    def handle(connection: socket.socket) -> None:
        while heard(connection):
            connection.sendall(data)
            if then is not None:
                then(connection)
                return

    return handle


def resets(connection: socket.socket) -> None:
    heard(connection)
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


def hangs(connection: socket.socket) -> None:
    heard(connection)
    connection.recv(1)


# --- what is sent


def test_a_request_is_sent_as_it_is(httpserver: HTTPServer) -> None:
    seen: list[Request] = []

    def handle(request: Request) -> Response:
        request.get_data()
        seen.append(request)
        return Response('{"a": 1}', 201, {"X-Volcano-Expires-In": "29.9"})

    httpserver.expect_request("/base/locks/a:b/lease").respond_with_handler(handle)
    wire = lanes(httpserver.url_for("/base"))

    answer = wire.exchange(attempt())

    assert isinstance(answer, Answer)
    assert (answer.status, answer.body) == (201, b'{"a": 1}')
    assert answer.headers["x-volcano-expires-in"] == "29.9"
    (request,) = seen
    assert request.environ["REQUEST_URI"] == "/base/locks/a%3Ab/lease"
    assert request.method == "POST"
    assert request.data == b'{"ttl_seconds":30}'
    assert request.headers["Authorization"] == "Bearer sk-wire"
    assert request.headers["X-Volcano-Lock-Token"] == TOKEN
    assert request.headers["User-Agent"].startswith("volcano-sdk-python/")
    wire.close()


def test_a_redirect_is_an_answer_and_not_followed(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/locks/a:b").respond_with_data(
        status=307, headers={"Location": httpserver.url_for("/elsewhere")}
    )
    wire = lanes(httpserver.url_for("/"))

    answer = wire.exchange(attempt("get"))

    assert isinstance(answer, Answer)
    assert answer.status == 307
    assert len(httpserver.log) == 1
    wire.close()


def test_one_connection_serves_many_exchanges(serve: Callable[..., RawServer]) -> None:
    server = serve(answers(OK))
    wire = lanes(server.url)
    for _ in range(5):
        assert isinstance(wire.exchange(attempt()), Answer)

    assert server.connections == 1
    wire.close()


def test_the_connection_that_was_used_last_is_used_first(serve: Callable[..., RawServer]) -> None:
    """The others may grow old and go."""
    wire = lanes(serve(answers(OK)).url)
    first, second = wire._take(), wire._take()
    for each in (first, second):
        each.is_good = True
        wire.give(each)

    wire.exchange(attempt())

    assert wire._idle == [first, second]
    wire.close()


def test_only_so_many_connections_are_kept(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "IDLE_LANES", 0)
    wire = lanes(serve(answers(OK)).url)
    wire.exchange(attempt())

    assert wire._idle == []


def test_twenty_threads_each_get_their_own_answer(httpserver: HTTPServer) -> None:
    def handle(request: Request) -> Response:
        return Response(request.headers["X-Volcano-Request-Id"])

    httpserver.expect_request("/locks/a:b").respond_with_handler(handle)
    wire = lanes(httpserver.url_for("/"))
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(10):
            name = f"{number}-{turn}"
            request = operations.get("a:b", request_id=name, service_key="sk-wire")
            outcome = wire.exchange(Try(request, PATIENCE))
            if not isinstance(outcome, Answer) or outcome.body != name.encode():
                wrong.append(outcome)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert wrong == []
    assert len(wire._idle) <= 16
    wire.close()


def test_an_answer_tells_when_its_request_was_sent(serve: Callable[..., RawServer]) -> None:
    def slow(connection: socket.socket) -> None:
        heard(connection)
        time.sleep(0.2)
        connection.sendall(OK)

    wire = lanes(serve(slow).url)
    before = wire._timers.now()
    answer = wire.exchange(attempt())

    assert before <= answer.sent_at <= wire._timers.now() - 0.2
    wire.close()


# --- what goes wrong


def failed(wire: Lanes, what: Try | None = None) -> Failure:
    outcome = wire.exchange(what or attempt())
    assert isinstance(outcome, Failure)
    assert outcome.error.request_id == TOKEN
    wire.close()
    return outcome


def test_a_server_that_is_not_there_was_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"

    failure = failed(lanes(url))

    assert not failure.reached
    assert f"acquire could not reach {url}: " in str(failure.error)
    assert "refused" in str(failure.error)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70])
def test_a_name_that_cannot_be_resolved_was_not_reached(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def local(name: str, *rest: object, **options: object) -> object:
        if name.endswith(".invalid"):
            raise socket.gaierror(-2, "Name or service not known")
        return resolve(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", local)

    assert not failed(lanes(f"http://{host}:1")).reached


def test_every_address_of_a_name_is_tried(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(answers(OK))
    port = int(server.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*stream, ("127.0.0.1", closed)), (*stream, ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    wire = lanes(server.url)
    assert isinstance(wire.exchange(attempt()), Answer)
    wire.close()


@pytest.mark.parametrize(
    "handler",
    [
        resets,
        answers(b""),
        answers(b"HTTP/1.1 201 Created\r\n", then=socket.socket.close),
        answers(b"junk\r\n\r\n", then=lambda connection: None),
    ],
)
def test_no_good_answer_after_a_connection_may_have_reached_the_server(
    handler: Handler, serve: Callable[..., RawServer]
) -> None:
    server = serve(handler)

    failure = failed(lanes(server.url), attempt(timeout=0.5))

    assert failure.reached
    assert f"acquire got no answer from {server.url}: " in str(failure.error)
    assert server.connections == 1  # nothing is sent twice


def test_an_answer_without_end_is_cut_off(serve: Callable[..., RawServer]) -> None:
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 2_000_000
    failure = failed(lanes(serve(answers(body)).url))

    assert "over 1 MiB" in str(failure.error)


def test_a_hanging_server_is_given_up_in_time(serve: Callable[..., RawServer]) -> None:
    started = time.monotonic()
    failure = failed(lanes(serve(hangs).url), attempt(timeout=0.2))

    assert 0.1 < time.monotonic() - started < 5
    assert failure.reached
    assert "time for an answer was over" in str(failure.error)


def test_a_server_that_dribbles_is_given_up_in_time(serve: Callable[..., RawServer]) -> None:
    def dribbles(connection: socket.socket) -> None:
        heard(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    started = time.monotonic()
    failure = failed(lanes(serve(dribbles).url), attempt(timeout=0.3))

    assert time.monotonic() - started < 5
    assert "time for an answer was over" in str(failure.error)


def test_a_server_that_never_comes_to_the_point_is_given_up_in_time(
    serve: Callable[..., RawServer],
) -> None:
    """Bytes are always there to be read, so that no wait for them ever ends."""

    def prattles(connection: socket.socket) -> None:
        heard(connection)
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

    started = time.monotonic()
    failure = failed(lanes(serve(prattles).url), attempt(timeout=0.3))

    assert time.monotonic() - started < 5
    assert "time for an answer was over" in str(failure.error)


def test_a_send_that_the_server_does_not_take_in_is_given_up_in_time(
    serve: Callable[..., RawServer],
) -> None:
    release = threading.Event()
    server = serve(lambda connection: release.wait(PATIENCE))
    request = operations.Request("acquire", "POST", "/x", attempt().request.headers, b"x" * 20**6)

    failure = failed(lanes(server.url), Try(request, 0.3))

    release.set()
    assert failure.reached


def test_an_interrupted_lane_is_thrown_away(serve: Callable[..., RawServer]) -> None:
    server = serve(hangs, answers(OK))
    wire = lanes(server.url)
    failure = wire.exchange(attempt(timeout=0.1))
    assert isinstance(failure, Failure)

    assert isinstance(wire.exchange(attempt()), Answer)
    assert server.connections == 2
    wire.close()


def closes_after(answer: bytes, done: threading.Event) -> Handler:
    def close(connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        done.set()

    return answers(answer, then=close)


def test_a_kept_connection_that_the_server_closed_is_no_error(
    serve: Callable[..., RawServer],
) -> None:
    closed = threading.Event()
    server = serve(closes_after(OK, closed), answers(OK))
    wire = lanes(server.url)
    assert isinstance(wire.exchange(attempt()), Answer)
    assert closed.wait(PATIENCE)
    wait_readable(wire)

    assert isinstance(wire.exchange(attempt()), Answer)
    assert server.connections == 2
    wire.close()


def wait_readable(wire: Lanes) -> None:
    end = time.monotonic() + PATIENCE
    while not wire._idle[0].is_readable() and time.monotonic() < end:
        time.sleep(0.005)


def test_a_kept_connection_that_was_reset_is_no_error_either(
    serve: Callable[..., RawServer],
) -> None:
    def reset(connection: socket.socket) -> None:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()

    server = serve(answers(OK, then=reset), answers(OK))
    wire = lanes(server.url)
    assert isinstance(wire.exchange(attempt()), Answer)
    wait_readable(wire)

    assert isinstance(wire.exchange(attempt()), Answer)
    wire._idle[0].close_socket()
    assert wire._idle[0].is_readable()
    wire.close()


# --- closing, forks, garbage


def test_closing_ends_what_is_in_flight(serve: Callable[..., RawServer]) -> None:
    hanging = threading.Event()

    def hang(connection: socket.socket) -> None:
        heard(connection)
        hanging.set()
        connection.recv(1)

    wire = lanes(serve(hang).url)
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.append(wire.exchange(attempt())))
    thread.start()
    assert hanging.wait(PATIENCE)

    wire.close()
    thread.join(PATIENCE)

    (outcome,) = outcomes
    assert isinstance(outcome, Failure)
    assert "closed by our side" in str(outcome.error)


def test_after_closing_nothing_is_kept(serve: Callable[..., RawServer]) -> None:
    wire = lanes(serve(answers(OK)).url)
    wire.close()

    assert isinstance(wire.exchange(attempt()), Answer)
    assert wire._idle == []


def test_a_forgotten_transport_closes_its_sockets_without_a_word(
    serve: Callable[..., RawServer],
) -> None:
    server = serve(answers(OK))
    wire = lanes(server.url)
    wire.exchange(attempt())
    wire.exchange(attempt())
    inherited = wire._idle[0]._socket
    assert inherited is not None
    wire._busy.add(Lane(wire._endpoint, wire._timers))

    wire.forget()

    assert inherited.fileno() == -1
    assert isinstance(wire.exchange(attempt()), Answer)
    assert server.connections == 2
    wire.close()


def test_an_exchange_in_whose_middle_the_process_forked_leaves_the_parents_connection() -> None:
    wire = lanes("http://127.0.0.1:1")
    lane = wire._take()
    ours, theirs = socket.socketpair()
    lane.use(ours)

    wire.forget()
    wire.give(lane)

    assert ours.fileno() == -1  # our copy of it; the parent's goes on
    assert lane._socket is ours
    theirs.close()


def test_a_transport_that_is_dropped_closes_its_connections(
    serve: Callable[..., RawServer],
) -> None:
    wire = lanes(serve(answers(OK)).url)
    wire.exchange(attempt())
    kept = wire._idle[0]._socket
    assert kept is not None
    del wire
    gc.collect()

    assert kept.fileno() == -1


# --- a clock that ends exchanges itself


class PushedTimers(TimerThread):
    """As in the conformance driver: no socket has a timeout, a timer shuts it."""

    def __init__(self) -> None:
        super().__init__(SystemClock(), lambda: False)
        self.timers: list[Timer] = []

    def call_at(self, at: float, action: Callable[[], None]) -> Timer:
        self.timers.append(super().call_at(at, action))
        return self.timers[-1]

    def socket_timeout(self, until: float) -> float | None:
        return None


def test_a_timer_can_end_an_exchange(serve: Callable[..., RawServer]) -> None:
    server = serve(hangs, answers(OK))
    timers = PushedTimers()
    wire = lanes(server.url, timers)
    failure = wire.exchange(attempt(timeout=0.1))
    assert isinstance(failure, Failure)
    assert failure.reached
    assert "time for an answer was over" in str(failure.error)

    assert isinstance(wire.exchange(attempt()), Answer)
    assert timers.timers[-1].action is None
    wire.close()


def test_an_abandoned_exchange_ends_and_no_other(serve: Callable[..., RawServer]) -> None:
    server = serve(hangs, answers(OK))
    wire = lanes(server.url)
    hung, other = attempt(timeout=PATIENCE), attempt()
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(wire.exchange(hung)))
    thread.start()
    while not server.connections:
        time.sleep(0.01)

    wire.abandon(other)
    assert isinstance(wire.exchange(other), Answer)
    wire.abandon(other)  # it has ended
    assert thread.is_alive()
    wire.abandon(hung)
    thread.join(5)

    assert isinstance(outcomes[0], Failure)
    assert "closed by our side" in str(outcomes[0].error)
    assert isinstance(wire.exchange(other), Answer)
    assert server.connections == 2
    wire.close()


def test_a_timer_of_an_exchange_that_has_ended_harms_no_later_one(
    serve: Callable[..., RawServer],
) -> None:
    timers = PushedTimers()
    wire = lanes(serve(answers(OK)).url, timers)
    wire.exchange(attempt())
    late = wire._idle[0]
    late.shut(late._exchanges - 1)

    assert isinstance(wire.exchange(attempt()), Answer)
    assert wire._idle == [late]
    wire.close()


def test_a_lane_that_was_shut_neither_waits_nor_sends() -> None:
    wire = lanes("http://127.0.0.1:1")
    lane = wire._take()
    ours, theirs = socket.socketpair()
    lane.use(ours)
    lane.shut()

    with pytest.raises(httpcore.ReadTimeout):
        Connection(lane).read(1)
    with pytest.raises(httpcore.ReadTimeout):
        Connection(lane).write(b"x")
    lane.close()
    theirs.close()


def test_a_wait_on_a_connection_that_is_none_is_an_error_of_the_network() -> None:
    wire = lanes("http://127.0.0.1:9")
    lane = wire._take()
    lane.use(socket.socket())
    lane.limit(wire._timers.now() + 10)

    with pytest.raises(httpcore.ReadError, match="not connected"):
        Connection(lane).read(10)
    assert lane.is_readable()
    lane.close()


def test_a_send_into_a_closed_connection_is_an_error_of_the_network() -> None:
    wire = lanes("http://127.0.0.1:1")
    lane = wire._take()
    ours, theirs = socket.socketpair()
    theirs.close()
    lane.use(ours)
    lane.limit(wire._timers.now() + PATIENCE)

    with pytest.raises(httpcore.WriteError, match="Broken pipe"):
        Connection(lane).write(b"x")
    assert lane.reached
    lane.close()


# --- interrupts


class InterruptedByTestError(Exception):
    """What a signal's handler raises."""


@contextlib.contextmanager
def handler(raises: BaseException) -> Iterator[None]:
    def handle(number: int, frame: object) -> None:
        raise raises

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupts(times: int, then: bytes, pause: float = 0.1) -> Handler:
    def handle(connection: socket.socket) -> None:
        heard(connection)
        for _ in range(times):
            time.sleep(pause)  # so that the client waits for its answer by then
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(pause)
        connection.sendall(then)
        connection.recv(1)

    return handle


def test_the_first_interrupt_waits_for_the_answer(serve: Callable[..., RawServer]) -> None:
    wire = lanes(serve(interrupts(1, OK)).url)
    shield, interrupt = Shield(), KeyboardInterrupt()
    with handler(interrupt):
        answer = wire.exchange(attempt(), shield=shield)

    assert isinstance(answer, Answer)
    assert shield.interrupt is interrupt
    assert shield.reached
    wire.close()


def test_the_second_interrupt_goes_through(serve: Callable[..., RawServer]) -> None:
    wire = lanes(serve(interrupts(2, OK)).url)
    shield = Shield()
    with handler(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        wire.exchange(attempt(), shield=shield)

    assert shield.reached
    assert wire._idle == []
    wire.close()


def interrupted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after the first bytes have gone out, and before anybody could note it."""
    interrupts = [KeyboardInterrupt()]

    def interrupted(send: Callable[[object], object], parts: Iterable[object]) -> Iterator[object]:
        yield from map(send, parts)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(lane, "map", interrupted, raising=False)


def test_an_interrupt_in_the_middle_of_a_send_waits_for_the_answer_too(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the release that follows could be decided before what was given up."""
    interrupted_once(monkeypatch)
    shield = Shield()

    answer = lanes(serve(answers(OK)).url).exchange(attempt(), shield=shield)

    assert isinstance(answer, Answer)
    assert isinstance(shield.interrupt, KeyboardInterrupt)


def test_without_a_shield_an_interrupt_of_a_send_goes_through(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_once(monkeypatch)

    with pytest.raises(KeyboardInterrupt):
        lanes(serve(answers(OK)).url).exchange(attempt())


def test_without_a_shield_an_interrupt_goes_through(serve: Callable[..., RawServer]) -> None:
    wire = lanes(serve(interrupts(1, OK)).url)
    with handler(InterruptedByTestError()), pytest.raises(InterruptedByTestError):
        wire.exchange(attempt())
    wire.close()


@pytest.mark.parametrize("timers", [real_timers, PushedTimers])
def test_an_interrupt_leaves_an_answer_only_a_little_time(
    serve: Callable[..., RawServer],
    timers: Callable[[], TimerThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("volcano_sdk.lane.EXIT_TRY_SECONDS", 0.2)
    wire = lanes(serve(interrupts(1, OK, pause=0.5)).url, timers())
    shield = Shield()
    with handler(KeyboardInterrupt()):
        failure = wire.exchange(attempt(), shield=shield)

    assert isinstance(failure, Failure)
    assert shield.interrupt is not None
    wire.close()


def test_an_interrupt_does_not_extend_a_try(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volcano_sdk.lane.EXIT_TRY_SECONDS", PATIENCE)

    def interrupts_and_hangs(connection: socket.socket) -> None:
        heard(connection)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        connection.recv(1)

    wire = lanes(serve(interrupts_and_hangs).url)
    shield = Shield()
    started = time.monotonic()
    with handler(KeyboardInterrupt()):
        failure = wire.exchange(attempt(timeout=1), shield=shield)

    assert isinstance(failure, Failure)
    assert shield.interrupt is not None
    assert time.monotonic() - started < PATIENCE / 2
    wire.close()


def test_a_lane_without_a_connection_can_be_shut_too() -> None:
    wire = lanes("http://127.0.0.1:9")
    lane = wire._take()
    lane.limit(wire._timers.now() + 10)

    lane.shut()

    with pytest.raises(httpcore.ReadTimeout, match="closed by our side"):
        lane.bounded()


def test_a_timeout_error_of_a_signals_handler_is_not_the_networks(
    serve: Callable[..., RawServer],
) -> None:
    wire = lanes(serve(interrupts(1, OK)).url)
    with handler(TimeoutError("the user's alarm")), pytest.raises(TimeoutError, match="alarm"):
        wire.exchange(attempt(), shield=Shield())
    wire.close()


# --- proxies


def test_a_proxy_that_is_not_there_is_named_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    wire = lanes("http://volcano.test", proxy=f"http://me:hunter2@127.0.0.1:{port}")

    failure = failed(wire)

    assert not failure.reached
    assert f"through the proxy http://127.0.0.1:{port}" in str(failure.error)
    assert "trust_env=False" in str(failure.error)
    assert "hunter2" not in str(failure.error)


def test_a_proxy_passes_the_request_on(serve: Callable[..., RawServer]) -> None:
    requests: list[bytes] = []

    def proxy(connection: socket.socket) -> None:
        requests.append(heard(connection))
        connection.sendall(OK)

    url = serve(proxy).url.replace("http://", "http://me:hunter2@")
    wire = lanes("http://volcano.test", proxy=url)

    assert isinstance(wire.exchange(attempt()), Answer)
    assert requests[0].startswith(b"POST http://volcano.test/locks/a%3Ab/lease HTTP/1.1")
    assert b"Proxy-Authorization: Basic bWU6aHVudGVyMg==" in requests[0]
    wire.close()


def test_a_tunnel_that_the_proxy_refuses_was_not_reached(
    serve: Callable[..., RawServer],
) -> None:
    refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    wire = lanes("https://volcano.test", proxy=serve(answers(refusal)).url)

    failure = failed(wire)

    assert not failure.reached
    assert "the proxy refused: 407" in str(failure.error)


def test_https_through_an_https_proxy_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = lanes("https://volcano.test")
    lane = wire._take()
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(
        socket.socket(), server_hostname="x"
    )
    lane.use(secure)
    lane.limit(wire._timers.now() + 10)

    with pytest.raises(httpcore.ConnectError, match="not supported"):
        Connection(lane).start_tls(ssl.create_default_context())
    lane.close()


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
        f" -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt".split(),
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def over_tls(certificate: Path, inner: Handler) -> Handler:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def handle(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            inner(secure)

    return handle


def test_tls_is_spoken_and_the_certificate_checked(
    serve: Callable[..., RawServer], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(over_tls(certificate, answers(OK)))
    url = server.url.replace("http:", "https:")
    refused = failed(lanes(url))
    assert not refused.reached
    assert "certificate verify failed" in str(refused.error)

    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    wire = lanes(url)
    for _ in range(3):
        assert isinstance(wire.exchange(attempt()), Answer)
    wire.close()


@pytest.mark.parametrize("timers", [real_timers, PushedTimers])
def test_a_hanging_tls_server_is_given_up_in_time(
    serve: Callable[..., RawServer],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    timers: Callable[[], TimerThread],
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    server = serve(over_tls(certificate, hangs), hangs)
    url = server.url.replace("http:", "https:")

    assert failed(lanes(url, timers()), attempt(timeout=0.3)).reached
    assert not failed(lanes(url, timers()), attempt(timeout=0.3)).reached


# --- an injected client


def injected(handler: Callable[[httpx.Request], httpx.Response]) -> Injected:
    client = httpx.Client(transport=httpx.MockTransport(handler), auth=("me", "hunter2"))
    settings = Settings("http://volcano.test/base", service_key="sk-wire")
    return Injected(client, settings, TimerThread(SystemClock(), lambda: False))


def test_an_injected_client_sends_what_lanes_would() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, content=b"{}", headers={"X-Y": "z"})

    wire, shield = injected(handle), Shield()
    answer = wire.exchange(attempt(timeout=3.5), shield=shield)
    wire.exchange(attempt("get"))

    assert isinstance(answer, Answer)
    assert (answer.status, answer.body, answer.headers["x-y"]) == (201, b"{}", "z")
    assert seen[0].url.raw_path == b"/base/locks/a%3Ab/lease"
    assert seen[0].content == b'{"ttl_seconds":30}'
    assert seen[0].headers["Authorization"] == "Bearer sk-wire"
    assert seen[0].extensions["timeout"]["read"] == 3.5
    assert shield.reached
    wire.close()
    wire.forget()


@pytest.mark.parametrize(
    ("error", "reached"),
    [
        (httpx.ConnectError("x"), False),
        (httpx.ConnectTimeout("x"), False),
        (httpx.PoolTimeout("x"), False),
        (httpx.ReadTimeout("x"), True),
        (httpx.RemoteProtocolError("x"), True),
        (httpx.DecodingError("x"), True),
        (ConnectionResetError("x"), True),
    ],
)
def test_an_injected_clients_errors_are_failures(error: Exception, reached: bool) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise error

    failure = injected(handle).exchange(attempt())

    assert isinstance(failure, Failure)
    assert failure.reached is reached
    assert type(error).__name__ in str(failure.error)


def test_what_is_no_error_of_the_network_goes_through() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("a bug of the user's")

    with pytest.raises(ZeroDivisionError):
        injected(handle).exchange(attempt())


def test_a_successor_of_httpx_is_known_by_its_names() -> None:
    class TransportError(Exception): ...

    class RequestError(Exception): ...

    class ConnectError(RequestError): ...

    class Client:
        def request(self, *_: object, **__: object) -> object:
            raise ConnectError("x")

    settings = Settings("http://volcano.test", service_key="sk-wire")
    wire = Injected(Client(), settings, TimerThread(SystemClock(), lambda: False))
    failure = wire.exchange(attempt())

    assert isinstance(failure, Failure)
    assert not failure.reached


# --- streams of events

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
STREAM = HEAD + b"Transfer-Encoding: chunked\r\n\r\n7\r\n: hello\r\n"
END = b"0\r\n\r\n"


def watching(timeout: float = PATIENCE) -> Try:
    request = operations.watch(["k"], [], last_id="", request_id=TOKEN, service_key="sk-wire")
    return Try(request, timeout)


def soon(seconds: float = PATIENCE) -> float:
    return SystemClock().now() + seconds


def opened(wire: Lanes | Injected) -> EventStream:
    stream = wire.stream(watching())
    assert not isinstance(stream, Answer | Failure)
    return stream


def until_closed(connection: socket.socket) -> None:
    connection.recv(1)


def test_a_stream_is_read_as_it_comes(serve: Callable[..., RawServer]) -> None:
    server = serve(answers(STREAM, then=lambda connection: connection.sendall(END)), answers(OK))
    wire = lanes(server.url)

    stream = opened(wire)

    assert stream.read(soon()) == b": hello"
    assert stream.read(soon()) == b""
    stream.close()
    assert isinstance(wire.exchange(attempt()), Answer)
    assert server.connections == 2
    wire.close()


def test_a_stream_of_which_nothing_comes_is_over(serve: Callable[..., RawServer]) -> None:
    wire = lanes(serve(answers(STREAM, then=until_closed)).url)
    stream = opened(wire)
    stream.read(soon())

    started = time.monotonic()
    assert stream.read(soon(0.1)) == b""

    assert time.monotonic() - started < 5
    stream.close()


@pytest.mark.parametrize("is_injected", [False, True])
def test_a_stream_is_shut_from_another_thread(
    serve: Callable[..., RawServer], is_injected: bool
) -> None:
    url = serve(answers(STREAM, then=until_closed)).url
    with httpx.Client(trust_env=False) as client:
        settings = Settings(url, service_key="sk-wire")
        wire = Injected(client, settings, real_timers()) if is_injected else lanes(url)
        stream = opened(wire)
        stream.read(soon())
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(stream.read(soon())))
        reader.start()
        time.sleep(0.05)  # mostly it is in its read by then; it must end in any case

        stream.shut()
        reader.join(5)

        assert read == [b""]
        stream.close()


def test_a_stream_whose_try_is_abandoned_is_not_opened(serve: Callable[..., RawServer]) -> None:
    server = serve(hangs)
    wire, hung = lanes(server.url), watching()
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.append(wire.stream(hung)))
    thread.start()
    while not server.connections:
        time.sleep(0.01)

    while thread.is_alive():
        wire.abandon(hung)
        thread.join(0.01)

    assert isinstance(outcomes[0], Failure)


def test_what_is_no_stream_is_an_answer(serve: Callable[..., RawServer]) -> None:
    refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
    wire = lanes(serve(answers(refusal)).url)

    answer = wire.stream(watching())

    assert isinstance(answer, Answer)
    assert (answer.status, answer.body) == (404, b"{}")


def test_no_stream_is_opened_by_a_closed_transport() -> None:
    wire = lanes("http://127.0.0.1:1")
    wire.close()

    failure = wire.stream(watching())

    assert isinstance(failure, Failure)
    assert not failure.reached


def test_closing_ends_an_open_stream(serve: Callable[..., RawServer]) -> None:
    wire = lanes(serve(answers(STREAM, then=until_closed)).url)
    stream = opened(wire)
    stream.read(soon())

    wire.close()

    assert stream.read(soon()) == b""
    stream.close()


def streaming(*parts: bytes, status: int = 200) -> Injected:
    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from parts
            raise httpx.ReadError("reset")

    kind = "text/event-stream" if status == 200 else "application/json"

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"]["read"] == 40.0
        return httpx.Response(status, headers={"Content-Type": kind}, stream=Body())

    return injected(handle)


def test_a_stream_of_an_injected_client_is_read_as_it_comes() -> None:
    stream = opened(streaming(b": hello\n", b"", b"data: {}\n"))

    assert stream.read(soon()) == b": hello\n"
    assert stream.read(soon()) == b"data: {}\n"
    assert stream.read(soon()) == b""
    stream.close()


def test_an_injected_stream_that_was_shut_is_over_though_nothing_can_wake_it() -> None:
    stream = opened(streaming(b": hello\n"))

    stream.shut()

    assert stream.read(soon()) == b""
    stream.close()


def test_what_is_no_stream_of_an_injected_client_is_an_answer() -> None:
    answer = injected(lambda _: httpx.Response(404, content=b"{}")).stream(watching())

    assert isinstance(answer, Answer)
    assert (answer.status, answer.body) == (404, b"{}")


def test_an_injected_stream_that_cannot_be_opened_is_a_failure() -> None:
    wire = streaming(status=503)

    assert isinstance(wire.stream(watching()), Failure)
    wire.abandon(watching())
