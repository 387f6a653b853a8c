"""One held lock at work: the pure `Holding`, and the callers and waiters around it.

stop time ──> look ───────────────────> lost: announced once
renewals ──> one try on a worker ───────┤
direct calls with the same token ───────┘
"""

import logging
import math
from collections.abc import Callable
from functools import partial

from volcano_sdk.errors import ConflictError, LockLostError, VolcanoError
from volcano_sdk.operations import Grant
from volcano_sdk.renew_many import Kept
from volcano_sdk.renewal import Holding
from volcano_sdk.renewals import Flight
from volcano_sdk.runtime import Runtime
from volcano_sdk.threads import Latch

_log = logging.getLogger("volcano_sdk")

OnLost = Callable[[LockLostError], object]


class HeldLock(Kept):
    """Thread-safe by the runtime's lock.

    `fresh`: a renewal has succeeded since the grant, or none will.
    `settled`: lost or ended, and all who wait for it were told.
    """

    def __init__(self, runtime: Runtime, holding: Holding) -> None:
        super().__init__(holding)
        self.fresh = Latch()
        self.flight: Flight | None = None
        self._is_settled = False
        self._waiters: list[Latch] = []
        self._callbacks: list[OnLost] = []
        self._runtime = runtime
        self._name = (holding.lease.key, holding.lease.token)
        self._is_dropped = False
        self._release_ended: Latch | None = None

    def begin(self) -> bool:
        """From now on it is renewed.  True when a renewal is due at once: wait until `fresh`."""
        with self._runtime.lock:
            if self._runtime.is_closed:
                self.lose("was lost: its client was closed")
            is_due = self.holding.schedule.due_at <= self._runtime.timers.now()
            self._runtime.running.setdefault(self._name, []).append(self)
            self._arm()
            return is_due

    # --- looking -----------------------------------------------------------------------------

    def look(self) -> LockLostError | None:
        """The loss, if there is one by now; the first to see it announces it."""
        with self._runtime.lock:
            loss = self.holding.look(self._runtime.timers.now())
            self._arm()
            return loss

    def lose(self, how: str, cause: VolcanoError | None = None) -> None:
        with self._runtime.lock:
            self.holding.lose(how, cause)
            self._arm()

    def wait_lost(self, timeout: float | None) -> bool:
        """Wait until it is lost; False when it ended first, or `timeout` seconds have passed."""
        waiter = Latch()
        timers = self._runtime.timers
        with self._runtime.lock:
            if self.look() is not None:
                return True
            if not self.holding.live or (timeout is not None and timeout <= 0):
                return False
            self._waiters.append(waiter)
            limit = None
            if timeout is not None and timeout < math.inf:
                limit = timers.call_at(timers.now() + timeout, waiter.set)
        try:
            timers.wait(waiter)
        finally:
            if limit is not None:
                limit.cancel()
            with self._runtime.lock:
                self._waiters.remove(waiter)
        return self.look() is not None

    def on_lost(self, callback: OnLost) -> None:
        with self._runtime.lock:
            self.look()
            if self.holding.live:
                self._callbacks.append(callback)
            elif self.holding.loss is not None and not self.holding.ended:
                self._call(callback, self.holding.loss)

    # --- renewing ----------------------------------------------------------------------------

    def sent(self, ttl: int) -> None:
        """A direct call with this lease's token is about to be sent."""
        with self._runtime.lock:
            self.holding.sent(self._runtime.timers.now(), ttl)
            self._arm()

    def answered(self, grant: Grant) -> None:
        """It was answered well."""
        with self._runtime.lock:
            self.look()
            self.holding.answered(grant, jitter=self._runtime.jitter())
            self._arm()

    def tried(self) -> None:
        """Its renewal was answered, or was not; the lock is held."""
        if self.holding.schedule.failures == 0 and not self.is_renewing:
            self.fresh.set()
        if not self.holding.live:
            self._arm()

    def _arm(self) -> None:
        """Let renewals and waiters follow the state; the lock is held."""
        if self.holding.live:
            self._runtime.renewals.moved(self)
        elif not self._is_settled:
            callbacks, self._callbacks = self._callbacks, []
            if self.holding.loss is not None and not self.holding.ended:
                for callback in callbacks:
                    self._call(callback, self.holding.loss)
            self._runtime.renewals.drop(self)
            for waiter in (self.fresh, *self._waiters):
                waiter.set()
            self._is_settled = True  # last: what an interrupt breaks off here is done again

    # --- the end -----------------------------------------------------------------------------

    def let_go(self) -> None:
        """A direct release is about to be sent: no renewal any more, and no loss."""
        with self._runtime.lock:
            self.look()
            self.holding.ended = True
            self._arm()

    def finish(self) -> tuple[LockLostError | None, VolcanoError | None]:
        """The body has ended: the loss, and what went wrong with the release, if anything."""
        with self._runtime.lock:
            self.let_go()
            self._leave()
            loss = self.holding.loss
            if self.holding.released or self._is_dropped:
                return loss, None
        try:
            self._release(tries=2 if loss is None else 1)
        except ConflictError as refusal:
            return loss or self.holding.release_refused(refusal), None
        except VolcanoError as failure:
            return loss, failure
        return loss, None

    def release_at_close(self) -> VolcanoError | None:
        """The client is being closed: what went wrong with the release, if anything."""
        with self._runtime.lock:
            under_way = self._release_ended
            if self.holding.released or (self._is_dropped and under_way is None):
                return None
            self._is_dropped = True
        if under_way is not None:  # on the body's thread, which hears what goes wrong with it
            self._runtime.timers.wait(under_way)
            return None
        try:
            self._release(tries=1)
        except VolcanoError as failure:
            return failure
        return None

    def abandon(self) -> None:
        """Its `with_lock` was dropped without an end: give the lease back."""
        with self._runtime.lock:
            self.let_go()
            self._leave()
            if self.holding.released or self._is_dropped:
                return
        self._runtime.in_background(partial(self._release, tries=2))

    def become_childs(self) -> None:
        """In the child of a fork: the lease is the parent's.  No lock of before is touched."""
        self._is_dropped, self._release_ended = True, None
        self.fresh, self._is_settled = Latch(), False
        self._waiters, self._callbacks = [], []
        self.flight, self.wakes_at = None, math.inf
        self.lose("is held by the process that this one was forked from")

    def _release(self, *, tries: int) -> None:
        lease = self.holding.lease
        self._release_ended = ended = Latch()  # before: a close in between waits for it
        self._is_dropped = True  # whatever interrupts it, the runtime sees it through
        try:
            self._runtime.release(lease.key, lease.token, tries=tries)
            self.holding.released = True
        finally:
            ended.set()

    def _leave(self) -> None:
        others = self._runtime.running.get(self._name, [])
        if self in others:
            others.remove(self)
        for other in others:
            other.lose("was lost: another with_lock of its lock token has ended")
        if not others:
            self._runtime.running.pop(self._name, None)

    def _call(self, callback: OnLost, loss: LockLostError) -> None:
        try:
            self._runtime.callbacks.submit(partial(_called, callback, loss))
        except RuntimeError:
            _log.warning("no thread can be started for an on_lost callback")


def _called(callback: OnLost, loss: LockLostError) -> None:
    try:
        callback(loss)
    except BaseException:  # noqa: BLE001  it is the user's; sys.exit ends no thread of ours
        _log.exception("an on_lost callback failed")
