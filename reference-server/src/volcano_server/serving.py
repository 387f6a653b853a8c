"""The app on a port: uvicorn with uvloop and httptools, and what it leaves open.

    bind()        the port first, before a file is touched
    JsonServer    says when it accepts requests; a second signal stops it at once
    JsonProtocol  what is no HTTP gets a JSON 400; what stalls inside a request's head is closed
    _AtOnce       a whole answer is one packet

A kept connection lives for 75 s: longer than the idle limit of any client, which otherwise sends
its renewal into a connection that is being closed.
"""

import errno
import json
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from volcano_server.settings import SettingError

KEEP_ALIVE = 75
GRACEFUL = 12
"""Seconds for what was accepted: a body's patience, the queue's, and some."""
_LARGEST_HEAD = 64 * 1024
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


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class JsonProtocol(HttpToolsProtocol):
    """Adds to uvicorn's protocol: JSON for what is no HTTP, and limits on a request's head."""

    _head_size = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._close_if_idle()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle  # None until the first request
        if cycle is not None and not cycle.response_complete:
            self._head_size = 0
            return
        # Between two requests, or inside the head of one: uvicorn itself would wait for ever.
        in_body = cycle is not None and cycle.more_body  # of a request that is answered already
        self._head_size = 0 if in_body else self._head_size + len(data)
        if self._head_size > _LARGEST_HEAD:
            self.send_400_response(f"The head of the request is over {_LARGEST_HEAD} bytes.")
        else:
            self._close_if_idle()

    def on_headers_complete(self) -> None:
        if b"#" in self.url or self.url.endswith(b"?"):
            # The app would not see what is dropped here, and `a#b` and `a?` would lock `a`.
            raise ValueError
        if self.parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers):
            raise ValueError  # the parser takes the body for another protocol's
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.cycle.more_body = False  # uvicorn leaves it when the answer came before

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

    def _close_if_idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


class _AtOnce:
    """The app for one request: a whole answer leaves in one write.

    uvicorn writes the head and the body apart: another system call, and another packet that wakes
    the client.  What is no plain answer goes its way.
    """

    __slots__ = ("_app", "_cycle", "_start")

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._start: Message | None = None  # kept back until its body comes

    async def __call__(self, scope: Scope, receive: Receive, _: Send) -> None:
        await self._app(scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        start, self._start = self._start, None
        if start is None:
            if message["type"] == "http.response.start" and _length(message) is not None:
                self._start = message
            else:
                await self._cycle.send(message)  # type: ignore[arg-type]  # Starlette's is looser
        elif self._is_plain(start, message):
            self._write(start, message["body"])
        else:
            await self._cycle.send(start)  # type: ignore[arg-type]
            await self._cycle.send(message)  # type: ignore[arg-type]

    def _is_plain(self, start: Message, message: Message) -> bool:
        cycle = self._cycle
        return (
            cycle.keep_alive
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and not message.get("more_body")
            and _length(start) == len(message.get("body", b"-"))
            and cycle.scope["method"] != "HEAD"
            and all(name != b"connection" for name, _ in start["headers"])
        )

    def _write(self, start: Message, body: bytes) -> None:
        head = [name + b": " + value + b"\r\n" for name, value in start["headers"]]
        cycle = self._cycle
        cycle.transport.write(b"".join((STATUS_LINE[start["status"]], *head, b"\r\n", body)))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()


def _length(start: Message) -> int | None:
    """Bytes of the body, where the head says it."""
    if start["status"] == 204:
        return 0
    return next((int(value) for name, value in start["headers"] if name == b"content-length"), None)


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A first SIGTERM or SIGINT lets accepted requests finish, a second one does not."""
        # uvicorn would raise the signal again after the stop: a stop that was asked for is exit 0.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
