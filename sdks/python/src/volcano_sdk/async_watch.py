"""What `watch` of the async flavour returns: the events of locks, one after the other."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeVar

import anyio

from volcano_sdk.async_calls import Calls
from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_renewal import log
from volcano_sdk.async_transport import AsyncEventStream, AsyncTransport
from volcano_sdk.errors import ServerError, VolcanoError
from volcano_sdk.events import Filters, LockEvent
from volcano_sdk.operations import Answer, Failure
from volcano_sdk.settings import Settings
from volcano_sdk.subscription import SILENCE, Subscription, is_passing, refusal

_Result = TypeVar("_Result")


class AsyncLockWatch:
    """An iterator over LockEvents without an end, over a connection of its own.

        async with client.locks.watch(prefix="ticket:") as events:
            async for event in events:
                ...

    A lost connection is made again, and goes on behind the last event.  Leaving the `async with`
    ends the connection; so do `aclose`, a cancellation, an error that comes out of it, and, where
    the event loop sees to that, dropping the iterator.
    """

    def __init__(self, events: AsyncGenerator[LockEvent, None], filters: Filters) -> None:
        self._events = events
        self._filters = filters

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LockEvent:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        await self.aclose()
        return False

    def __repr__(self) -> str:
        keys, prefixes = list(self._filters.keys), list(self._filters.prefixes)
        return f"<AsyncLockWatch key={keys} prefix={prefixes}>"

    async def aclose(self) -> None:
        """End it.  One that is being iterated over is ended by cancelling its task."""
        await self._events.aclose()


class Watches:
    """Every `watch` of one client."""

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
        self._jitter = jitter
        self._waits: dict[anyio.CancelScope, None] = {}  # of those that wait for something

    def close(self) -> None:
        """The client is closed: whoever waits, waits no longer."""
        for wait in self._waits:
            wait.cancel()

    async def events(self, filters: Filters) -> AsyncGenerator[LockEvent, None]:
        """Until the client is closed."""
        subscription = Subscription(filters)
        while not self._calls.is_closed:
            error: VolcanoError | None = None
            opened = await self._open(subscription)
            if opened is None:
                return
            if isinstance(opened, VolcanoError):
                error = opened
            else:
                try:
                    for event in subscription.opened():
                        yield event
                    while chunk := await self._while_open(partial(self._chunk, opened)):
                        for event in subscription.received(chunk):
                            yield event
                except ServerError as useless:
                    error = useless
                finally:
                    await opened.aclose()
            if error is not None and not is_passing(error):
                raise error
            if not self._calls.is_closed:
                await self._pause(subscription, error)

    async def _open(self, subscription: Subscription) -> AsyncEventStream | VolcanoError | None:
        attempt = subscription.attempt(
            timeout=self._settings.timeout,
            request_id=self._calls.request_id(None),
            service_key=self._calls.credential,
        )
        send = partial(self._transport.stream, attempt, sent_at=self._clock.now())
        opened = await self._while_open(send)
        if isinstance(opened, Answer | Failure):
            return refusal(attempt.request, opened)
        return opened

    async def _chunk(self, opened: AsyncEventStream) -> bytes:
        return await opened.read(self._clock.now() + SILENCE)

    async def _pause(self, subscription: Subscription, error: VolcanoError | None) -> None:
        until = self._clock.now() + subscription.ended(error, self._jitter)
        level = logging.INFO if subscription.was_open else logging.WARNING
        log.log(level, "events are asked for again soon: %s", error or "the stream was lost")
        while self._clock.now() < until and not self._calls.is_closed:
            await self._while_open(partial(self._clock.wait, anyio.Event(), until))

    async def _while_open(self, work: Callable[[], Awaitable[_Result]]) -> _Result | None:
        """What comes of it; None when the client is closed, now or meanwhile."""
        if self._calls.is_closed:
            return None
        with anyio.CancelScope() as scope:
            self._waits[scope] = None
            try:
                return await work()
            finally:
                del self._waits[scope]
        return None
