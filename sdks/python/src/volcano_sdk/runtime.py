"""What all locks of one client share: settings, connections, time, threads, and what is running."""

import logging
import os
import random
import threading
import uuid
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from volcano_sdk import operations
from volcano_sdk.clock import SystemClock
from volcano_sdk.errors import ConflictError, VolcanoError
from volcano_sdk.lane import Shield
from volcano_sdk.operations import Outcome, Try
from volcano_sdk.renewals import Renewals
from volcano_sdk.settings import Settings
from volcano_sdk.threads import MOST_WORKERS, Latch, Timers, TimerThread, Workers
from volcano_sdk.tokens import Tokens
from volcano_sdk.transport import Lanes, Transport
from volcano_sdk.waiters import Waiters

if TYPE_CHECKING:
    from volcano_sdk.held import HeldLock
    from volcano_sdk.watch import LockWatch

_log = logging.getLogger("volcano_sdk")

_Result = TypeVar("_Result")


class Runtime:
    """Thread-safe.  `lock` guards `running`, `tokens`, and the state of each held lock.

    A seam: tests and the conformance driver give it a clock and a transport of their own.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timers: Timers | None = None,
        transport: Callable[[Timers], Transport] | None = None,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self.settings = settings
        self.jitter = jitter or partial(random.uniform, -1.0, 1.0)
        self.is_closed = False
        self.entering: set[object] = set()
        """The `with_lock`s that are under way to a lease, and will need threads."""
        self.running: dict[tuple[str, str], list[HeldLock]] = {}
        """The held locks by key and lock token."""
        self.watches: weakref.WeakSet[LockWatch] = weakref.WeakSet()
        self._given_timers = timers
        self.tokens = Tokens()
        self._make_threads()
        self.transport = (transport or partial(Lanes, settings))(self.timers)
        _runtimes.add(self)

    def _make_threads(self) -> None:
        self.lock = threading.RLock()
        self.timers = self._given_timers or TimerThread(SystemClock(), self._is_needed)
        self.workers = Workers(MOST_WORKERS, self._is_needed, "volcano-worker")
        self.callbacks = Workers(1, _never, "volcano-callbacks")
        self.readers = Workers(2, _never, "volcano-events")
        self.renewals = Renewals(self)
        self.waiters = Waiters(self)

    def _is_needed(self) -> bool:
        return bool(self.running or self.entering)

    # --- what runs ---------------------------------------------------------------------------

    def start_threads(self) -> None:
        """Before a lease is asked for: what will renew it must be there."""
        try:
            self.timers.start()
            self.workers.start()
        except RuntimeError as error:
            raise VolcanoError(f"no lock was taken: no thread can renew it ({error})") from error

    def start_timers(self) -> None:
        """Before somebody waits: what ends the waiting must be there."""
        try:
            self.timers.start()
        except RuntimeError as error:
            raise VolcanoError(f"nobody can wait: no thread keeps the time ({error})") from error

    def refuse_closed(self) -> None:
        if self.is_closed:
            raise RuntimeError("this client is closed: make a new one")

    def holders(self, key: str, token: str) -> "list[HeldLock]":
        """The held locks of this client that live on this lease."""
        with self.lock:
            return list(self.running.get((key, token), ()))

    # --- what is sent ------------------------------------------------------------------------

    def release(self, key: str, token: str, *, tries: int) -> None:
        """A release on the way out, bounded; the first interrupt waits until it is done.

        When another comes, a worker carries on.
        """
        shield = Shield()
        try:
            self._release(key, token, tries, shield)
        except VolcanoError:
            if shield.interrupt is not None:
                raise shield.interrupt from None
            raise
        except BaseException:
            self.in_background(partial(self._release, key, token, tries, None))
            raise
        if shield.interrupt is not None:
            raise shield.interrupt

    def give_back(self, key: str, token: str) -> None:
        """Release what nobody will use, if it was granted at all; a failure is only logged."""
        try:
            self.release(key, token, tries=2)
        except ConflictError:
            pass  # it was not granted, or is over: somebody else has the key
        except VolcanoError as error:
            _log.warning("the lease of %r could not be given back: %s", key, error)

    def _release(self, key: str, token: str, tries: int, shield: Shield | None) -> None:
        request = operations.release(
            key,
            token=token,
            request_id=new_uuid(),
            service_key=self.settings.credential,
        )
        with self.lock:
            self.tokens.release(token)
        flow = operations.release_flow(request, tries=tries)
        run(flow, partial(self.transport.exchange, shield=shield))

    def in_background(self, job: Callable[[], None]) -> None:
        """Do it on a worker; what goes wrong there is only logged."""
        try:
            self.workers.submit(partial(_quietly, job))
        except RuntimeError:
            _log.warning("no thread can be started to release a lock")

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Lose and release what is running, then close the connections.

        Every lease is released, whatever happens to another; the first failure is raised.
        """
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            held = [one for several in self.running.values() for one in several]
            self.running.clear()  # their threads may go
            for one in held:
                one.lose("was lost: its client was closed")
            self.waiters.close()
            for watch in list(self.watches):
                watch.shut()
        failures = self._release_all(held)
        self.transport.close()
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"{type(other).__name__}: {other}")
            raise failures[0]

    def _release_all(self, held: "list[HeldLock]") -> list[VolcanoError]:
        failures: list[VolcanoError] = []
        left = len(held)
        done = Latch()

        def release(one: "HeldLock") -> None:
            nonlocal left
            try:
                failure = one.release_at_close()
                if failure is not None:
                    failures.append(failure)
            finally:
                with self.lock:
                    left -= 1
                    if left == 0:
                        done.set()

        for one in held:
            try:
                self.workers.submit(partial(release, one))
            except RuntimeError:
                release(one)
        if held:
            self.timers.wait(done)
        return failures

    def become_child(self) -> None:
        """In the child of a fork: nothing here is ours any more.

        The parent's threads are gone and its locks may be held for ever: all are made anew.
        """
        inherited = [one for several in self.running.values() for one in several]
        self.running = {}
        self.entering = set()
        self._make_threads()
        self.transport.forget()
        for one in inherited:
            one.become_childs()
        for watch in list(self.watches):
            watch.become_childs()


def run(flow: Generator[Try, Outcome, _Result], exchange: Callable[[Try], Outcome]) -> _Result:
    """Carry out a flow."""
    attempt = next(flow)
    try:
        while True:
            attempt = flow.send(exchange(attempt))
    except StopIteration as end:
        result: _Result = end.value
        return result


def new_uuid() -> str:
    return str(uuid.uuid4())


def _never() -> bool:
    return False


def _quietly(job: Callable[[], None]) -> None:
    try:
        job()
    except ConflictError:
        pass  # somebody else has the key
    except VolcanoError as error:
        _log.warning("a lease could not be given back: %s", error)


_runtimes: "weakref.WeakSet[Runtime]" = weakref.WeakSet()


def _in_child() -> None:
    for runtime in list(_runtimes):
        runtime.become_child()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no fork
    os.register_at_fork(after_in_child=_in_child)
