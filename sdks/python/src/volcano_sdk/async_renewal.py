"""The locks that a client keeps, and the one task that renews them and announces their loss.

    agenda (stop times, due renewals) ──> requests due, the most urgent first ──> in flight
      ^                                                                              |
      └────────────────── what the answer says about the next moments ───────────────┘

One task and one agenda, not a timer or a task for each lock: the renewals of 2 000 locks at TTL 30
are a request each half second, and the rest of the time nothing happens.
"""

import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from volcano_sdk import renew_many
from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_transport import AsyncTransport
from volcano_sdk.errors import ConflictError, LockLostError
from volcano_sdk.operations import Grant
from volcano_sdk.renew_many import Agenda, Kept
from volcano_sdk.renewal import Holding
from volcano_sdk.settings import Settings

log = logging.getLogger("volcano_sdk")

_ANSWERED_SOON = 32
"""Requests in flight that count against the bound: more at once only cost more each."""
_HUNG_AFTER = 1.0
"""Seconds without an answer, after which a try no longer counts: it waits, it costs nothing."""
_IN_FLIGHT = 256
"""All of them, the hung ones too: each has a socket."""


class Held(Kept):
    """One lock of a running `with_lock`: its state, and who hears of its loss.

    `body` is cancelled by the loss; `over` is set by the loss or the end, whichever comes first;
    `progress` is set after each renewal try.
    """

    def __init__(self, holding: Holding, clock: AsyncClock) -> None:
        super().__init__(holding)
        self.name = (holding.lease.key, holding.lease.token)
        self.body = anyio.CancelScope()
        self.over = anyio.Event()
        self.progress = anyio.Event()
        self.flight: _Flight | None = None
        self._clock = clock
        self._callbacks: list[Callable[[LockLostError], object]] = []
        self._announced = False
        self._home = _here()

    def look(self) -> LockLostError | None:
        """The loss, if there is one by now.  The first look that finds one announces it.

        From another thread it is seen but not announced, since cancel scopes are the loop's own.
        """
        at_home = _here() == self._home
        if self.is_foreign:
            self.holding.lose("belongs to the process that this one was forked from", None)
        loss = self.holding.look(self._clock.now())
        if loss is not None and at_home and not self._announced:
            self._announced = True
            self.settle()
            self.body.cancel()
            for callback in self._callbacks:
                _call(callback, loss)
        return loss

    def check(self) -> None:
        """Raise the loss, if there is one by now."""
        loss = self.look()
        if loss is not None:
            raise loss

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that holds the lock: it owns nothing."""
        return os.getpid() != self._home[0]

    def settle(self) -> None:
        """Lost or ended: whoever waits goes on, and a renewal in flight is abandoned."""
        self.over.set()
        self.progress.set()
        if self.flight is not None:
            self.flight.leave()
            self.flight = None

    def on_lost(self, callback: Callable[[LockLostError], object]) -> None:
        if self._announced and self.holding.loss is not None:
            _call(callback, self.holding.loss)
        else:
            self._callbacks.append(callback)


class _Flight:
    """One request in flight: whose renewals, since when.  Cut off when all of them have left."""

    def __init__(self, locks: Sequence[Held], sent_at: float) -> None:
        self.locks = locks
        self.sent_at = sent_at
        self.scope = anyio.CancelScope()
        self._aboard = len(locks)
        for held in locks:
            held.flight = self

    def leave(self) -> None:
        self._aboard -= 1
        if self._aboard == 0:
            self.scope.cancel()


def _here() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _call(callback: Callable[[LockLostError], object], loss: LockLostError) -> None:
    try:
        callback(loss)
    except Exception:
        log.exception("an on_lost callback failed")


class Renewals:
    """Every lock that one client holds through `with_lock`."""

    def __init__(
        self,
        transport: AsyncTransport,
        settings: Settings,
        clock: AsyncClock,
        jitter: Callable[[], float],
    ) -> None:
        self.kept: dict[Held, None] = {}  # a set that remembers the order
        self._by_name: dict[tuple[str, str], list[Held]] = {}  # {(key, lock token): [...]}
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._jitter = jitter
        self._agenda = Agenda[Held]()
        self._in_flight: dict[_Flight, None] = {}  # a set that remembers the order
        self._wake = anyio.Event()
        self._sleeps_until = math.inf
        self._is_running = False

    def start(self, tasks: TaskGroup) -> None:
        """From now on; the renewals are tasks of this group too."""
        self._is_running = True
        tasks.start_soon(self._run, tasks)

    def close(self) -> None:
        self._is_running = False
        self._wake.set()

    def check_running(self) -> None:
        if not self._is_running:
            raise RuntimeError(
                "with_lock needs an entered client, whose task group renews the lock:"
                " `async with AsyncVolcanoClient(...) as client:`"
            )

    def keep(self, held: Held) -> None:
        """Until `forget`.  A client that was closed meanwhile keeps nothing."""
        self.kept[held] = None
        self._by_name.setdefault(held.name, []).append(held)
        if self._is_running:
            self.moved(held)
        else:
            held.holding.lose("was given up: its client was closed", None)

    def stop(self, held: Held) -> None:
        """Our release is about to be sent: no more renewals, and no loss any more."""
        held.holding.ended = True
        self._agenda.drop(held)
        held.settle()

    def forget(self, held: Held) -> None:
        self.stop(held)
        del self.kept[held]
        self._by_name[held.name].remove(held)
        for other in self.holders(*held.name):
            other.holding.lose("was lost: another with_lock of its lock token has ended", None)
            other.look()
        if not self._by_name[held.name]:
            del self._by_name[held.name]

    def holders(self, key: str, token: str) -> list[Held]:
        """The running `with_lock`s that live on this lease."""
        return list(self._by_name.get((key, token), ()))

    def moved(self, held: Held) -> None:
        """Its stop time or its next renewal may have come nearer."""
        if held.holding.live:
            self._agenda.moved(held)
            if held.wakes_at < self._sleeps_until:
                self._wake.set()

    def answered(self, held: Held, grant: Grant) -> None:
        """A direct call with its token was answered well."""
        held.holding.answered(grant, jitter=self._jitter())
        held.look()
        self.moved(held)

    def refused(self, held: Held, error: ConflictError) -> None:
        """A direct call with its token was told that it is no longer the holder."""
        held.holding.lose("was lost: a call with its lock token was refused", error)
        held.look()

    async def _run(self, tasks: TaskGroup) -> None:
        while self._is_running:
            self._wake = anyio.Event()
            now = self._clock.now()
            for held in self._agenda.pass_by(now):
                held.look()  # also where another thread has seen the loss: it is announced here
            self._start_due(now, tasks)
            self._sleeps_until = self._next_moment(now)
            if self._sleeps_until < math.inf:
                await self._clock.wait(self._wake, self._sleeps_until)
            else:
                await self._wake.wait()

    async def until_fresh(self, held: Held) -> None:
        """Until no renewal is due or being retried, or the lock is lost."""
        holding = held.holding
        while not held.look() and (
            holding.schedule.failures or holding.schedule.due_at <= self._clock.now()
        ):
            if held.progress.is_set():
                held.progress = anyio.Event()
            await held.progress.wait()

    def _start_due(self, now: float, tasks: TaskGroup) -> None:
        counting = sum(now - flight.sent_at < _HUNG_AFTER for flight in self._in_flight)
        while counting < _ANSWERED_SOON and len(self._in_flight) < _IN_FLIGHT:
            locks = self._agenda.take(now)
            if not locks:
                break
            flight = _Flight(locks, now)
            self._in_flight[flight] = None
            counting += 1
            tasks.start_soon(self._renew, flight)

    def _next_moment(self, now: float) -> float:
        next_moment = self._agenda.next_moment
        if self._agenda.requests_due and len(self._in_flight) < _IN_FLIGHT:
            ripe = (flight.sent_at + _HUNG_AFTER for flight in self._in_flight)
            next_moment = min(next_moment, min((at for at in ripe if at > now), default=math.inf))
        return next_moment

    async def _renew(self, flight: _Flight) -> None:
        try:
            with flight.scope:
                await self._try(flight.locks)
        finally:
            del self._in_flight[flight]
            for held in flight.locks:
                held.flight = None
        for held in flight.locks:
            held.look()
            held.progress.set()
            self.moved(held)
        if self._agenda.requests_due:
            self._wake.set()

    async def _try(self, locks: Sequence[Held]) -> None:
        """One request, and what it means for each of them."""
        live = [held for held in locks if not held.look() and held.holding.live]
        if not live:
            return
        sent_at = self._clock.now()
        attempt = renew_many.attempt(
            live,
            now=sent_at,
            timeout=self._settings.timeout,
            request_id=str(uuid.uuid4()),
            service_key=self._settings.credential,
        )
        outcome = await self._transport.exchange(attempt, sent_at=sent_at)
        renew_many.settle(
            self._agenda,
            live,
            attempt.request,
            outcome,
            now=self._clock.now(),
            jitter=self._jitter,
        )
