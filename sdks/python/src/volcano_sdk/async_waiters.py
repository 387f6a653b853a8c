"""How the async flavour waits: calls in their own tasks, and a task of ours for each stream.

    call ── joins ──> waiting ──> stream wanted ──> task: opens it, reads it
      ^                  │                              │
      └── its turn ──────┴───── event, end ─────────────┘

A call that is cancelled leaves at once; with the last one goes the stream.
"""

import uuid
from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from volcano_sdk import operations
from volcano_sdk.async_calls import Acquisition, Calls
from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_renewal import log
from volcano_sdk.async_transport import AsyncTransport
from volcano_sdk.errors import ConflictError, TransportError, VolcanoError
from volcano_sdk.operations import Answer, Failure
from volcano_sdk.settings import Settings
from volcano_sdk.subscription import SILENCE, Subscription, refusal
from volcano_sdk.waiting import Turn, Waiter, Waiting, read_timeout

_Result = TypeVar("_Result")


class Waiters:
    """Of one client."""

    def __init__(
        self,
        calls: Calls,
        transport: AsyncTransport,
        settings: Settings,
        clock: AsyncClock,
        jitter: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._waiting = Waiting(jitter)
        self._readers: dict[Subscription, anyio.CancelScope] = {}
        self._timer: anyio.CancelScope | None = None
        self._tasks: TaskGroup | None = None

    def start(self, tasks: TaskGroup) -> None:
        """The client was entered: streams are tasks of this group."""
        self._tasks = tasks

    def _check_running(self) -> None:
        if self._tasks is None:
            raise RuntimeError(
                "wait needs an entered client, whose task group listens for the lock:"
                " `async with AsyncVolcanoClient(...) as client:`"
            )

    def close(self) -> None:
        """The client is closed: nobody waits any more, and no stream stays."""
        self._waiting.wake_all()
        for reader in self._readers.values():
            reader.cancel()
        self._disarm()

    # --- calls -----------------------------------------------------------------------------------

    async def within(
        self,
        wait: float,
        first: Acquisition,
        take: Callable[[Acquisition], Awaitable[_Result]],
    ) -> _Result:
        """What `take` makes of the acquisition that is granted, the first or one within `wait`
        seconds.  Raises the last ConflictError when the time is over.
        """
        if wait == 0:
            return await take(first)
        self._check_running()
        until = self._clock.now() + wait
        try:
            return await take(first)
        except ConflictError as error:
            contention = error
        waiter = Waiter(first.key, until, contention, _nothing)
        is_granted = False
        try:
            self._waiting.join(waiter, self._clock.now())
            self._arrange()
            result = await self._wait(waiter, first, take)
            is_granted = True
            return result
        finally:
            self._waiting.leave(waiter, self._clock.now(), got_it=is_granted)
            self._arrange()

    async def _wait(
        self,
        waiter: Waiter,
        latest: Acquisition,
        take: Callable[[Acquisition], Awaitable[_Result]],
    ) -> _Result:
        while (turn := await self._turn(waiter)) is not Turn.OVER:
            try:
                if turn is Turn.TRY:
                    latest = self._calls.again(latest)
                    return await take(latest)
                await self._read(waiter)
            except VolcanoError as error:
                if self._calls.is_used_up(latest):
                    raise
                self._waiting.failed(waiter, error, self._clock.now())
        raise waiter.error

    async def _turn(self, waiter: Waiter) -> Turn:
        """Wait until it is this one's turn, and for what."""
        while True:
            self._calls.check_open()
            turn = self._waiting.turn(waiter, self._clock.now())
            if isinstance(turn, Turn):
                return turn
            woken = anyio.Event()
            waiter.wake = woken.set
            if turn < inf:
                await self._clock.wait(woken, turn)
            else:
                await woken.wait()

    async def _read(self, waiter: Waiter) -> None:
        request = operations.get(
            waiter.key,
            request_id=self._calls.request_id(None),
            service_key=self._calls.credential,
        )
        patience = read_timeout(inf, waiter.until - self._clock.now())
        state = operations.state(request, await self._calls.ask(request, patience=patience))
        self._waiting.read(waiter, state, self._clock.now(), self._clock.wall())

    # --- streams ---------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Let the streams follow what is wanted."""
        for subscription, reader in self._readers.items():
            if not self._waiting.uses(subscription):
                reader.cancel()
        self._disarm()
        at = self._waiting.open_at
        if self._calls.is_closed or self._tasks is None:
            return
        if at <= self._clock.now():
            subscription = self._waiting.open()
            self._readers[subscription] = anyio.CancelScope()
            self._tasks.start_soon(self._run, subscription)
        elif at < inf:
            self._timer = anyio.CancelScope()
            self._tasks.start_soon(self._arrange_at, at, self._timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _arrange_at(self, at: float, timer: anyio.CancelScope) -> None:
        with timer:
            while self._clock.now() < at:
                await self._clock.wait(anyio.Event(), at)
            self._timer = None
            self._arrange()

    async def _run(self, subscription: Subscription) -> None:
        error: VolcanoError | None = None
        try:
            with self._readers[subscription]:
                error = await self._stream(subscription)
        except VolcanoError as broken:
            error = broken
        except Exception as broken:  # noqa: BLE001
            # Whatever it is, the client's other tasks must not suffer; the keys are read meanwhile.
            log.exception("a stream of events failed in an unexpected way")
            error = TransportError(f"watch failed: {broken!r}")
        finally:
            del self._readers[subscription]
        self._waiting.ended(subscription, error, self._clock.now())
        self._arrange()

    async def _stream(self, subscription: Subscription) -> VolcanoError | None:
        """Open it and read it to its end; why it was not opened, if it was not."""
        attempt = subscription.attempt(
            timeout=self._settings.timeout,
            request_id=str(uuid.uuid4()),
            service_key=self._settings.credential,
        )
        opened = await self._transport.stream(attempt, sent_at=self._clock.now())
        if isinstance(opened, Answer | Failure):
            return refusal(attempt.request, opened)
        try:
            self._waiting.opened(subscription, self._clock.now())
            self._arrange()  # others are over now
            while chunk := await opened.read(self._clock.now() + SILENCE):
                events = subscription.received(chunk)
                self._waiting.heard(subscription, events, self._clock.now())
            return None
        finally:
            await opened.aclose()


def _nothing() -> None:
    """Nobody is to be woken yet."""
