"""HTTP for the async flavour: the only file of it that touches the network.

    exchange ──> lane ── one connection, one exchange at a time ──> server
      │            └── interrupted, timed out, failed: thrown away, its socket closed
      └── otherwise back to the idle ones, the last used on top

A request that is cancelled on a shared pool can leave the pool dead (httpx 0.28), so nothing is
shared: each lane is an httpx transport of its own.  Nothing is sent twice and no redirect followed.
"""

import ssl
from collections.abc import Iterable
from typing import Any, Protocol

import anyio
import httpcore
from anyio.abc import TaskGroup

from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.endpoint import (
    IDLE_LANES,
    LARGEST_ANSWER,
    TIME_IS_OVER,
    Endpoint,
    failure,
    lower,
)
from volcano_sdk.operations import EXIT_TRY_SECONDS, Answer, Failure, Outcome, Try
from volcano_sdk.settings import Settings

_NEVER_CONNECTED = {"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"}


class AsyncTransport(Protocol):
    """How one try is carried out."""

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        """Send it now (`sent_at`) and wait for the answer, for `attempt.timeout` at most."""

    def start(self, tasks: TaskGroup) -> None:
        """The client was entered: what outlives a call may run in this group, until `aclose`."""

    async def aclose(self) -> None:
        """Close what is idle."""


class Lanes:
    """The connections to one server, as many as there are exchanges at a time."""

    def __init__(self, settings: Settings, clock: AsyncClock) -> None:
        self._settings = settings
        self._clock = clock
        self._endpoint = Endpoint(settings)
        self._idle: list[_Lane] = []
        self._is_closed = False

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        lane = self._idle.pop() if self._idle else _Lane(self._endpoint)
        is_good = False
        try:
            with self._clock.move_on_at(sent_at + attempt.timeout):
                answer = await lane.send(attempt, sent_at)
                is_good = True
                return answer
            return self._failure(attempt, sent_at, TIME_IS_OVER, reached=lane.reached)
        except httpcore.ProxyError as error:
            return self._failure(attempt, sent_at, f"the proxy refused: {error}", reached=False)
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            return self._failure(attempt, sent_at, str(error), reached=lane.reached)
        finally:
            if is_good and not self._is_closed and len(self._idle) < IDLE_LANES:
                self._idle.append(lane)
            else:
                await lane.close()

    def start(self, tasks: TaskGroup) -> None:
        """Nothing of a lane outlives its exchange."""

    async def aclose(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()

    def _failure(self, attempt: Try, sent_at: float, what: str, *, reached: bool) -> Failure:
        return failure(self._settings, attempt, sent_at, what, reached=reached)


class _Lane(httpcore.AsyncNetworkBackend):
    """One connection, kept open between exchanges; a stale one is replaced before anything is sent.

    It is the pool's network too, since a pool that is cancelled in the middle of a TLS handshake
    forgets the socket.  `reached`: bytes of the present exchange may have gone out.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._pool = httpcore.AsyncConnectionPool(network_backend=self, **endpoint.pool_options())
        self._network = httpcore.AnyIOBackend()
        self._stream: httpcore.AsyncNetworkStream | None = None
        self.reached = False

    async def send(self, attempt: Try, sent_at: float) -> Answer:
        """Raises httpcore's errors."""
        self.reached = False
        request = attempt.request
        response = await self._pool.handle_async_request(
            httpcore.Request(
                request.method,
                self._endpoint.url(request),
                headers=self._endpoint.headers(request),
                content=request.body,
            )
        )
        body = b""
        with anyio.CancelScope() as reading:  # leaving the loop early would strand its generators
            async for part in response.aiter_stream():
                body += part
                if len(body) > LARGEST_ANSWER:
                    reading.cancel()
        if reading.cancel_called:
            raise httpcore.RemoteProtocolError("the answer is over 1 MiB")
        await response.aclose()
        return Answer(sent_at, response.status, lower(response.headers), body)

    async def close(self) -> None:
        """Close the socket, whatever state the pool is in and whoever is being cancelled."""
        with anyio.CancelScope(shield=True):
            await self._pool.aclose()
            if self._stream is not None:
                await self._stream.aclose()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the seam's own
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """What the pool asks for; never while it has another connection."""
        self._stream = await self._network.connect_tcp(
            host, port, timeout, local_address, socket_options
        )
        return _Stream(self, self._stream)


class _Stream(httpcore.AsyncNetworkStream):
    """The lane's connection, which tells the lane when bytes of a request go out."""

    def __init__(self, lane: _Lane, stream: httpcore.AsyncNetworkStream) -> None:
        self._lane = lane
        self._stream = stream
        self.read = stream.read  # type: ignore[method-assign]
        self.aclose = stream.aclose  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._lane.reached = True
        await self._stream.write(buffer, timeout)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        secure = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _Stream(self._lane, secure)


class InjectedTransport:
    """The caller's own client (httpx.AsyncClient or one of its kind), used as it is.

    Its pool is shared, so a request is never cancelled while it may still end by itself: it goes on
    in the client's task group.
    """

    def __init__(self, client: Any, settings: Settings, clock: AsyncClock) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._tasks: TaskGroup | None = None
        self._running: dict[anyio.Event, anyio.CancelScope] = {}  # {its end: how to cut it off}

    def start(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        outcome: Outcome = failure(self._settings, attempt, sent_at, TIME_IS_OVER, reached=True)
        ended = anyio.Event()

        async def send() -> None:
            nonlocal outcome
            try:
                with anyio.CancelScope() as self._running[ended]:
                    outcome = await self._send(attempt, sent_at)
            finally:
                del self._running[ended]
                ended.set()

        with self._clock.move_on_at(sent_at + attempt.timeout):
            if self._tasks is None:
                await send()
            else:
                self._tasks.start_soon(send)
                await ended.wait()
        return outcome

    async def aclose(self) -> None:
        """The pool stays open: it is the caller's.  What is still running may end, but soon."""
        with self._clock.move_on_at(self._clock.now() + EXIT_TRY_SECONDS):
            for ended in list(self._running):
                await ended.wait()
        for running in self._running.values():
            running.cancel()

    async def _send(self, attempt: Try, sent_at: float) -> Outcome:
        request = attempt.request
        try:
            response = await self._client.request(
                request.method,
                self._settings.api_url + request.path,
                headers=dict(request.headers),
                content=request.body,
                timeout=attempt.timeout,
                follow_redirects=False,
                auth=None,
            )
        except Exception as error:  # noqa: BLE001  of a library that we do not know
            names = {ancestor.__name__ for ancestor in type(error).__mro__}
            reached = not names & _NEVER_CONNECTED
            what = f"{type(error).__name__}: {error}"
            return failure(self._settings, attempt, sent_at, what, reached=reached)
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(sent_at, response.status_code, headers, response.content)
