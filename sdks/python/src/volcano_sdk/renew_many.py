"""Which locks to look at and when, which renewals share a request, and what came of it.  Pure.

    agenda: moments (stop times, due renewals) ──> due ─┬─ several: renew many, 500 at most
                 ^                                      └─ one, or no such route: single route
                 └── what the answer says about the next moment of each lease ──┘

Renewals that are due within half a second of one that is sent travel with it, so that a thousand
locks taken at once are a few requests, and one timer.  Each lease keeps its own deadline, schedule
and outcome.  docs/semantics.md#renew-many.
"""

import copy
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from volcano_sdk import operations
from volcano_sdk.errors import VolcanoError
from volcano_sdk.operations import Failure, Grant, Outcome, Request, Try
from volcano_sdk.renewal import LONGEST_LEAD, Holding

MOST = 500
"""Leases in one request."""


class Kept:
    """A held lock as an agenda keeps it.

    `is_renewing`: its renewal waits for its turn or is in flight, so its next moment is its stop
    time.
    """

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.is_renewing = False
        self.wakes_at = math.inf
        self.request: Request | None = None
        """Of a renewal on the single route that failed: its next try is the same operation."""


Lock = TypeVar("Lock", bound=Kept)


class Agenda(Generic[Lock]):
    """Every lock that one client holds.  Not thread-safe; the sync client guards it with its lock.

    `shares`: the server has the route to renew many, as far as we know.
    """

    def __init__(self) -> None:
        self.shares = True
        self._moments: list[tuple[float, int, Lock]] = []  # (when to look at it, tie, lock)
        self._live = 0  # of these; the others were superseded
        self._together: list[tuple[float, int, Lock]] = []  # (stop time, tie, lock), due
        self._alone: list[tuple[float, int, Lock]] = []
        self._ties = itertools.count()

    # --- moments ---------------------------------------------------------------------------------

    def moved(self, lock: Lock) -> None:
        """The stop time or the next renewal of a live lock may have come nearer."""
        at = lock.holding.trust.stop_at
        if not lock.is_renewing:
            at = min(at, lock.holding.schedule.due_at)
        if at < lock.wakes_at:
            self._live += lock.wakes_at == math.inf
            lock.wakes_at = at
            heapq.heappush(self._moments, (at, next(self._ties), lock))
            if len(self._moments) > 2 * self._live + 64:
                self._moments = [entry for entry in self._moments if entry[0] == entry[2].wakes_at]
                heapq.heapify(self._moments)

    def drop(self, lock: Lock) -> None:
        """It has ended, or is lost: it has no more moments."""
        self._live -= lock.wakes_at < math.inf
        lock.wakes_at = math.inf

    @property
    def next_moment(self) -> float:
        """When to `pass_by` again; infinite when there is nothing to wait for."""
        while self._moments and self._moments[0][0] != self._moments[0][2].wakes_at:
            heapq.heappop(self._moments)
        return self._moments[0][0] if self._moments else math.inf

    def pass_by(self, now: float) -> list[Lock]:
        """Put the renewals that are due in their queue; the locks that must be looked at now."""
        to_look_at = []
        while self.next_moment <= now:
            lock = self._popped()
            lock.holding.look(now)
            if not lock.holding.live:
                to_look_at.append(lock)
                continue
            if not lock.is_renewing and lock.holding.schedule.due_at <= now:
                self._queue(lock, self._together)
            self.moved(lock)
        return to_look_at

    def _popped(self) -> Lock:
        lock = heapq.heappop(self._moments)[2]
        self.drop(lock)
        return lock

    # --- renewals --------------------------------------------------------------------------------

    @property
    def requests_due(self) -> int:
        """How many requests the renewals that wait for their turn need."""
        if not self.shares:
            return len(self._alone) + len(self._together)
        return len(self._alone) + math.ceil(len(self._together) / MOST)

    @property
    def most_urgent(self) -> float:
        """The earliest stop time of those that wait for their turn."""
        for queue in (self._alone, self._together):
            while queue and not queue[0][2].holding.live:
                heapq.heappop(queue)
        heads = (queue[0][0] for queue in (self._alone, self._together) if queue)
        return min(heads, default=math.inf)

    def take(self, now: float) -> list[Lock]:
        """Those whose renewals are to travel in one request now, the earliest stop times first.

        Several if the server knows how; none if no renewal is due.
        """
        if self.shares and self._together:
            self._bring_forward(now)
        taken: list[Lock] = []
        while not taken and (self._alone or self._together):
            if self._alone and (not self._together or self._alone[0] < self._together[0]):
                queue, most = self._alone, 1
            else:
                queue, most = self._together, MOST if self.shares else 1
            while queue and len(taken) < most:
                lock = heapq.heappop(queue)[2]
                if lock.holding.live:
                    taken.append(lock)
        return taken

    def again(self, lock: Lock) -> None:
        """The server would not renew it together with others: renew it alone, at once."""
        self._queue(lock, self._alone)

    def _queue(self, lock: Lock, queue: list[tuple[float, int, Lock]]) -> None:
        lock.is_renewing = True
        heapq.heappush(queue, (lock.holding.trust.stop_at, next(self._ties), lock))

    def _bring_forward(self, now: float) -> None:
        later = []
        while self.next_moment <= now + LONGEST_LEAD:
            lock = self._popped()
            if not lock.is_renewing and lock.holding.goes_along(now):
                self._queue(lock, self._together)
            later.append(lock)
        for lock in later:
            self.moved(lock)


# --- one request ---------------------------------------------------------------------------------


def attempt(
    locks: Sequence[Kept], *, now: float, timeout: float, request_id: str, service_key: str
) -> Try:
    """The try to send at `now`; of several, the one with least left says how long it may take.

    Each renewal is an operation of its own; on the single route, tries after failures are the same.
    """
    holdings = [lock.holding for lock in locks]
    if len(locks) > 1:
        request = operations.renew_many(
            ((holding.lease, holding.ttl) for holding in holdings),
            request_id=request_id,
            service_key=service_key,
        )
        for lock in locks:
            lock.request = None
    else:
        [lock], [holding] = locks, holdings
        if lock.request is None or not holding.schedule.failures:
            lock.request = operations.renew(
                holding.lease.key,
                ttl=holding.ttl,
                token=holding.lease.token,
                request_id=request_id,
                service_key=service_key,
            )
        request = lock.request
    tries = [holding.renewal(request, now, timeout) for holding in holdings]
    return min(tries, key=lambda one: one.timeout)


def settle(
    agenda: Agenda[Lock],
    locks: Sequence[Lock],
    request: Request,
    outcome: Outcome,
    *,
    now: float,
    jitter: Callable[[], float],
) -> None:
    """What became of the try that `attempt` made for these: each has its own outcome.

    Those that the server would not renew together are put in the agenda again, alone.
    """
    for lock in locks:
        lock.is_renewing = False
    if request.operation == "renew":
        locks[0].holding.renewed(request, outcome, now=now, jitter=jitter())
        return
    if not isinstance(outcome, Failure) and outcome.status in _NO_SUCH_ROUTE | _NOT_TOGETHER:
        agenda.shares = agenda.shares and outcome.status not in _NO_SUCH_ROUTE
        for lock in locks:
            if not lock.holding.look(now) and lock.holding.live:
                agenda.again(lock)
        return
    for lock, result in zip(locks, _results(request, outcome, locks), strict=True):
        lock.holding.settled(result, sent_at=outcome.sent_at, now=now, jitter=jitter())


_NO_SUCH_ROUTE = {404, 405}
_NOT_TOGETHER = {400, 413}


def _results(
    request: Request, outcome: Outcome, locks: Sequence[Kept]
) -> Sequence[Grant | VolcanoError]:
    try:
        if isinstance(outcome, Failure):
            raise outcome.error
        return operations.renewed_many(request, outcome, [one.holding.lease.key for one in locks])
    except VolcanoError as error:
        if error.status == 409:  # says nothing of any one lease: a passing trouble
            error.status = None
        return [copy.copy(error) for _ in locks]  # what travels with one loss is not the others'
