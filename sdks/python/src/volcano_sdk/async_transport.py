"""HTTP for the async flavour: the only file of it that touches the network.

    exchange ──> lane ── one connection, one exchange at a time ──> server
      │            └── interrupted, timed out, failed: thrown away, its socket closed
      └── otherwise back to the idle ones, the last used on top

A request that is cancelled on a shared pool can leave the pool dead (httpx 0.28), so nothing is
shared: each lane is an httpx transport of its own.  Nothing is sent twice and no redirect followed.
"""

import ssl
from collections.abc import Mapping
from typing import Any, Protocol

import anyio
import httpx
from anyio.abc import TaskGroup

from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.errors import TransportError
from volcano_sdk.operations import EXIT_TRY_SECONDS, Answer, Failure, Outcome, Request, Try
from volcano_sdk.settings import Settings

_IDLE_LANES = 32
_KEEP_ALIVE = 60.0
"""Seconds; shorter than what servers grant, so that we close a connection before they do."""
_LIMITS = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEP_ALIVE)
_NEVER_CONNECTED = {
    "ConnectError",
    "ConnectTimeout",
    "PoolTimeout",
    "ProxyError",
    "UnsupportedProtocol",
}
_LARGEST_ANSWER = 1 << 20
_HEADERS = {"Accept": "application/json", "User-Agent": "volcano-sdk-python"}
_TIME_IS_OVER = "the time for an answer was over"
_FIRST_BYTES = "http11.send_request_headers.started"


class AsyncTransport(Protocol):
    """How one try is carried out."""

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        """Send it now (`sent_at`) and wait for the answer, for `attempt.timeout` at most."""

    def start(self, tasks: TaskGroup) -> None:
        """The client was entered: what outlives a call may run in this group, until `aclose`."""

    async def aclose(self) -> None:
        """Close what is idle."""


class Lanes:
    """The connections to one server; the requests in flight are as many as its users send."""

    def __init__(self, settings: Settings, clock: AsyncClock) -> None:
        self._settings = settings
        self._clock = clock
        self._has_tls = any(
            url is not None and url.startswith("https:")
            for url in (settings.api_url, settings.proxy)
        )
        self._ssl_context: ssl.SSLContext | None = None
        self._idle: list[_Lane] = []

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        lane = self._idle.pop() if self._idle else self._open()
        done = False
        try:
            with self._clock.move_on_at(sent_at + attempt.timeout):
                status, headers, body = await lane.send(self._url(attempt), attempt.request)
                done = True
                return Answer(sent_at, status, headers, body)
            return _failure(self._settings, attempt, sent_at, _TIME_IS_OVER, reached=lane.reached)
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            return _failure(self._settings, attempt, sent_at, _named(error), reached=lane.reached)
        finally:
            if done and len(self._idle) < _IDLE_LANES:
                self._idle.append(lane)
            else:
                await lane.close()

    def start(self, tasks: TaskGroup) -> None:
        """Nothing of a lane outlives its exchange."""

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    def _url(self, attempt: Try) -> str:
        return self._settings.api_url + attempt.request.path

    def _open(self) -> "_Lane":
        if self._has_tls and self._ssl_context is None:
            self._ssl_context = httpx.create_ssl_context()
        return _Lane(self._ssl_context, self._settings.proxy)


class _Lane:
    """One connection, kept open between exchanges; a stale one is replaced before anything is sent.

    `reached`: bytes of the present exchange may have gone out.
    """

    def __init__(self, ssl_context: ssl.SSLContext | None, proxy: str | None) -> None:
        self._http = httpx.AsyncHTTPTransport(
            verify=False if ssl_context is None else ssl_context,
            trust_env=False,
            limits=_LIMITS,
            proxy=proxy,
        )
        self._extensions = {"trace": self._trace}
        self.reached = False

    async def send(self, url: str, request: Request) -> tuple[int, Mapping[str, str], bytes]:
        self.reached = False
        response = await self._http.handle_async_request(
            httpx.Request(
                request.method,
                url,
                headers={**_HEADERS, **request.headers},
                content=request.body,
                extensions=self._extensions,
            )
        )
        body = b""
        async for part in response.aiter_raw():
            body += part
            if len(body) > _LARGEST_ANSWER:
                raise httpx.RemoteProtocolError("the answer is over 1 MiB")
        return response.status_code, _lower(response.headers), body

    async def close(self) -> None:
        """Close the socket, whatever state the connection is in and whoever is being cancelled."""
        with anyio.CancelScope(shield=True):
            await self._http.aclose()

    async def _trace(self, event: str, _info: Mapping[str, Any]) -> None:
        if event == _FIRST_BYTES:
            self.reached = True


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
        outcome: Outcome = _failure(self._settings, attempt, sent_at, _TIME_IS_OVER, reached=True)
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
            return Answer(sent_at, response.status_code, _lower(response.headers), response.content)
        except Exception as error:  # noqa: BLE001  its errors are of a library we do not know
            reached = type(error).__name__ not in _NEVER_CONNECTED
            return _failure(self._settings, attempt, sent_at, _named(error), reached=reached)


def _failure(
    settings: Settings, attempt: Try, sent_at: float, what: str, *, reached: bool
) -> Failure:
    through = ""
    if settings.proxy_name is not None:
        through = (
            f" through the proxy {settings.proxy_name}, which the environment names"
            " (trust_env=False ignores it)"
        )
    verb = "got no answer from" if reached else "could not reach"
    error = TransportError(
        f"{attempt.request.operation} {verb} {settings.api_url}{through}: {what}",
        request_id=attempt.request.request_id,
    )
    return Failure(sent_at, error, reached)


def _lower(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
