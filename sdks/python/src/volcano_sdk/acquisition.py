"""How the sync flavour takes a lock: one acquire and its tries, or several until one is granted.

within(wait, first) ── try ──> contention ──> wait for the turn ──> try again, another operation
                        └── granted, or an error that does not pass ──> the end
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar
from uuid import UUID

from volcano_sdk import operations
from volcano_sdk.errors import ConflictError, TransportError, VolcanoError
from volcano_sdk.lane import Shield
from volcano_sdk.lease import LockLease
from volcano_sdk.operations import Acquired, AcquireFailedError, Failure, Outcome, Try
from volcano_sdk.renewal import Trust
from volcano_sdk.runtime import Runtime, new_uuid, run
from volcano_sdk.waiting import Turn, Waiter, read_timeout

_Result = TypeVar("_Result")


class Acquisition:
    """One acquire, all of whose tries are the same: docs/semantics.md#ambiguous-acquire.

    `is_callers`: the lock token was chosen by the caller, who can recover the lease with it.
    """

    def __init__(
        self,
        runtime: Runtime,
        key: str,
        ttl: int,
        *,
        token: str | UUID | None,
        request_id: str | UUID | None,
    ) -> None:
        """ValueError for what cannot be right, RuntimeError once the client is closed."""
        self.runtime = runtime
        self.key = operations.checked_key(key)
        self.ttl = operations.checked_ttl(ttl)
        self.token = new_uuid() if token is None else operations.checked_token(token)
        self.is_callers = token is not None
        with runtime.lock:
            runtime.tokens.refuse_released(self.token)
        runtime.refuse_closed()
        self._request = operations.acquire(
            key,
            ttl=ttl,
            token=self.token,
            request_id=new_uuid()
            if request_id is None
            else operations.checked_request_id(request_id),
            service_key=runtime.settings.credential,
        )
        self._shield = Shield()

    @property
    def is_used_up(self) -> bool:
        """A release was sent for the caller's own lock token."""
        return self.is_callers and self._is_released

    @property
    def _is_released(self) -> bool:
        with self.runtime.lock:
            return self.runtime.tokens.is_released(self.token)

    def again(self) -> "Acquisition":
        """The next operation, with the same lock token unless a release was sent for it."""
        token = None if self._is_released and not self.is_callers else self.token
        again = Acquisition(self.runtime, self.key, self.ttl, token=token, request_id=None)
        again.is_callers = self.is_callers
        return again

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
                self.give_back()
            raise
        if gives_back:
            self.give_back()
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
                self.give_back()
            self._raise_if_interrupted()
            if isinstance(failed.error, ConflictError):
                for held in holders:
                    held.lose("was lost: a call with its lock token was refused", failed.error)
            raise failed.error from None
        except BaseException:
            if gives_back and self._shield.reached:
                self.give_back()
            raise
        for held in holders:
            held.answered(acquired.grant)
        return acquired

    def give_back(self) -> None:
        self.runtime.give_back(self.key, self.token)

    def _run(self, exchange: Callable[[Try], Outcome]) -> Acquired:
        flow = operations.acquire_flow(
            self._request, ttl=self.ttl, timeout=self.runtime.settings.timeout
        )
        return run(flow, exchange)

    def _raise_if_interrupted(self) -> None:
        if self._shield.interrupt is not None:
            raise self._shield.interrupt from None


def within(
    wait: float,
    first: Acquisition,
    take: Callable[[Acquisition], _Result],
    *,
    gives_back: bool,
) -> _Result:
    """What `take` makes of the acquisition that is granted, the first or one within `wait` seconds.

    Raises the last ConflictError when the time is over; `gives_back` as in `run`.
    """
    if wait == 0:
        return take(first)
    until = first.runtime.timers.now() + wait
    try:
        return take(first)
    except ConflictError as error:
        contention = error
    return _Wait(first, take, until, contention).result(gives_back=gives_back)


class _Wait(Generic[_Result]):
    """One call that waits.  However it is left, also by interrupts, it leaves nothing behind."""

    _is_over = True

    def __init__(
        self,
        first: Acquisition,
        take: Callable[[Acquisition], _Result],
        until: float,
        contention: ConflictError,
    ) -> None:
        self._latest = first
        self._take = take
        self._runtime = first.runtime
        self._waiter = Waiter(first.key, until, contention, _nothing)

    def result(self, *, gives_back: bool) -> _Result:
        result: _Result | None = None
        try:
            result = self._result()
            self._leave(got_it=True)
            return result
        except BaseException:
            if result is not None and gives_back:  # an interrupt: nobody will get it
                self._latest.give_back()
            self._leave(got_it=False)
            raise

    def __del__(self) -> None:
        if not self._is_over:  # its leaving was interrupted
            leave = partial(self._runtime.waiters.leave, self._waiter, got_it=False)
            try:
                # Not here: this may run anywhere, whatever lock its thread holds.
                self._runtime.timers.call_at(self._runtime.timers.now(), leave)
            except RuntimeError:
                pass  # the interpreter is going down

    def _result(self) -> _Result:
        waiters = self._runtime.waiters
        self._runtime.start_timers()
        self._is_over = False
        waiters.join(self._waiter)
        while (turn := waiters.turn(self._waiter)) is not Turn.OVER:
            try:
                if turn is Turn.TRY:
                    self._latest = self._latest.again()
                    return self._take(self._latest)
                self._read()
            except VolcanoError as error:
                if self._latest.is_used_up:
                    raise
                waiters.failed(self._waiter, error)
        raise self._waiter.error

    def _read(self) -> None:
        request = operations.get(
            self._latest.key,
            request_id=new_uuid(),
            service_key=self._runtime.settings.credential,
        )
        left = self._waiter.until - self._runtime.timers.now()
        attempt = Try(request, read_timeout(self._runtime.settings.timeout, left))
        outcome = self._runtime.transport.exchange(attempt)
        if isinstance(outcome, Failure):
            raise outcome.error
        self._runtime.waiters.read(self._waiter, operations.state(request, outcome))

    def _leave(self, *, got_it: bool) -> None:
        self._runtime.waiters.leave(self._waiter, got_it=got_it)
        self._is_over = True


def _nothing() -> None:
    """Nobody is to be woken yet."""
