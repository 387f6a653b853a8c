"""The lock calls of the async flavour: direct ones, and `with_lock`."""

import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Literal, NoReturn

from anyio.lowlevel import checkpoint_if_cancelled

from volcano_sdk import operations
from volcano_sdk.async_calls import Acquisition, Calls
from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_guard import AsyncLockGuard
from volcano_sdk.async_renewal import Held, Renewals, log
from volcano_sdk.async_waiters import Waiters
from volcano_sdk.async_watch import AsyncLockWatch, Watches
from volcano_sdk.errors import (
    ConflictError,
    LockLostError,
    TransportError,
    VolcanoError,
    put_beside,
)
from volcano_sdk.events import checked_filters
from volcano_sdk.lease import LockLease, LockState
from volcano_sdk.operations import Acquired
from volcano_sdk.renewal import Holding, Trust
from volcano_sdk.waiting import checked_wait

Take = Callable[[Acquisition], Awaitable[Acquired]]


class AsyncLocks:
    """`client.locks`.  Each call may raise any error of `volcano_sdk.errors`; ValueError or
    TypeError for an argument that cannot be right, and then nothing was sent.
    """

    def __init__(
        self,
        calls: Calls,
        renewals: Renewals,
        waiters: Waiters,
        watches: Watches,
        clock: AsyncClock,
        jitter: Callable[[], float],
    ) -> None:
        self._calls = calls
        self._renewals = renewals
        self._waiters = waiters
        self._watches = watches
        self._clock = clock
        self._jitter = jitter

    def with_lock(
        self,
        key: str,
        *,
        ttl: int,
        wait: float = 0,
        token: str | uuid.UUID | None = None,
        request_id: str | uuid.UUID | None = None,
    ) -> "WithLock":
        """Hold the lock while the body of the `async with` runs, renewing it all the while.

        ConflictError: somebody else holds it, also after `wait` seconds, and the body does not run.
        On a loss the body is cancelled and LockLostError raised.
        """
        self._renewals.check_running()
        seconds = checked_wait(wait)
        acquisition = self._calls.acquisition(key, ttl, token, request_id)
        return WithLock(
            acquisition,
            partial(self._waiters.within, seconds, acquisition),
            self._calls,
            self._renewals,
            self._clock,
            self._jitter,
        )

    async def acquire(
        self,
        key: str,
        *,
        ttl: int,
        wait: float = 0,
        token: str | uuid.UUID | None = None,
        request_id: str | uuid.UUID | None = None,
    ) -> LockLease:
        """Take the lock for `ttl` seconds, within `wait` seconds; nobody renews it for you.

        ConflictError: it is held.  Waiting needs a client that was entered with `async with`.
        """
        seconds = checked_wait(wait)
        acquisition = self._calls.acquisition(key, ttl, token, request_id)
        return await self._waiters.within(seconds, acquisition, self._lease)

    async def _lease(self, acquisition: Acquisition) -> LockLease:
        key, ttl, token = acquisition.key, acquisition.ttl, acquisition.token
        self._calls.tokens.sent(key, token, ttl)
        gives_back = not acquisition.is_recoverable
        acquired = await self._calls.obtain(acquisition, gives_back=gives_back)
        if self._clock.now() < Trust.begun(acquired, ttl).stop_at:
            return acquired.grant.lease(key, token)
        interruption = await self._calls.give_back(acquisition) if gives_back else None
        raise interruption or TransportError(
            f"acquire was answered too late: the lock {key!r} is not held",
            request_id=acquisition.request.request_id,
        )

    async def renew(
        self,
        key: str,
        lease: LockLease,
        *,
        ttl: int,
        request_id: str | uuid.UUID | None = None,
    ) -> LockLease:
        """The lease, good for `ttl` seconds from now.  ConflictError: it is no longer ours."""
        token = _checked_lease(key, lease)
        request = operations.renew(
            key,
            ttl=operations.checked_ttl(ttl),
            token=token,
            request_id=self._calls.request_id(request_id),
            service_key=self._calls.credential,
        )
        self._calls.tokens.sent(key, token, ttl)
        holders = self._renewals.holders(key, token)
        try:
            grant = operations.granted(request, await self._calls.ask(request, holders, ttl))
        except ConflictError as error:
            for held in holders:
                self._renewals.refused(held, error)
            raise
        for held in holders:
            self._renewals.answered(held, grant)
        return grant.lease(key, token)

    async def release(
        self, key: str, lease: LockLease, *, request_id: str | uuid.UUID | None = None
    ) -> None:
        """Give the lock back.  ConflictError: somebody else holds it."""
        token = _checked_lease(key, lease)
        request = operations.release(
            key,
            token=token,
            request_id=self._calls.request_id(request_id),
            service_key=self._calls.credential,
        )
        self._calls.tokens.release(token)
        holders = self._renewals.holders(key, token)
        for held in holders:
            self._renewals.stop(held)
        operations.released(request, await self._calls.ask(request))
        for held in holders:
            held.holding.released = True

    async def get(self, key: str, *, request_id: str | uuid.UUID | None = None) -> LockState:
        """Whether anybody holds the lock: a hint, it may have changed since."""
        request = operations.get(
            operations.checked_key(key),
            request_id=self._calls.request_id(request_id),
            service_key=self._calls.credential,
        )
        return operations.state(request, await self._calls.ask(request))

    async def force_release(self, key: str, *, request_id: str | uuid.UUID | None = None) -> None:
        """Free the lock, whoever holds it: its holder hears of it at the next renewal."""
        request = operations.force_release(
            operations.checked_key(key),
            request_id=self._calls.request_id(request_id),
            service_key=self._calls.credential,
        )
        operations.released(request, await self._calls.ask(request))

    def watch(
        self,
        key: str | Iterable[str] | None = None,
        *,
        prefix: str | Iterable[str] | None = None,
    ) -> AsyncLockWatch:
        """The events of these keys, and of those that begin so: at most 64 of both together.

        Errors come out of the iteration; NotFoundError: the server has no events.
        """
        filters = checked_filters(key, prefix)
        self._calls.credential  # noqa: B018  AuthenticationError without one
        return AsyncLockWatch(self._watches.events(filters), filters)


def _checked_lease(key: str, lease: object) -> str:
    """The lock token of a lease of this key."""
    lease = operations.checked_lease(operations.checked_key(key), lease)
    return operations.checked_token(lease.token)


class WithLock:
    """What `with_lock` returns: an async context manager, for one use.

        acquire ── renew first, if that is due ── body ── stop renewing ── release
           │ cancelled: at most 2 s for             │ lost: the body's scope is cancelled;
           │ the answer, then a release             │ LockLostError after one try to release

    The user's cancellation and the body's own error win over a loss, which travels beside them.
    """

    def __init__(
        self,
        acquisition: Acquisition,
        within: Callable[[Take], Awaitable[Acquired]],
        calls: Calls,
        renewals: Renewals,
        clock: AsyncClock,
        jitter: Callable[[], float],
    ) -> None:
        self._acquisition = acquisition
        self._within = within
        self._calls = calls
        self._renewals = renewals
        self._clock = clock
        self._jitter = jitter
        self._held: Held | None = None

    async def __aenter__(self) -> AsyncLockGuard:
        if self._held is not None:
            raise RuntimeError("this with_lock was entered before: call with_lock again")
        acquired = await self._within(self._take)
        holding = Holding(
            self._acquisition.key,
            self._acquisition.token,
            self._acquisition.ttl,
            acquired,
            jitter=self._jitter(),
            shortest_ttl=self._calls.tokens.shortest(
                self._acquisition.key, self._acquisition.token
            ),
        )
        self._held = held = Held(holding, self._clock)
        try:
            self._renewals.keep(held)
            await self._renewals.until_fresh(held)
            held.check()
        except BaseException:
            _, interruption = await self._release(held)
            if interruption is not None:
                raise interruption  # noqa: B904  a cancellation goes on as it is
            raise
        held.body.__enter__()
        return AsyncLockGuard(held, self._clock)

    async def _take(self, acquisition: Acquisition) -> Acquired:
        self._acquisition = acquisition
        return await self._calls.obtain(acquisition, gives_back=True)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        held = self._held
        assert held is not None
        held.look()
        error = _leave_scope(held, exc, traceback)
        failure, interruption = await self._release(held)
        if interruption is not None:
            raise interruption
        loss = held.holding.loss
        if error is not None and not _is_only(error, loss):
            for companion in (loss, failure):
                if companion is not None:
                    put_beside(error, companion)
            if error is not exc:
                _raise_as_it_is(error)
            return False
        if loss is not None:
            await checkpoint_if_cancelled()  # the user's cancellation wins
            _raise_as_it_is(loss)
        return False

    async def _release(self, held: Held) -> tuple[VolcanoError | None, BaseException | None]:
        """Stop renewing, then release.  Returns why that failed, and an interruption."""
        holding = held.holding
        was_ended = holding.ended
        self._renewals.forget(held)
        if holding.released or held.is_foreign:
            return None, None
        failure, interruption = await self._calls.release(
            holding.lease.key, holding.lease.token, tries=1 if holding.loss else 2
        )
        if isinstance(failure, ConflictError):
            if not was_ended:
                holding.release_refused(failure)
            return None, interruption
        if failure is not None:
            log.warning("the lock %r was not released: %s", holding.lease.key, failure)
        return failure, interruption


def _leave_scope(
    held: Held, exc: BaseException | None, traceback: TracebackType | None
) -> BaseException | None:
    """The error with which the body ended, less the cancellation by which we ended it."""
    try:
        is_ours = held.body.__exit__(None if exc is None else type(exc), exc, traceback)
    except RuntimeError as misuse:  # a generator that the event loop closed in another task
        return misuse if exc is None else exc
    except BaseException as rest:  # noqa: BLE001  what is left of a group, without our cancellation
        return rest
    return None if is_ours else exc


def _raise_as_it_is(error: BaseException) -> NoReturn:
    """Without the exception of the body, which is being handled, for its context."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


def _is_only(error: BaseException, loss: LockLostError | None) -> bool:
    """Whether the error is the loss itself, alone or in the groups of the user's task groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_only(inner, loss) for inner in error.exceptions)
    return error is loss
