"""How the sync flavour renews: one timer for all held locks of a client, one request a worker.

    timer ──> agenda ──due──> worker: one request for all that go together ──┐
      ^                                                                      │
      └──────────────────── the next moment <────────────────────────────────┘

The async twin is in async_renewal.py.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from volcano_sdk import renew_many
from volcano_sdk.errors import TransportError
from volcano_sdk.operations import Failure, Outcome, Try
from volcano_sdk.renew_many import Agenda
from volcano_sdk.threads import MOST_WORKERS, Timer

if TYPE_CHECKING:
    from volcano_sdk.held import HeldLock
    from volcano_sdk.runtime import Runtime

_log = logging.getLogger("volcano_sdk")

_HUNG_AFTER = 1.0
"""Seconds without an answer, after which a try gives its thread up to a more urgent renewal."""


class Flight:
    """One request that is in flight: whose renewals, since when."""

    def __init__(self, locks: "Sequence[HeldLock]", attempt: Try, sent_at: float) -> None:
        self.locks = locks
        self.attempt = attempt
        self.sent_at = sent_at
        self.aboard = len(locks)
        """How many of them still want its answer."""

    @property
    def urgency(self) -> float:
        """The earliest stop time of those that want its answer."""
        holdings = (held.holding for held in self.locks)
        return min((each.trust.stop_at for each in holdings if each.live), default=math.inf)


class Renewals:
    """Of one client's held locks.  The runtime's lock is held around every method but `_exchange`;
    those that run on threads of ours take it.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._agenda: Agenda[HeldLock] = Agenda()
        self._timer: Timer | None = None
        self._jobs = 0  # that wait for a worker
        self._room: Timer | None = None
        self._in_flight: set[Flight] = set()

    def moved(self, held: "HeldLock") -> None:
        """The stop time or the next renewal of a live lock may have come nearer."""
        self._agenda.moved(held)
        self._arm()

    def drop(self, held: "HeldLock") -> None:
        """It is lost or has ended.  A request that nobody else waits for is abandoned."""
        self._agenda.drop(held)
        self._arm()
        flight, held.flight = held.flight, None
        if flight is not None:
            flight.aboard -= 1
            if flight.aboard == 0:
                self._runtime.transport.abandon(flight.attempt)

    def _arm(self) -> None:
        at = self._agenda.next_moment
        if self._timer is not None:
            if self._timer.at == at and self._timer.action is not None:
                return
            self._timer.cancel()
        self._timer = None if at == math.inf else self._runtime.timers.call_at(at, self._on_moment)

    def _on_moment(self) -> None:
        with self._runtime.lock:
            for held in self._agenda.pass_by(self._runtime.timers.now()):
                held.look()
            self._call_workers()
            self._arm()

    def _call_workers(self) -> None:
        try:
            while self._jobs < min(self._agenda.requests_due, MOST_WORKERS):
                self._runtime.workers.submit(self._renew, urgency=self._agenda.most_urgent)
                self._jobs += 1
        except RuntimeError:
            pass  # no thread, or the interpreter is going down; the stop time has the last word
        if self._room is None and self._jobs and self._runtime.workers.are_busy:
            at = self._runtime.timers.now() + _HUNG_AFTER
            self._room = self._runtime.timers.call_at(at, self._make_room)

    def _make_room(self) -> None:
        """Still no thread for some renewals: the hung tries with most time left give way."""
        with self._runtime.lock:
            now = self._runtime.timers.now()
            hung = [one for one in self._in_flight if now - one.sent_at >= _HUNG_AFTER]
            hung.sort(key=lambda flight: flight.urgency, reverse=True)
            for flight in hung[: self._jobs]:
                if flight.urgency > self._agenda.most_urgent:
                    self._runtime.transport.abandon(flight.attempt)
            self._room = None
            self._call_workers()

    # --- on a worker -----------------------------------------------------------------------------

    def _renew(self) -> None:
        """One request for renewals that are due, and what it means for each of them."""
        flight = self._begun()
        if flight is not None:
            self._ended(flight, self._exchange(flight.attempt))

    def _begun(self) -> Flight | None:
        with self._runtime.lock:
            self._jobs -= 1
            if self._room is not None and self._jobs == 0:
                self._room.cancel()
                self._room = None
            now = self._runtime.timers.now()
            while taken := self._agenda.take(now):
                live = [held for held in taken if held.look() is None and held.holding.live]
                if live:
                    return self._sent(live, now)
            return None

    def _sent(self, locks: "Sequence[HeldLock]", now: float) -> Flight:
        attempt = renew_many.attempt(
            locks,
            now=now,
            timeout=self._runtime.settings.timeout,
            request_id=str(uuid4()),
            service_key=self._runtime.settings.credential,
        )
        flight = Flight(locks, attempt, now)
        for held in locks:
            held.flight = flight
        self._in_flight.add(flight)
        return flight

    def _ended(self, flight: Flight, outcome: Outcome) -> None:
        with self._runtime.lock:
            self._in_flight.remove(flight)
            renew_many.settle(
                self._agenda,
                flight.locks,
                flight.attempt.request,
                outcome,
                now=self._runtime.timers.now(),
                jitter=self._runtime.jitter,
            )
            for held in flight.locks:
                held.flight = None
                held.tried()
                if held.holding.live:
                    self._agenda.moved(held)
            self._call_workers()
            self._arm()

    def _exchange(self, attempt: Try) -> Outcome:
        sent_at = self._runtime.timers.now()
        try:
            return self._runtime.transport.exchange(attempt)
        except Exception as error:  # noqa: BLE001
            # An injected client may raise anything; the renewer lives on and tries again.
            _log.exception("a renewal of %r failed in an unexpected way", attempt.request.path)
            return Failure(sent_at, TransportError(f"renew failed: {error!r}"), reached=True)
