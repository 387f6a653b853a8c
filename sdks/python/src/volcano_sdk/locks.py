"""`client.locks`: five calls, and `with_lock`, which puts them together."""

import logging
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import Literal
from uuid import UUID

from volcano_sdk import operations
from volcano_sdk.acquisition import Acquisition, within
from volcano_sdk.errors import ConflictError, LockLostError, VolcanoError, put_beside
from volcano_sdk.events import checked_filters
from volcano_sdk.guard import LockGuard
from volcano_sdk.held import HeldLock
from volcano_sdk.lease import LockLease, LockState
from volcano_sdk.operations import (
    Acquired,
    Answer,
    Failure,
    Request,
    Try,
    checked_key,
    checked_lease,
    checked_request_id,
    checked_token,
    checked_ttl,
)
from volcano_sdk.renewal import Holding
from volcano_sdk.runtime import Runtime, new_uuid
from volcano_sdk.waiting import checked_wait
from volcano_sdk.watch import LockWatch

_log = logging.getLogger("volcano_sdk")


class Locks:
    """Thread-safe.  Every call raises the errors of `volcano_sdk.errors`; bad arguments ValueError.

    `ttl` is in whole seconds, 5 to 7 776 000 (90 days).  `wait`: for how many seconds a lock that
    is held is waited for, 0 or more, also infinity; the TTL begins with the try that gets it.
    `token` (the lock token) and `request_id` are UUIDs, made when left out.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def with_lock(
        self,
        key: str,
        *,
        ttl: int,
        wait: float = 0,
        token: str | UUID | None = None,
        request_id: str | UUID | None = None,
    ) -> "WithLock":
        """Hold the lock while a `with` block runs: acquired, renewed, released at its end.

            with client.locks.with_lock("nightly", ttl=30) as guard:
                ...

        ConflictError: somebody else holds it, also after `wait` seconds, and the block does not
        run.  LockLostError at the end of the block: the lock was lost while it ran; the block's own
        error goes first.
        """
        acquisition = Acquisition(self._runtime, key, ttl, token=token, request_id=request_id)
        return WithLock(acquisition, checked_wait(wait))

    def acquire(
        self,
        key: str,
        *,
        ttl: int,
        wait: float = 0,
        token: str | UUID | None = None,
        request_id: str | UUID | None = None,
    ) -> LockLease:
        """Take the lock, within `wait` seconds, or ConflictError.

        Renewing and releasing are up to you.  With a `token` of your own, you can recover the lease
        after a TransportError.
        """
        seconds, gives_back = checked_wait(wait), token is None
        acquisition = Acquisition(self._runtime, key, ttl, token=token, request_id=request_id)
        take = partial(Acquisition.lease, gives_back=gives_back)
        return within(seconds, acquisition, take, gives_back=gives_back)

    def renew(
        self, key: str, lease: LockLease, *, ttl: int, request_id: str | UUID | None = None
    ) -> LockLease:
        """The lease with `ttl` seconds from now on; ConflictError when it is not held any more."""
        token = _token(key, lease)
        request = operations.renew(key, ttl=checked_ttl(ttl), token=token, **self._with(request_id))
        with self._runtime.lock:
            self._runtime.tokens.sent(key, token, ttl)
        holders = self._runtime.holders(key, token)
        for held in holders:
            held.sent(ttl)
        try:
            grant = operations.granted(request, self._answer(request))
        except ConflictError as refusal:
            for held in holders:
                held.lose("was lost: a call with its lock token was refused", refusal)
            raise
        for held in holders:
            held.answered(grant)
        return grant.lease(key, token)

    def release(self, key: str, lease: LockLease, *, request_id: str | UUID | None = None) -> None:
        """Give the lease up; ConflictError when another one holds the key."""
        token = _token(key, lease)
        request = operations.release(key, token=token, **self._with(request_id))
        holders = self._runtime.holders(key, token)
        for held in holders:
            held.let_go()
        with self._runtime.lock:
            self._runtime.tokens.release(token)
        operations.released(request, self._answer(request))
        for held in holders:
            held.holding.released = True

    def get(self, key: str, *, request_id: str | UUID | None = None) -> LockState:
        """Whether the key is held, by whomever."""
        request = operations.get(checked_key(key), **self._with(request_id))
        return operations.state(request, self._answer(request))

    def force_release(self, key: str, *, request_id: str | UUID | None = None) -> None:
        """Free the key, whoever holds it: only its fencing token stops a holder that is alive."""
        request = operations.force_release(checked_key(key), **self._with(request_id))
        operations.released(request, self._answer(request))

    def watch(
        self,
        key: str | Iterable[str] | None = None,
        *,
        prefix: str | Iterable[str] | None = None,
    ) -> LockWatch:
        """The events of these keys, and of those that begin so: at most 64 of both together.

        Errors come out of the iteration; NotFoundError: the server has no events.
        """
        filters = checked_filters(key, prefix)
        self._runtime.refuse_closed()
        self._runtime.settings.credential  # noqa: B018  AuthenticationError without one
        return LockWatch(self._runtime, filters)

    def _with(self, request_id: str | UUID | None) -> dict[str, str]:
        """What every request carries."""
        self._runtime.refuse_closed()
        return {
            "request_id": new_uuid() if request_id is None else checked_request_id(request_id),
            "service_key": self._runtime.settings.credential,
        }

    def _answer(self, request: Request) -> Answer:
        """One try of a direct call."""
        outcome = self._runtime.transport.exchange(Try(request, self._runtime.settings.timeout))
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome


def _token(key: str, lease: LockLease) -> str:
    return checked_token(checked_lease(checked_key(key), lease).token)


class WithLock:
    """A lock held by a `with` block; each is entered once."""

    def __init__(self, acquisition: Acquisition, wait: float) -> None:
        self._acquisition = acquisition
        self._wait = wait
        self._runtime = acquisition.runtime
        self._is_entered = False
        self._held: HeldLock | None = None

    def __enter__(self) -> LockGuard:
        if self._is_entered:
            raise RuntimeError("this with_lock was entered before: call with_lock again")
        self._is_entered = True
        self._runtime.refuse_closed()
        self._runtime.entering.add(self)
        try:
            self._runtime.start_threads()
            acquired = within(self._wait, self._acquisition, self._take, gives_back=True)
            try:
                return self._begin(acquired)
            except BaseException:
                if self._held is None:
                    self._acquisition.give_back()
                else:
                    self._finish()
                raise
        finally:
            self._runtime.entering.discard(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        loss, failure = self._finish()
        if error is None:
            if loss is not None:
                raise loss
            if failure is not None:
                _log.warning(
                    "the lock %r could not be released, its lease ends by itself: %s",
                    self._acquisition.key,
                    failure,
                )
        else:
            for companion in (loss, failure):
                if companion is not None:
                    put_beside(error, companion)
        return False

    def __del__(self) -> None:
        held = self._held
        if held is not None:
            try:
                # Not here: this may run anywhere, whatever lock its thread holds.
                self._runtime.timers.call_at(self._runtime.timers.now(), held.abandon)
            except RuntimeError:
                pass  # the interpreter is going down; the lease ends by itself

    def _take(self, acquisition: Acquisition) -> Acquired:
        self._acquisition = acquisition
        return acquisition.run(gives_back=True)

    def _begin(self, acquired: Acquired) -> LockGuard:
        acquisition, runtime = self._acquisition, self._runtime
        with runtime.lock:
            shortest_ttl = runtime.tokens.shortest(acquisition.key, acquisition.token)
        holding = Holding(
            acquisition.key,
            acquisition.token,
            acquisition.ttl,
            acquired,
            jitter=runtime.jitter(),
            shortest_ttl=shortest_ttl,
        )
        held = HeldLock(runtime, holding)
        self._held = held
        if held.begin():
            runtime.timers.wait(held.fresh)
        loss = held.look()
        if loss is not None:
            raise loss
        return LockGuard(held, self)

    def _finish(self) -> tuple[LockLostError | None, VolcanoError | None]:
        held = self._held
        if held is None:
            return None, None
        try:
            return held.finish()
        except BaseException:
            held.abandon()
            raise
        finally:
            self._held = None
