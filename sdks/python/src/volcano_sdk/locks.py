"""`client.locks`: five calls, and `with_lock`, which puts them together."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Literal
from uuid import UUID

from volcano_sdk import operations
from volcano_sdk.errors import (
    ConflictError,
    LockLostError,
    TransportError,
    VolcanoError,
    put_beside,
)
from volcano_sdk.guard import LockGuard
from volcano_sdk.held import HeldLock
from volcano_sdk.lane import Shield
from volcano_sdk.lease import LockLease, LockState
from volcano_sdk.operations import (
    Acquired,
    AcquireFailedError,
    Answer,
    Failure,
    Outcome,
    Request,
    Try,
    checked_key,
    checked_lease,
    checked_request_id,
    checked_token,
    checked_ttl,
)
from volcano_sdk.renewal import Holding, Trust
from volcano_sdk.runtime import Runtime, new_uuid, run

_log = logging.getLogger("volcano_sdk")


class Locks:
    """Thread-safe.  Every call raises the errors of `volcano_sdk.errors`; bad arguments ValueError.

    `ttl` is in whole seconds, 5 to 7 776 000 (90 days).  `token` (the lock token) and `request_id`
    are UUIDs, made when left out.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def with_lock(
        self,
        key: str,
        *,
        ttl: int,
        token: str | UUID | None = None,
        request_id: str | UUID | None = None,
    ) -> "WithLock":
        """Hold the lock while a `with` block runs: acquired, renewed, released at its end.

            with client.locks.with_lock("nightly", ttl=30) as guard:
                ...

        ConflictError: somebody else holds it, the block does not run.  LockLostError at the end of
        the block: the lock was lost while it ran; the block's own error goes first.
        """
        return WithLock(self._acquisition(key, ttl, token, request_id))

    def acquire(
        self,
        key: str,
        *,
        ttl: int,
        token: str | UUID | None = None,
        request_id: str | UUID | None = None,
    ) -> LockLease:
        """Take the lock, or ConflictError at once.  Renewing and releasing are up to you.

        With a `token` of your own, you can recover the lease after a TransportError.
        """
        acquisition = self._acquisition(key, ttl, token, request_id)
        return acquisition.lease(gives_back=token is None)

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

    def _acquisition(
        self, key: str, ttl: int, token: str | UUID | None, request_id: str | UUID | None
    ) -> "_Acquisition":
        checked_key(key)
        checked_ttl(ttl)
        lock_token = new_uuid() if token is None else checked_token(token)
        with self._runtime.lock:
            self._runtime.tokens.refuse_released(lock_token)
        request = operations.acquire(key, ttl=ttl, token=lock_token, **self._with(request_id))
        return _Acquisition(self._runtime, request, key, lock_token, ttl)

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


class _Acquisition:
    """One acquire, all of whose tries are the same: docs/semantics.md#ambiguous-acquire."""

    def __init__(self, runtime: Runtime, request: Request, key: str, token: str, ttl: int) -> None:
        self.runtime = runtime
        self.key = key
        self.token = token
        self.ttl = ttl
        self._request = request
        self._shield = Shield()

    def lease(self, *, gives_back: bool) -> LockLease:
        """For a direct call."""
        with self.runtime.lock:
            self.runtime.tokens.sent(self.key, self.token, self.ttl)
        acquired = self.run(gives_back=gives_back)
        try:
            if self.runtime.timers.now() < Trust.begun(acquired, self.ttl).stop_at:
                return acquired.grant.lease(self.key, self.token)
        except BaseException:  # an interrupt: nobody will get the lease
            if gives_back:
                self.runtime.give_back(self.key, self.token)
            raise
        if gives_back:
            self.runtime.give_back(self.key, self.token)
        raise TransportError(
            f"acquire was answered too late to be of use: {self.key!r} is not held",
            request_id=self._request.request_id,
        )

    def run(self, *, gives_back: bool) -> Acquired:
        """`gives_back`: what may have been granted without our knowledge is released."""
        holders = self.runtime.holders(self.key, self.token)

        def exchange(attempt: Try) -> Outcome:
            self._raise_if_interrupted()
            for held in holders:
                held.sent(self.ttl)
            return self.runtime.transport.exchange(attempt, shield=self._shield)

        try:
            acquired = self._run(exchange)
            self._raise_if_interrupted()
        except AcquireFailedError as failed:
            if failed.unknown and gives_back:
                self.runtime.give_back(self.key, self.token)
            self._raise_if_interrupted()
            if isinstance(failed.error, ConflictError):
                for held in holders:
                    held.lose("was lost: a call with its lock token was refused", failed.error)
            raise failed.error from None
        except BaseException:
            if gives_back and self._shield.reached:
                self.runtime.give_back(self.key, self.token)
            raise
        for held in holders:
            held.answered(acquired.grant)
        return acquired

    def _run(self, exchange: Callable[[Try], Outcome]) -> Acquired:
        flow = operations.acquire_flow(
            self._request, ttl=self.ttl, timeout=self.runtime.settings.timeout
        )
        return run(flow, exchange)

    def _raise_if_interrupted(self) -> None:
        if self._shield.interrupt is not None:
            raise self._shield.interrupt from None


class WithLock:
    """A lock held by a `with` block; each is entered once."""

    def __init__(self, acquisition: _Acquisition) -> None:
        self._acquisition = acquisition
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
            acquired = self._acquisition.run(gives_back=True)
            try:
                return self._begin(acquired)
            except BaseException:
                if self._held is None:
                    self._runtime.give_back(self._acquisition.key, self._acquisition.token)
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
