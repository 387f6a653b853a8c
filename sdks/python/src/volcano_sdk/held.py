"""One held lock at work: the pure `Holding`, and the timers, jobs and waiters around it.

stop timer ──> look ──────────────────> lost: announced once
due timer ──> worker: one renewal try ──┤
direct calls with the same token ───────┘
"""

import logging
import math
import threading
from collections.abc import Callable
from functools import partial

from volcano_sdk import operations
from volcano_sdk.errors import ConflictError, LockLostError, TransportError, VolcanoError
from volcano_sdk.operations import Failure, Grant, Outcome, Request, Try
from volcano_sdk.renewal import Holding
from volcano_sdk.runtime import Runtime, new_uuid
from volcano_sdk.threads import Timer

_log = logging.getLogger("volcano_sdk")

OnLost = Callable[[LockLostError], object]

_HUNG_AFTER = 1.0
"""Seconds without an answer, after which a try gives its thread up to a more urgent renewal."""


class HeldLock:
    """Thread-safe by the runtime's lock.

    `fresh`: a renewal has succeeded since the grant, or none will.  `settled`: lost or ended.
    """

    def __init__(self, runtime: Runtime, holding: Holding) -> None:
        self.holding = holding
        self.fresh = threading.Event()
        self._settled = threading.Event()
        self._waiters: list[threading.Event] = []
        self._callbacks: list[OnLost] = []
        self._runtime = runtime
        self._name = (holding.lease.key, holding.lease.token)
        self._stop: Timer | None = None
        self._due: Timer | None = None
        self._room: Timer | None = None
        self._is_renewing = False  # waits for a thread, or has one
        self._trying: Try | None = None
        self._tried_at = 0.0
        self._request: Request | None = None
        self._is_dropped = False

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
        waiter = threading.Event()
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
            self._request = None  # the next renewal is an operation of its own
            self._arm()

    def _arm(self) -> None:
        """Let timers and waiters follow the state; the lock is held."""
        if self.holding.live:
            due_at = math.inf if self._is_renewing else self.holding.schedule.due_at
            self._stop = self._moved(self._stop, self.holding.trust.stop_at, self._on_stop)
            self._due = self._moved(self._due, due_at, self._on_due)
        elif not self._settled.is_set():
            self._stop = self._moved(self._stop, math.inf, self._on_stop)
            self._due = self._moved(self._due, math.inf, self._on_due)
            self._room = self._moved(self._room, math.inf, self._make_room)
            callbacks, self._callbacks = self._callbacks, []
            if self.holding.loss is not None and not self.holding.ended:
                for callback in callbacks:
                    self._call(callback, self.holding.loss)
            self.give_way()
            self._settled.set()
            for event in (self.fresh, *self._waiters):
                event.set()

    def _moved(self, timer: Timer | None, at: float, action: Callable[[], None]) -> Timer | None:
        if timer is not None:
            if timer.at == at and timer.action is not None:
                return timer
            timer.cancel()
        return None if at == math.inf else self._runtime.timers.call_at(at, action)

    def _on_stop(self) -> None:
        self.look()

    def _on_due(self) -> None:
        with self._runtime.lock:
            if self.look() is None and self.holding.live and not self._is_renewing:
                self._is_renewing = True
                try:
                    self._runtime.workers.submit(self._renew, urgency=self.holding.trust.stop_at)
                    if self._runtime.workers.are_busy:
                        self._wait_for_room()
                except RuntimeError:
                    pass  # the interpreter is going down; the stop timer has the last word

    def _wait_for_room(self) -> None:
        at = self._runtime.timers.now() + _HUNG_AFTER
        self._room = self._runtime.timers.call_at(at, self._make_room)

    def _make_room(self) -> None:
        """Still no thread for our renewal: the hung try with most time left gives way."""
        with self._runtime.lock:
            if not (self.holding.live and self._is_renewing and self._trying is None):
                return
            others = [one for several in self._runtime.running.values() for one in several]
            hung = [one for one in others if one.is_hung]
            last = max(hung, key=lambda one: one.holding.trust.stop_at, default=self)
            if last.holding.trust.stop_at > self.holding.trust.stop_at:
                last.give_way()
            self._wait_for_room()

    @property
    def is_hung(self) -> bool:
        """Whether a try of its renewal is in flight for too long already."""
        tried_for = self._runtime.timers.now() - self._tried_at
        return self._trying is not None and tried_for >= _HUNG_AFTER

    def give_way(self) -> None:
        """Abandon the try that is in flight, if there is one."""
        if self._trying is not None:
            self._runtime.transport.abandon(self._trying)

    def _renew(self) -> None:
        """One try of the renewal that is due, on a worker."""
        attempt = self._next_try()
        if attempt is None:
            return
        outcome = self._exchange(attempt)
        with self._runtime.lock:
            self._is_renewing = False
            self._trying = None
            self.holding.renewed(
                attempt.request,
                outcome,
                now=self._runtime.timers.now(),
                jitter=self._runtime.jitter(),
            )
            if self.holding.schedule.failures == 0:
                self._request = None  # as above
                self.fresh.set()
            self._arm()

    def _next_try(self) -> Try | None:
        with self._runtime.lock:
            if self.look() is not None or not self.holding.live:
                return None
            if self._request is None:
                self._request = operations.renew(
                    self.holding.lease.key,
                    ttl=self.holding.ttl,
                    token=self.holding.lease.token,
                    request_id=new_uuid(),
                    service_key=self._runtime.settings.credential,
                )
            now = self._tried_at = self._runtime.timers.now()
            timeout = self._runtime.settings.timeout
            self._trying = self.holding.renewal(self._request, now, timeout)
            return self._trying

    def _exchange(self, attempt: Try) -> Outcome:
        sent_at = self._runtime.timers.now()
        try:
            return self._runtime.transport.exchange(attempt)
        except Exception as error:  # noqa: BLE001
            # An injected client may raise anything; the renewer lives on and tries again.
            _log.exception("a renewal of %r failed in an unexpected way", attempt.request.path)
            return Failure(sent_at, TransportError(f"renew failed: {error!r}"), reached=True)

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
            if self.holding.released or self._is_dropped:
                return None
            self._is_dropped = True
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
        self._is_dropped = True
        self.fresh, self._settled = threading.Event(), threading.Event()
        self._waiters, self._callbacks = [], []
        self._stop = self._due = self._room = self._trying = None
        self.lose("is held by the process that this one was forked from")

    def _release(self, *, tries: int) -> None:
        lease = self.holding.lease
        self._is_dropped = True  # whatever interrupts it, the runtime sees it through
        self._runtime.release(lease.key, lease.token, tries=tries)
        self.holding.released = True

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
