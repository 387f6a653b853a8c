"""The async client: where it connects to, as whom, and the task group that renews its locks."""

import random
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from volcano_sdk.async_calls import Calls
from volcano_sdk.async_clock import AsyncClock, AsyncSystemClock
from volcano_sdk.async_locks import AsyncLocks
from volcano_sdk.async_renewal import Renewals
from volcano_sdk.async_transport import AsyncTransport, InjectedTransport, Lanes
from volcano_sdk.async_waiters import Waiters
from volcano_sdk.async_watch import Watches
from volcano_sdk.errors import VolcanoError, put_beside
from volcano_sdk.settings import Settings, checked_http_client


class AsyncVolcanoClient:
    """Volcano's locks for asyncio and trio.

        async with AsyncVolcanoClient(service_key="sk-...") as client:
            async with client.locks.with_lock("nightly-report", ttl=30) as guard:
                ...

    Arguments that are None come from VOLCANO_API_URL, VOLCANO_ANON_KEY and VOLCANO_SERVICE_KEY.
    `timeout` bounds one try, in seconds.  `http_client`: an httpx.AsyncClient (or one of its kind)
    to send through, which stays yours; by default the client has connections of its own, through
    the proxy that the environment names unless `trust_env` is False.

    Direct calls also work without the `async with`; `aclose` then closes the connections.
    Leaving it gives up, and releases, every lock that a `with_lock` of this client still holds.
    """

    def __init__(
        self,
        *,
        anon_key: str | None = None,
        service_key: str | None = None,
        api_url: str | None = None,
        timeout: float | None = None,
        http_client: Any = None,
        trust_env: bool = True,
        _clock: AsyncClock | None = None,
    ) -> None:
        settings = Settings.resolve(
            api_url=api_url,
            anon_key=anon_key,
            service_key=service_key,
            timeout=timeout,
            trust_env=trust_env and http_client is None,
        )
        clock = _clock or AsyncSystemClock()
        self._transports: tuple[AsyncTransport, ...]  # for calls, for renewals
        if http_client is None:
            self._transports = (Lanes(settings, clock), Lanes(settings, clock))
        else:
            checked_http_client(http_client, is_async=True)
            self._transports = (InjectedTransport(http_client, settings, clock),)
        self._api_url = settings.api_url
        self._renewals = Renewals(self._transports[-1], settings, clock, _jitter)
        self._calls = Calls(self._transports[0], self._renewals, settings, clock)
        self._tasks: TaskGroup | None = None
        sharing = (self._calls, self._transports[0], settings, clock, _jitter)
        self._waiters, self._watches = Waiters(*sharing), Watches(*sharing)
        self.locks = AsyncLocks(
            self._calls, self._renewals, self._waiters, self._watches, clock, _jitter
        )

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this client was entered before: make a new one")
        self._calls.check_open()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._renewals.start(self._tasks)
        self._waiters.start(self._tasks)
        for transport in self._transports:
            transport.start(self._tasks)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        try:
            await self.aclose()
        except VolcanoError as error:
            if exc is None:
                raise
            put_beside(exc, error)
        finally:
            await _leave(self._tasks)

    async def aclose(self) -> None:
        """Give up and release what running `with_lock`s hold, then close the connections.

        Raises the first error of a release that failed, after all were tried.
        """
        self._calls.is_closed = True
        self._waiters.close()
        self._watches.close()
        try:
            await self._calls.close()
        finally:
            self._renewals.close()
            for transport in self._transports:
                await transport.aclose()

    def __repr__(self) -> str:
        return f"<AsyncVolcanoClient {self._api_url}>"


async def _leave(tasks: TaskGroup) -> None:
    """Wait for our tasks to end.

    The group is not told of the user's error, which must not come out in a group of ours; nor must
    Ctrl-C, which trio raises in whichever task is running.
    """
    try:
        await tasks.__aexit__(None, None, None)
    except BaseExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise error from None
        raise


def _jitter() -> float:
    return random.uniform(-1.0, 1.0)  # noqa: S311  spreads load, hides nothing
