"""The app on a port: uvicorn with uvloop and httptools, and what it leaves open.

    bind()        the port first, before a file is touched
    JsonServer    says when it accepts requests; a second signal stops it at once
    JsonProtocol  what is no HTTP gets a JSON 400; what stalls inside a request's head is closed
    _Exchange     a lock request that came whole, answered without ASGI in between
    _AtOnce       for all others: a whole answer is one packet

A kept connection lives for 75 s: longer than the idle limit of any client, which otherwise sends
its renewal into a connection that is being closed.
"""

import errno
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from volcano_server.settings import SettingError
from volcano_server.wire import Reply

KEEP_ALIVE = 75
GRACEFUL = 12
"""Seconds for what was accepted: a body's patience, the queue's, and some."""
_LARGEST_HEAD = 64 * 1024
_MOST_FILES = 64 * 1024
_BODY_HEADERS = frozenset((b"content-length", b"transfer-encoding"))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.  `port` 0: whichever is free."""
    if not 0 <= port <= 65_535:
        raise SettingError(f"--port: got {port}; send 0 (any free port) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise SettingError(
            f"--host: {host!r} is no address of this machine", 68
        ) from None  # NOHOST
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    return listener


def _bind_error(host: str, port: int, error: OSError) -> SettingError:
    match error.errno:
        case errno.EADDRINUSE:
            return SettingError(
                f"port {port} on {host} is in use; stop what uses it or choose another with --port "
                "(0 takes any free one)",
                69,  # EX_UNAVAILABLE
            )
        case errno.EACCES:
            return SettingError(
                f"port {port} needs more rights than this user has; choose another with --port",
                77,  # EX_NOPERM
            )
        case _:
            return SettingError(f"cannot listen on {host} port {port}: {error.strerror}", 68)


def allow_many_connections() -> None:
    """As many as the system lets us: one project's event streams reach the usual limit of 1 024."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WholeRequests(Protocol):
    """What an app has as `whole_requests` that can do without ASGI for its hot path."""

    def find_whole(self, method: bytes, url: bytes) -> Any | None:
        """What a request is aimed at, if it is one that `answer_whole` answers."""

    def answer_whole(
        self, target: Any, headers: dict[bytes, bytes], body: bytes, tell: Callable[[Reply], None]
    ) -> None:
        """Tells the answer, now or later."""


class JsonProtocol(HttpToolsProtocol):
    """Adds to uvicorn's protocol: JSON for what is no HTTP, and limits on a request's head.

    A request that the app can answer directly is kept back until its packet is read.  If all of it
    is there by then, it becomes an `_Exchange`: half of the cost of ASGI's way, which all others
    go.
    """

    _head_size = 0
    _idle_since: float
    _kept_back: Any | None = None  # the target of a request whose head came, but not its end
    _kept_headers: dict[bytes, bytes]
    _kept_body: bytes

    def __init__(self, config: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._app: WholeRequests | None = getattr(config.app, "whole_requests", None)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self.timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    def data_received(self, data: bytes) -> None:
        before: RequestResponseCycle | None = self.cycle  # None until the first request
        in_body = self._in_body()
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._kept_back is not None:
            self._go_the_way_of_asgi()
        cycle: RequestResponseCycle | None = self.cycle
        # Between two requests, or inside the head of one: uvicorn itself would wait for ever.
        # What began or ended inside the body of a request that is answered already is no head.
        no_head = cycle is not before or in_body or self._in_body()
        self._head_size = 0 if no_head else self._head_size + len(data)
        if self._head_size <= _LARGEST_HEAD:
            self._idle_since = self.loop.time()
        elif cycle is not None and not cycle.response_complete:
            self.flow.pause_reading()  # until the answer is out, which a stream may never be
        else:
            self.send_400_response(f"The head of the request is over {_LARGEST_HEAD} bytes.")

    def _in_body(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and cycle.more_body

    def on_message_begin(self) -> None:
        # uvicorn makes the scope here already.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        if b"#" in self.url or self.url.endswith(b"?"):
            # The app would not see what is dropped here, and `a#b` and `a?` would lock `a`.
            raise ValueError
        parser = self.parser
        if parser.should_upgrade():
            if any(name in _BODY_HEADERS for name, _ in self.headers):
                raise ValueError  # the parser takes the body for another protocol's
        elif self._app is not None and self._is_free() and self._is_plain():
            self._kept_back = self._app.find_whole(parser.get_method(), self.url)
            if self._kept_back is not None:
                self._kept_body = b""
                return
        self._go_the_way_of_asgi()

    def _is_free(self) -> bool:
        """Whether nothing that came before still waits for its answer or to be written."""
        cycle: RequestResponseCycle | None = self.cycle
        return (cycle is None or cycle.response_complete) and not self.flow.write_paused

    def _is_plain(self) -> bool:
        """Whether the head asks for nothing but the answer."""
        self._kept_headers = headers = dict(self.headers)
        return (
            len(headers) == len(self.headers)
            and b"expect" not in headers
            and b"transfer-encoding" not in headers
            and self.parser.should_keep_alive()
            and self.parser.get_http_version() == "1.1"
        )

    def _go_the_way_of_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the scope has this list
        super().on_headers_complete()
        if self._kept_back is not None:
            self._kept_back = None
            if self._kept_body:
                super().on_body(self._kept_body)

    def on_body(self, body: bytes) -> None:
        if self._kept_back is None:
            super().on_body(body)
        else:
            self._kept_body += body

    def on_message_complete(self) -> None:
        target = self._kept_back
        if target is None:
            super().on_message_complete()
            self.cycle.more_body = False  # uvicorn leaves it when the answer came before
        else:
            assert self._app is not None
            self._kept_back = None
            self.cycle = exchange = _Exchange(self)  # type: ignore[assignment]
            try:
                self._app.answer_whole(target, self._kept_headers, self._kept_body, exchange.answer)
            except Exception:
                self.logger.exception("Exception in the app")
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None:
            if self.pipeline or not (cycle.response_complete or cycle.more_body):
                # Whole requests still wait for their answers: the first would get this one.
                cycle.keep_alive = False
                return
            if cycle.response_started and cycle.more_body:
                self.transport.close()  # what came belongs to a request that has its answer
                return
        if msg == "Invalid HTTP request received.":
            msg = (
                "request: what came is not a valid HTTP/1.1 request; percent-encode the key in the "
                "request's target, and send no Upgrade with a body."
            )
        body = json.dumps({"error": msg, "code": "invalid_request"}).encode()
        self.transport.write(
            STATUS_LINE[400]
            + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
            + body
        )
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, _AtOnce(app, cycle))  # type: ignore[arg-type]

    # uvicorn sets a timer after each answer and cancels it with the next request. Here one timer
    # lives as long as its connection, and looks, when it fires, how long that has been idle.

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def _unset_keepalive_if_required(self) -> None:
        pass

    def timeout_keep_alive_handler(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        now = self.loop.time()
        if cycle is not None and not cycle.response_complete:
            self._idle_since = now
        left = self._idle_since + self.timeout_keep_alive - now
        if left <= 0:
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                left, self.timeout_keep_alive_handler
            )


class _NoBody:
    """Stands for the event of a cycle whose body nobody waits for."""

    def set(self) -> None: ...


class _Exchange:
    """A request that came whole, and its answer; where uvicorn expects its cycle."""

    __slots__ = ("_protocol", "disconnected", "keep_alive", "response_complete")

    more_body = False
    response_started = False
    message_event = _NoBody()

    def __init__(self, protocol: JsonProtocol) -> None:
        self._protocol = protocol
        self.disconnected = False
        self.keep_alive = True
        self.response_complete = False

    def answer(self, reply: Reply) -> None:
        self.response_complete = True
        transport = self._protocol.transport
        if transport.is_closing():  # uvicorn tells a lost connection to its latest cycle alone
            return
        status, headers, body = reply
        answer = [STATUS_LINE[status]]
        for name, value in headers:
            answer += (name, b": ", value, b"\r\n")
        answer.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        answer.append(body)
        transport.write(b"".join(answer))
        if not self.keep_alive:
            transport.close()
        self._protocol.on_response_complete()


class _AtOnce:
    """The app for one request: a whole answer leaves in one write.

    uvicorn writes the head and the body apart: another system call, and another packet that wakes
    the client.  What is no plain answer goes its way.
    """

    __slots__ = ("_app", "_cycle", "_head", "_length", "_start")

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._start: Message | None = None  # kept back until its body comes
        self._head = [b""]
        self._length = 0

    async def __call__(self, scope: Scope, receive: Receive, _: Send) -> None:
        await self._app(scope, receive, self._send)
        cycle = self._cycle
        if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
            # It broke off: whoever has not read what is in the buffer will not be waited for.
            cycle.disconnected = True
            cycle.transport.abort()

    async def _send(self, message: Message) -> None:
        start, self._start = self._start, None
        cycle = self._cycle
        if start is None:
            if message["type"] == "http.response.start" and self._is_plain(message):
                self._start = message
            else:
                await cycle.send(message)  # type: ignore[arg-type]  # Starlette's is looser
            return
        body = message.get("body", b"")
        if message.get("more_body") or len(body) != self._length or cycle.flow.write_paused:
            await cycle.send(start)  # type: ignore[arg-type]
            await cycle.send(message)  # type: ignore[arg-type]
        elif not cycle.disconnected:
            self._head.append(body)
            cycle.transport.write(b"".join(self._head))
            cycle.response_started = cycle.response_complete = True
            cycle.message_event.set()
            cycle.on_response()

    def _is_plain(self, start: Message) -> bool:
        """Whether the head says how long the body is, and nothing that uvicorn has to know."""
        status = start["status"]
        head = [STATUS_LINE[status]]
        length = 0 if status == 204 else None
        for name, value in start["headers"]:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                return False
            head += (name, b": ", value, b"\r\n")
        cycle = self._cycle
        if length is None or not cycle.keep_alive or cycle.scope["method"] == "HEAD":
            return False
        head.append(b"\r\n")
        self._head, self._length = head, length
        return True


class JsonServer(uvicorn.Server):
    """`on_ready` is called once requests are accepted."""

    def __init__(self, app: ASGIApp, *, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=JsonProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                log_level=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACEFUL,
                backlog=2048,
            )
        )
        self._on_ready = on_ready
        self._state = getattr(app, "state", None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop = getattr(self._state, "on_stop", None)
        if stop is not None:
            stop()  # what would go on for ever ends now
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A first SIGTERM or SIGINT lets accepted requests finish, a second one does not."""
        # uvicorn would raise the signal again after the stop: a stop that was asked for is exit 0.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
