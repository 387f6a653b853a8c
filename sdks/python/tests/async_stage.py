"""What the async tests share: a clock that they move, and a transport that answers by script."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from many import Items, keys

from volcano_sdk.async_client import AsyncVolcanoClient
from volcano_sdk.async_transport import AsyncTransport
from volcano_sdk.errors import TransportError
from volcano_sdk.operations import Answer, Failure, Outcome, Try

EXPIRES_AT = "2026-11-29T12:00:00.000Z"
Response = Callable[[float], Outcome] | Items | None
"""What becomes of a try that was sent then; None: it hangs."""


async def settle() -> None:
    """Let every task run until it waits.  There are no sockets, so a number of rounds is enough."""
    for _ in range(60):
        await checkpoint()


class ManualSleep(AbstractContextManager[anyio.CancelScope, bool]):
    def __init__(self, clock: "ManualClock", at: float) -> None:
        self.at = at
        self.scope = anyio.CancelScope()
        self._clock = clock

    def __enter__(self) -> anyio.CancelScope:
        self._clock.pending.append(self)
        return self.scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self in self._clock.pending:
            self._clock.pending.remove(self)
        return bool(self.scope.__exit__(exc_type, exc, traceback))


class ManualClock:
    """An AsyncClock.  `jump` is a blocked loop: time passes and no timer runs."""

    def __init__(self) -> None:
        self.time = 100.0
        self.pending: list[ManualSleep] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_700_000_000.0 + self.time

    def move_on_at(self, at: float) -> ManualSleep:
        return ManualSleep(self, at)

    async def wait(self, event: anyio.Event, until: float) -> None:
        with self.move_on_at(until):
            await event.wait()

    def jump(self, seconds: float) -> None:
        self.time += seconds

    async def advance(self, seconds: float) -> None:
        """Time passes; timers run in their order.

        The end is reached also when the caller is cancelled on the way.
        """
        end = self.time + seconds
        try:
            await settle()
            while due := [sleep for sleep in self.pending if sleep.at <= end]:
                first = min(due, key=lambda sleep: sleep.at)
                self.time = max(self.time, first.at)
                self.pending.remove(first)
                first.scope.cancel()
                await settle()
        finally:
            self.time = max(self.time, end)


def answer(status: int, body: str = "", **headers: str) -> Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda sent_at: Answer(sent_at, status, named, body.encode())


def granted(status: int, fencing_token: int = 7, **headers: str) -> Response:
    body = f'{{"expires_at":"{EXPIRES_AT}","fencing_token":{fencing_token}}}'
    return answer(status, body, **headers)


def refused(status: int, code: str, **headers: str) -> Response:
    return answer(status, f'{{"error":"A sentence.","code":"{code}"}}', **headers)


def reset(*, reached: bool = True) -> Response:
    return lambda sent_at: Failure(sent_at, TransportError("reset"), reached=reached)


CONFLICT = refused(409, "lock_ownership_lost")
HANG: Response = None
GOOD: dict[str, Response] = {
    "acquire": granted(201),
    "renew": granted(200),
    "renew_many": Items(),
    "release": answer(204),
    "get": answer(200, '{"held":false}'),
    "force_release": answer(204),
    "watch": refused(404, "not_found"),
}


@dataclass
class Sent:
    """One try as it went out."""

    operation: str
    at: float
    key: str
    token: str | None
    request_id: str
    timeout: float
    body: bytes

    @property
    def keys(self) -> list[str]:
        """Those of the leases that it is about."""
        return keys(self.body) or [self.key]


class Stream:
    """An open stream of events, at whose other end the test is."""

    def __init__(self, clock: ManualClock, attempt: Try) -> None:
        self._clock = clock
        self._chunks: list[bytes] = []
        self._came = anyio.Event()
        self._is_closed = False
        self.path = attempt.request.path
        self.last_id = attempt.request.headers.get("Last-Event-ID")

    def is_open(self) -> bool:
        return not self._is_closed

    async def say(self, text: str) -> None:
        """What the server sends; nothing: it ends the stream."""
        self._chunks.append(text.encode())
        self._came.set()
        await settle()

    async def tell(self, kind: str, key: str = "k", watchers: int = 1, number: int = 1) -> None:
        data = f'{{"key":"{key}","fencing_token":7,"at":"{EXPIRES_AT}","watchers":{watchers}}}'
        await self.say(f"event: {kind}\nid: {number}\ndata: {data}\n\n")

    async def read(self, until: float) -> bytes:
        if not self._chunks:
            self._came = anyio.Event()
            await self._clock.wait(self._came, until)
        return self._chunks.pop(0) if self._chunks else b""

    async def aclose(self) -> None:
        assert self.is_open()
        self._is_closed = True


@dataclass
class Wire(AsyncTransport):
    """A transport whose answers come from `script`, by operation and in order, else are good.

    `takes` is how long each answer of an operation needs, in seconds of the clock.
    `streams`: those that were opened; where it is None, the server has no events.
    """

    clock: ManualClock
    script: dict[str, list[Response]] = field(default_factory=dict)
    takes: dict[str, list[float]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    is_closed: bool = False
    held_back: anyio.Event | None = None
    streams: list[Stream] | None = None

    def summary(self) -> str:
        return " ".join(self.operations())

    def operations(self) -> list[str]:
        return [one.operation for one in self.sent]

    def of(self, operation: str) -> list[Sent]:
        return [one for one in self.sent if one.operation == operation]

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        request = attempt.request
        self.sent.append(
            Sent(
                request.operation,
                sent_at,
                request.path.partition("/locks/")[2].partition("/")[0],
                request.headers.get("X-Volcano-Lock-Token"),
                request.request_id,
                attempt.timeout,
                request.body,
            )
        )
        waiting = self.script.get(request.operation)
        response = waiting.pop(0) if waiting else GOOD[request.operation]
        if isinstance(response, Items):
            response = answer(200, response.body(request.body))
        takes = self.takes.get(request.operation)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            with self.clock.move_on_at(sent_at + attempt.timeout):
                if takes:
                    with self.clock.move_on_at(sent_at + takes.pop(0)):
                        await anyio.sleep_forever()
                if self.held_back is not None:
                    await self.held_back.wait()
                await checkpoint()
                if response is None or isinstance(response, Items):
                    await anyio.sleep_forever()
                else:
                    return response(sent_at)
            return Failure(sent_at, TransportError("time is over"), reached=True)
        finally:
            self.in_flight -= 1

    async def stream(self, attempt: Try, *, sent_at: float) -> Stream | Outcome:
        is_scripted = bool(self.script.get("watch"))
        outcome = await self.exchange(attempt, sent_at=sent_at)
        if self.streams is None or is_scripted:
            return outcome
        self.streams.append(Stream(self.clock, attempt))
        return self.streams[-1]

    def start(self, tasks: TaskGroup) -> None:
        pass

    async def aclose(self) -> None:
        self.is_closed = True


class Stage:
    """A client on a manual clock and a scripted wire.

    `shares=False`: it knows already that its server cannot renew many at once.
    """

    def __init__(self, jitter: float = 0.0, *, shares: bool = True) -> None:
        self._shares = shares
        self.clock = ManualClock()
        self.wire = Wire(self.clock)
        self._jitter = jitter

    def client(self, **options: Any) -> AsyncVolcanoClient:
        chosen = {"api_url": "http://127.0.0.1:9", "service_key": "sk-test", **options}
        client = AsyncVolcanoClient(_clock=self.clock, trust_env=False, **chosen)
        client._transports = (self.wire,)
        client._calls._transport = self.wire
        client._renewals._transport = self.wire
        client._waiters._transport = client._watches._transport = self.wire
        client._renewals._agenda.shares = self._shares
        client._renewals._jitter = client.locks._jitter = lambda: self._jitter
        return client


class Call:
    """Something that runs in a task of its own, so that a test can look at it meanwhile."""

    def __init__(self, tasks: TaskGroup, work: Callable[[], Any]) -> None:
        self.scope = anyio.CancelScope()
        self.value: Any = None
        self.error: BaseException | None = None
        self.ended = anyio.Event()
        self.was_cancelled = False
        tasks.start_soon(self._run, work)

    async def _run(self, work: Callable[[], Any]) -> None:
        try:
            with self.scope:
                try:
                    self.value = await work()
                except anyio.get_cancelled_exc_class():
                    self.was_cancelled = True
                    raise
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.error = error
        finally:
            self.ended.set()
