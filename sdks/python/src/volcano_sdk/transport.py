"""HTTP for the sync flavour: the only file of it that touches the network.

    exchange ──> lane ── one connection, one exchange at a time ──> server
      │            └── interrupted, timed out, failed: thrown away, its socket closed
      └── answered: back to the idle ones, the last used on top

Nothing is shared between two exchanges, so none can poison another or get its answer.  Nothing is
sent twice and no redirect is followed.  A try is bounded in total: a server that dribbles bytes
does not extend it.
"""

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import httpcore

from volcano_sdk.endpoint import IDLE_LANES, Endpoint, failure, lower
from volcano_sdk.lane import Lane, Shield, shut_down
from volcano_sdk.operations import Answer, Failure, Outcome, Try, is_stream
from volcano_sdk.settings import Settings
from volcano_sdk.subscription import SILENCE
from volcano_sdk.threads import Timers

_Result = TypeVar("_Result")


class EventStream(Protocol):
    """An answer whose body goes on.  One thread reads and closes it."""

    def read(self, until: float) -> bytes:
        """What has come; nothing when the stream is over, or nothing came until then."""

    def shut(self) -> None:
        """From any thread: it is over."""

    def close(self) -> None:
        """The reader is done with it."""


class Transport(Protocol):
    """How one try is carried out."""

    def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
        """Send it and wait for the answer, for `attempt.timeout` in total."""

    def stream(self, attempt: Try) -> EventStream | Outcome:
        """Send it and wait for the answer's headers, for `attempt.timeout`; then it goes on."""

    def abandon(self, attempt: Try) -> None:
        """End its exchange, if it is in flight, as if its time were over."""

    def close(self) -> None:
        """End what is in flight and close what is idle."""

    def forget(self) -> None:
        """In the child of a fork: drop the parent's connections, and start anew."""


class Lanes:
    """The connections to one server, as many as there are exchanges at a time."""

    def __init__(self, settings: Settings, timers: Timers) -> None:
        self._settings = settings
        self._timers = timers
        self._endpoint = Endpoint(settings)
        self._lock = threading.Lock()
        self._idle: list[Lane] = []
        self._busy: set[Lane] = set()
        self._is_closed = False
        weakref.finalize(self, _close_all, self._idle)

    def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
        sent_at = self._timers.now()
        lane = self._take()

        def send() -> Answer:
            answer = lane.send(attempt, sent_at, shield)
            lane.is_good = not lane.is_shut  # its end may come together with the answer
            return answer

        try:
            return self._tried(attempt, sent_at, lane, send)
        finally:
            if shield is not None:
                shield.reached |= lane.reached
            self.give(lane)

    def stream(self, attempt: Try) -> EventStream | Outcome:
        sent_at = self._timers.now()
        lane = self._take()
        opened: LaneStream | None = None

        def open_stream() -> EventStream | Answer:
            nonlocal opened
            response = lane.open(attempt, sent_at)
            if not is_stream(response.status, lower(response.headers)):
                return lane.answer(response, sent_at)
            opened = LaneStream(self, lane, response)
            return opened

        try:
            if self._is_closed:
                return self._failure(attempt, sent_at, "the client is closed", reached=False)
            return self._tried(attempt, sent_at, lane, open_stream)
        finally:
            if opened is None:
                lane.done()
                self.give(lane)

    def _tried(
        self, attempt: Try, sent_at: float, lane: Lane, work: Callable[[], _Result]
    ) -> _Result | Failure:
        try:
            return work()
        except httpcore.ProxyError as error:
            return self._failure(attempt, sent_at, f"the proxy refused: {error}", reached=False)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            return self._failure(attempt, sent_at, str(error), reached=lane.reached)

    def abandon(self, attempt: Try) -> None:
        with self._lock:
            busy = list(self._busy)
        for lane in busy:
            lane.abandon(attempt)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            busy = list(self._busy)
        for lane in busy:
            lane.shut()
        _close_all(self._idle)

    def forget(self) -> None:
        # Another thread may have held any lock when the process was forked: none is touched.
        for lane in [*self._idle, *self._busy]:
            lane.drop()
        self._idle.clear()
        self._busy.clear()
        self._lock = threading.Lock()

    def _take(self) -> Lane:
        with self._lock:
            lane = self._idle.pop() if self._idle else Lane(self._endpoint, self._timers)
            self._busy.add(lane)
        return lane

    def give(self, lane: Lane) -> None:
        """It is not needed any more."""
        with self._lock:
            self._busy.discard(lane)
            if lane.is_good and not self._is_closed and len(self._idle) < IDLE_LANES:
                self._idle.append(lane)
                return
        lane.close()

    def _failure(self, attempt: Try, sent_at: float, what: str, *, reached: bool) -> Failure:
        return failure(self._settings, attempt, sent_at, what, reached=reached)


class LaneStream:
    """A stream of events; its lane is not used again."""

    def __init__(self, lanes: Lanes, lane: Lane, response: httpcore.Response) -> None:
        self._lanes = lanes
        self._lane = lane
        self._parts = response.iter_stream()

    def read(self, until: float) -> bytes:
        self._lane.limit(until)
        try:
            return next(filter(None, self._parts), b"")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            return b""

    def shut(self) -> None:
        self._lane.shut()

    def close(self) -> None:
        self._lane.done()
        self._lanes.give(self._lane)


class Injected:
    """The caller's own client (httpx.Client or one of its kind), used as it is."""

    def __init__(self, client: Any, settings: Settings, timers: Timers) -> None:
        self._client = client
        self._settings = settings
        self._timers = timers

    def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
        if shield is not None:
            shield.reached = True  # nobody tells us

        def send(sent_at: float, options: dict[str, Any]) -> Answer:
            response = self._client.request(
                **options, content=attempt.request.body, timeout=attempt.timeout
            )
            return _answer(sent_at, response, response.content)

        return self._tried(attempt, send)

    def stream(self, attempt: Try) -> EventStream | Outcome:
        def open_stream(sent_at: float, options: dict[str, Any]) -> EventStream | Answer:
            with contextlib.ExitStack() as opening:
                response = opening.enter_context(self._client.stream(**options, timeout=SILENCE))
                if is_stream(response.status_code, response.headers):
                    return InjectedStream(opening.pop_all(), response)
                return _answer(sent_at, response, response.read())

        return self._tried(attempt, open_stream)

    def _tried(
        self, attempt: Try, work: Callable[[float, dict[str, Any]], _Result]
    ) -> _Result | Failure:
        sent_at = self._timers.now()
        options = {
            "method": attempt.request.method,
            "url": self._settings.api_url + attempt.request.path,
            "headers": dict(attempt.request.headers),
            "follow_redirects": False,
            "auth": None,
        }
        try:
            return work(sent_at, options)
        except Exception as error:
            ancestors = {ancestor.__name__ for ancestor in type(error).__mro__}
            if not ancestors & {"RequestError", "StreamError", "OSError"}:
                raise
            what = f"{type(error).__name__}: {error}"
            reached = not ancestors & {"ConnectError", "ConnectTimeout", "PoolTimeout"}
            return failure(self._settings, attempt, sent_at, what, reached=reached)

    def abandon(self, attempt: Try) -> None:
        """Nobody can: its own timeout ends it."""

    def close(self) -> None:
        """It is the caller's."""

    def forget(self) -> None:
        """It is the caller's."""


class InjectedStream:
    """A stream of events over the caller's own client, whose timeout is what ends a silence."""

    def __init__(self, opened: contextlib.ExitStack, response: Any) -> None:
        self._opened = opened
        self._response = response
        self._parts = response.iter_bytes()
        self._is_shut = False

    def read(self, until: float) -> bytes:  # noqa: ARG002  the client's own timeout counts
        try:
            part = next(filter(None, self._parts), b"")
        except Exception:  # noqa: BLE001  of a library that we do not know: the stream is lost
            return b""
        return b"" if self._is_shut else part

    def shut(self) -> None:
        self._is_shut = True
        network = self._response.extensions.get("network_stream")
        connected = network and network.get_extra_info("socket")
        if isinstance(connected, socket.socket):
            shut_down(connected)

    def close(self) -> None:
        self._opened.close()


def _answer(sent_at: float, response: Any, body: bytes) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(sent_at, response.status_code, headers, body)


def _close_all(lanes: list[Lane]) -> None:
    while lanes:
        lanes.pop().close()
