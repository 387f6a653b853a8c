"""HTTP for the async flavour: the only file of it that touches the network.

    exchange ──> lane ── one connection, one exchange at a time ──> server
      │            └── interrupted, timed out, failed: thrown away, its socket closed
      └── otherwise back to the idle ones, the last used on top

A request that is cancelled on a shared pool can leave the pool dead (httpx 0.28), so nothing is
shared: each lane is an httpx transport of its own.  Nothing is sent twice and no redirect followed.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import anyio
import httpcore
from anyio.abc import TaskGroup

from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_lane import Lane
from volcano_sdk.endpoint import IDLE_LANES, TIME_IS_OVER, Endpoint, failure, lower
from volcano_sdk.operations import EXIT_TRY_SECONDS, Answer, Failure, Outcome, Try, is_stream
from volcano_sdk.settings import Settings
from volcano_sdk.subscription import SILENCE

_Result = TypeVar("_Result")

_NEVER_CONNECTED = {"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"}


class AsyncEventStream(Protocol):
    """An answer whose body goes on.  One task reads it, and must close it."""

    async def read(self, until: float) -> bytes:
        """What has come; nothing when the stream is over, or nothing came until then."""

    async def aclose(self) -> None: ...


class AsyncTransport(Protocol):
    """How one try is carried out."""

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        """Send it now (`sent_at`) and wait for the answer, for `attempt.timeout` at most."""

    async def stream(self, attempt: Try, *, sent_at: float) -> AsyncEventStream | Outcome:
        """Send it now and wait for the answer's headers, for `attempt.timeout`; then it goes on."""

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
        self._idle: list[Lane] = []
        self._streaming: dict[Lane, None] = {}  # a set that remembers the order
        self._is_closed = False

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        lane = self._take()
        is_good = False

        async def send() -> Answer:
            nonlocal is_good
            answer = await lane.answer(await lane.open(attempt), sent_at)
            is_good = True
            return answer

        try:
            return await self._tried(attempt, sent_at, lane, send)
        finally:
            if is_good and not self._is_closed and len(self._idle) < IDLE_LANES:
                self._idle.append(lane)
            else:
                await lane.close()

    async def stream(self, attempt: Try, *, sent_at: float) -> AsyncEventStream | Outcome:
        lane = self._take()
        opened: LaneStream | None = None

        async def open_stream() -> AsyncEventStream | Answer:
            nonlocal opened
            response = await lane.open(attempt)
            if not is_stream(response.status, lower(response.headers)):
                return await lane.answer(response, sent_at)
            opened = LaneStream(lane, response, self._clock, self._streaming)
            return opened

        try:
            return await self._tried(attempt, sent_at, lane, open_stream)
        finally:
            if opened is None:
                await lane.close()

    async def _tried(
        self, attempt: Try, sent_at: float, lane: Lane, work: Callable[[], Awaitable[_Result]]
    ) -> _Result | Failure:
        try:
            with self._clock.move_on_at(sent_at + attempt.timeout):
                return await work()
            return self._failure(attempt, sent_at, TIME_IS_OVER, reached=lane.reached)
        except httpcore.ProxyError as error:
            return self._failure(attempt, sent_at, f"the proxy refused: {error}", reached=False)
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            return self._failure(attempt, sent_at, str(error), reached=lane.reached)

    def _take(self) -> Lane:
        return self._idle.pop() if self._idle else Lane(self._endpoint)

    def start(self, tasks: TaskGroup) -> None:
        """Nothing of a lane outlives its exchange."""

    async def aclose(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()
        for lane in list(self._streaming):
            await lane.close()

    def _failure(self, attempt: Try, sent_at: float, what: str, *, reached: bool) -> Failure:
        return failure(self._settings, attempt, sent_at, what, reached=reached)


class LaneStream:
    """A stream of events; its lane is not used again."""

    def __init__(
        self,
        lane: Lane,
        response: httpcore.Response,
        clock: AsyncClock,
        streaming: dict[Lane, None],
    ) -> None:
        self._lane = lane
        self._parts = response.aiter_stream()
        self._clock = clock
        self._streaming = streaming
        streaming[lane] = None

    async def read(self, until: float) -> bytes:
        try:
            with self._clock.move_on_at(until):
                return await _next(self._parts)
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
            pass
        return b""

    async def aclose(self) -> None:
        await _unwind(self._parts)
        await self._lane.close()
        self._streaming.pop(self._lane, None)


async def _next(parts: AsyncIterator[bytes]) -> bytes:
    """The next part that is not empty; nothing at the end."""
    while not (part := await anext(parts, None)):
        if part is None:
            return b""
    return part


async def _unwind(parts: AsyncIterator[bytes]) -> None:
    """End a body in its middle: generators within generators, which nobody but a cancellation ends
    from the inside out.
    """
    with anyio.CancelScope(shield=True) as ending:
        ending.cancel()
        try:
            while await anext(parts, None) is not None:
                pass
        except Exception:  # noqa: BLE001, S110  of a library that we do not know: it is over
            pass


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

    async def stream(self, attempt: Try, *, sent_at: float) -> AsyncEventStream | Outcome:
        outcome: AsyncEventStream | Outcome
        outcome = failure(self._settings, attempt, sent_at, TIME_IS_OVER, reached=True)
        ended = anyio.Event()
        is_awaited = True

        async def open_stream() -> None:
            nonlocal outcome
            try:
                with anyio.CancelScope() as self._running[ended]:
                    outcome = await self._open(attempt, sent_at)
                if isinstance(outcome, InjectedStream) and not is_awaited:
                    await outcome.aclose()
            finally:
                del self._running[ended]
                ended.set()

        try:
            with self._clock.move_on_at(sent_at + attempt.timeout):
                if self._tasks is None:
                    await open_stream()
                else:
                    self._tasks.start_soon(open_stream)
                    await ended.wait()
        except BaseException:
            is_awaited = False
            if isinstance(outcome, InjectedStream):  # it came together with a cancellation
                await outcome.aclose()
            raise
        is_awaited = ended.is_set()
        return outcome

    async def aclose(self) -> None:
        """The pool stays open: it is the caller's.  What is still running may end, but soon."""
        with self._clock.move_on_at(self._clock.now() + EXIT_TRY_SECONDS):
            for ended in list(self._running):
                await ended.wait()
        for running in self._running.values():
            running.cancel()

    async def _send(self, attempt: Try, sent_at: float) -> Outcome:
        try:
            response = await self._client.request(
                **self._options(attempt), content=attempt.request.body, timeout=attempt.timeout
            )
        except Exception as error:  # noqa: BLE001  of a library that we do not know
            return self._failure(error, attempt, sent_at)
        return _answer(response, response.content, sent_at)

    async def _open(self, attempt: Try, sent_at: float) -> AsyncEventStream | Outcome:
        try:
            opening = self._client.stream(**self._options(attempt), timeout=SILENCE)
            response = await opening.__aenter__()
            if is_stream(response.status_code, response.headers):
                return InjectedStream(opening, response, self._clock)
            try:
                return _answer(response, await response.aread(), sent_at)
            finally:
                await opening.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001  as above
            return self._failure(error, attempt, sent_at)

    def _options(self, attempt: Try) -> dict[str, Any]:
        return {
            "method": attempt.request.method,
            "url": self._settings.api_url + attempt.request.path,
            "headers": dict(attempt.request.headers),
            "follow_redirects": False,
            "auth": None,
        }

    def _failure(self, error: Exception, attempt: Try, sent_at: float) -> Failure:
        names = {ancestor.__name__ for ancestor in type(error).__mro__}
        reached = not names & _NEVER_CONNECTED
        what = f"{type(error).__name__}: {error}"
        return failure(self._settings, attempt, sent_at, what, reached=reached)


class InjectedStream:
    """A stream of events over the caller's own client."""

    def __init__(self, opened: Any, response: Any, clock: AsyncClock) -> None:
        self._opened = opened
        self._parts = response.aiter_bytes()
        self._clock = clock

    async def read(self, until: float) -> bytes:
        try:
            with self._clock.move_on_at(until):
                return await _next(self._parts)
        except Exception:  # noqa: BLE001, S110  of a library that we do not know: the stream is lost
            pass
        return b""

    async def aclose(self) -> None:
        await _unwind(self._parts)
        with anyio.CancelScope(shield=True):
            await self._opened.__aexit__(None, None, None)


def _answer(response: Any, body: bytes, sent_at: float) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(sent_at, response.status_code, headers, body)
