"""One connection of the sync flavour to the server, as one exchange after the other uses it.

    Lane ── httpcore's pool of one ── Connection ──> socket

Every wait on the socket is bounded by the end of the try, and `shut` ends it from another thread.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import httpcore

from volcano_sdk.endpoint import LARGEST_ANSWER, TIME_IS_OVER, Endpoint, lower
from volcano_sdk.operations import EXIT_TRY_SECONDS, Answer, Request, Try
from volcano_sdk.threads import Timer, Timers


class Shield:
    """Holds back the first interrupt that comes while an answer is awaited.

    The answer then gets EXIT_TRY_SECONDS more; whoever made the shield raises `interrupt`
    afterwards.  A second interrupt goes through.  `reached`: the server may have acted.
    """

    def __init__(self) -> None:
        self.interrupt: BaseException | None = None
        self.reached = False


class Lane(httpcore.NetworkBackend):
    """One connection, kept open between exchanges; a stale one is replaced before anything is sent.

    `reached`: bytes of the present exchange may have gone out.  `is_good`: it may be used again.
    """

    def __init__(self, endpoint: Endpoint, timers: Timers) -> None:
        self._endpoint = endpoint
        self._timers = timers
        self._pool = httpcore.ConnectionPool(**endpoint.pool_options(), network_backend=self)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._until = 0.0
        self._exchanges = 0
        self._attempt: Try | None = None
        self._is_parents = False
        self.is_shut = False
        self._timer: Timer | None = None
        self._shield: Shield | None = None
        self.reached = False
        self.is_good = False

    def send(self, attempt: Try, sent_at: float, shield: Shield | None) -> Answer:
        """Raises httpcore's errors."""
        try:
            return self.answer(self.open(attempt, sent_at, shield), sent_at)
        finally:
            self.done()

    def open(self, attempt: Try, sent_at: float, shield: Shield | None = None) -> httpcore.Response:
        """Until the answer's headers have come; `done` must follow.  Raises httpcore's errors."""
        self.reached = self.is_good = False
        self._shield = shield
        with self._lock:
            self._exchanges += 1
            self._attempt = attempt
        self.limit(sent_at + attempt.timeout)
        return self._pool.handle_request(self._request(attempt.request))

    def answer(self, response: httpcore.Response, sent_at: float) -> Answer:
        """The whole of it.  Raises httpcore's errors."""
        body = b""
        for part in response.iter_stream():
            body += part
            if len(body) > LARGEST_ANSWER:
                raise httpcore.RemoteProtocolError("the answer is over 1 MiB")
        response.close()
        return Answer(sent_at, response.status, lower(response.headers), body)

    def done(self) -> None:
        """The exchange has ended."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._attempt = None

    def _request(self, request: Request) -> httpcore.Request:
        return httpcore.Request(
            request.method,
            self._endpoint.url(request),
            headers=self._endpoint.headers(request),
            content=request.body,
        )

    def shut(self, exchange: int | None = None) -> None:
        """From any thread: whatever waits on the socket, stops waiting."""
        with self._lock:
            if exchange in (None, self._exchanges):  # else that one has ended
                self._shut()

    def abandon(self, attempt: Try) -> None:
        with self._lock:
            if self._attempt is attempt:
                self._shut()

    def _shut(self) -> None:
        self.is_shut = True
        if self._socket is not None:
            shut_down(self._socket)

    def close(self) -> None:
        if not self._is_parents:
            self._pool.close()
            self.close_socket()

    def drop(self) -> None:
        """Close our copy of the parent's socket: no word to the server, and no lock."""
        self._is_parents = True
        self._lock = threading.Lock()
        if self._socket is not None:
            self._socket.close()

    def limit(self, until: float) -> None:
        """Whatever waits on the socket, waits no longer than until then."""
        if self._timer is not None:
            self._timer.cancel()
        self._until = until
        self._timer = None
        if self._timers.socket_timeout(until) is None:
            self._timer = self._timers.call_at(until, partial(self.shut, self._exchanges))

    # What the pool and the streams ask of a lane.

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002  the lane's own bound counts
        local_address: str | None = None,  # noqa: ARG002  never asked for
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002  never asked for
    ) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(str(error)) from error
        problem = ""
        for family, kind, protocol, _, address in found:
            self.use(socket.socket(family, kind, protocol))
            try:
                connecting = self.bounded()
                connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connecting.connect(address)
                return Connection(self)
            except OSError as error:
                self.raise_if_over(error)
                problem = problem or str(error)
                self.close_socket()
        raise httpcore.ConnectError(problem)

    def use(self, new: socket.socket) -> None:
        with self._lock:
            self._socket = new

    def bounded(self) -> socket.socket:
        """The socket, set to block no longer than the try may."""
        is_over = self._timers.now() >= self._until  # also while bytes keep coming
        if self._socket is None or self.is_shut or is_over:
            raise httpcore.ReadTimeout(self.over())
        self._socket.settimeout(self._timers.socket_timeout(self._until))
        return self._socket

    def raise_if_over(self, error: OSError) -> None:
        """Was it the try's end that ended it, or somebody who is not the network?"""
        if self.is_shut or self._is_late():
            raise httpcore.ReadTimeout(self.over()) from error
        if error.errno is None:
            raise error  # a signal's handler raised it: TimeoutError is an OSError

    def over(self) -> str:
        return TIME_IS_OVER if self._is_late() else "its connection was closed by our side"

    def _is_late(self) -> bool:
        # A socket's own timeout may come a little early.
        return self._timers.now() >= self._until - 0.05

    def is_readable(self) -> bool:
        """An idle connection that can be read has been closed by the server."""
        if self._socket is None:
            return True
        self._socket.settimeout(0)
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)  # beneath TLS
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def holds_back(self, error: BaseException) -> bool:
        """Whether the wait for the answer goes on though `error` came."""
        if self._shield is None or self._shield.interrupt is not None or not self.reached:
            return False
        self._shield.interrupt = error
        self.limit(min(self._until, self._timers.now() + EXIT_TRY_SECONDS))
        return True

    def close_socket(self) -> None:
        with self._lock:
            old, self._socket = self._socket, None
        if old is not None:
            old.close()


class Connection(httpcore.NetworkStream):
    """The lane's connection as httpcore wants to see it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        received: list[bytes] = []
        while not received:
            try:
                waiting = self._lane.bounded()
                # In one step: an interrupt between the two would drop what has arrived.
                received.extend(map(waiting.recv, (max_bytes,)))
            except OSError as error:
                self._lane.raise_if_over(error)
                raise httpcore.ReadError(str(error)) from error
            except httpcore.TimeoutException:
                raise
            except BaseException as error:
                if not self._lane.holds_back(error):
                    raise
        if not received[0] and self._lane.is_shut:
            raise httpcore.ReadTimeout(self._lane.over())
        return received[0]

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        left = memoryview(buffer)
        while left:
            self._lane.reached = True
            sent: list[int] = []
            try:
                waiting = self._lane.bounded()
                # In one step: after an interrupt we must know what has gone out.  The server might
                # otherwise decide a request that we gave up after the release which follows it.
                sent.extend(map(waiting.send, (left,)))
            except OSError as error:
                self._lane.raise_if_over(error)
                raise httpcore.WriteError(str(error)) from error
            except httpcore.TimeoutException:
                raise
            except BaseException as error:
                if not (sent and self._lane.holds_back(error)):
                    raise
            left = left[sum(sent) :]

    def close(self) -> None:
        self._lane.close_socket()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        try:
            plain = self._lane.bounded()
            if isinstance(plain, ssl.SSLSocket):
                raise httpcore.ConnectError("https through an https:// proxy is not supported")
            secure = ssl_context.wrap_socket(
                plain, server_hostname=server_hostname, do_handshake_on_connect=False
            )
            self._lane.use(secure)
            self._lane.bounded()
            secure.do_handshake()
        except OSError as error:
            self._lane.close_socket()
            self._lane.raise_if_over(error)
            raise httpcore.ConnectError(str(error)) from error
        return self

    def get_extra_info(self, info: str) -> Any:
        return self._lane.is_readable() if info == "is_readable" else None


def shut_down(connected: socket.socket) -> None:
    """Whatever waits on it, stops waiting."""
    with contextlib.suppress(OSError):  # it is not connected any more
        # Not SSLSocket's own shutdown, which changes what its reader is using.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
