"""When calls that wait for a lock try again, and which stream tells them.  Pure: `now` goes in.

    calls ──> line of their key: the first of it tries and reads, the others stand behind
                 ^ tries: opened, reset, released ...         ^ reads: no stream tells of the key
                 └──────────── one stream for all keys of a client ─────────────┘

Of a thousand calls that wait for one key in one client, one tries when it is released: whether it
gets it or not, the others could not.  docs/semantics.md#waiting.
"""

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum, auto

from volcano_sdk.errors import ConflictError, NotFoundError, VolcanoError
from volcano_sdk.events import FREEING, Filters, LockEvent
from volcano_sdk.lease import LockState
from volcano_sdk.subscription import Subscription, is_passing, pause

GRACE = 1.0
"""Seconds after `expires_at`, in which nobody can have the key."""
_SOONEST_READ = 0.1
_LONGEST_READ = 2.0
"""A read that hangs keeps its call from trying."""


def checked_wait(wait: object) -> float:
    """The longest wait in seconds, infinity included, or ValueError."""
    if isinstance(wait, int | float) and not isinstance(wait, bool) and wait >= 0:
        return float(wait) if wait < 1e300 else math.inf  # an int may be too large for a float
    raise ValueError(f"wait must be a number of seconds from 0, or infinity; got {wait!r:.80}")


def spread(watchers: int, jitter: float) -> float:
    """By how much a try is put off, so that a crowd that wakes together does not come together."""
    return (jitter + 1) / 2 * min((watchers - 1) * 0.002, 1.0)


def read_delay(jitter: float) -> float:
    """Seconds until a key is read of which no stream tells: 1 to 5."""
    return 3.0 + 2.0 * jitter


class Turn(Enum):
    """What a waiting call is to do now."""

    TRY = auto()
    READ = auto()
    OVER = auto()


class Waiter:
    """One call that waits for `key`.  `wake`: it may be its turn, or its moment may have moved.

    `error` is what the call ends with if it ends now.
    """

    def __init__(
        self, key: str, until: float, contention: ConflictError, wake: Callable[[], object]
    ) -> None:
        self.key = key
        self.until = until
        self.error: VolcanoError = contention
        self.wake = wake
        self.contention = contention
        self.try_at = math.inf
        self.doing: Turn | None = None


def read_timeout(client_timeout: float, left: float) -> float:
    """Seconds for a read; `left`: of its call's wait, which may be over since."""
    return max(min(client_timeout, _LONGEST_READ, left), 0.001)


class _Line:
    """Those who wait for one key, in their order.  Of all of them one tries, and one reads."""

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}  # a set that remembers the order
        self.try_at = math.inf
        self.read_at = math.inf
        self.not_before = -math.inf
        self.failures = 0
        self.watchers = 1
        self.overdue: datetime | None = None  # read once more soon: our clock may be fast

    @property
    def trier(self) -> Waiter:
        """The first, unless it is busy with a read: that may hang."""
        first = next(iter(self.waiters))
        if first.doing is not Turn.READ:
            return first
        return next((each for each in self.waiters if each.doing is not Turn.READ), first)

    @property
    def reader(self) -> Waiter:
        """The last: of equal waits it has most left for the answer."""
        return next(reversed(self.waiters))

    def moment(self, waiter: Waiter) -> float:
        """When this one has something to do, but for the end of its wait."""
        return max(min(self._try_at(waiter), self._read_at(waiter)), self.not_before)

    def due(self, waiter: Waiter, now: float) -> Turn | None:
        if now < self.moment(waiter):
            return None
        return Turn.TRY if self._try_at(waiter) <= now else Turn.READ

    def _try_at(self, waiter: Waiter) -> float:
        return min(waiter.try_at, self.try_at if waiter is self.trier else math.inf)

    def _read_at(self, waiter: Waiter) -> float:
        return self.read_at if waiter is self.reader else math.inf

    def heard(self) -> None:
        """What was answered is so for all: whatever else failed before."""
        for waiter in self.waiters:
            waiter.error = waiter.contention

    def try_soon(self, at: float) -> None:
        self.try_at = min(self.try_at, at)
        self.trier.wake()

    def read_soon(self, at: float) -> None:
        self.read_at = at
        self.reader.wake()


class Waiting:
    """Every call of one client that waits.  Not thread-safe; the sync client guards it.

    `subscriptions`: that of the open stream, and that of one which is to take its place.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._lines: dict[str, _Line] = {}
        self._untold: dict[str, None] = {}  # the keys of which no open stream tells
        self._has_events = True
        self._open: Subscription | None = None
        self._opening: Subscription | None = None
        self._next: Subscription | None = None  # what was lost, or could not be opened
        self._open_at = -math.inf

    # --- calls -----------------------------------------------------------------------------------

    def join(self, waiter: Waiter, now: float) -> None:
        """Its first try has met contention."""
        line = self._lines.setdefault(waiter.key, _Line())
        line.waiters[waiter] = None
        if self._open is not None and self._open.filters.cover(waiter.key):
            waiter.try_at = now
        else:
            self._mark_untold(waiter.key, now)

    def leave(self, waiter: Waiter, now: float, *, got_it: bool = False) -> None:
        """It has got the lock, or ends otherwise.  What it has left undone, the next one does."""
        line = self._lines.get(waiter.key)
        if line is None or waiter not in line.waiters:
            return
        if got_it:
            waiter.doing = None
            line.failures = 0
            line.heard()
        had_duties = waiter is line.trier or waiter is line.reader
        del line.waiters[waiter]
        if not line.waiters:
            del self._lines[waiter.key]
            self._untold.pop(waiter.key, None)
            if not self._lines:
                self._open = self._opening = self._next = None
            return
        if waiter.doing is Turn.TRY:
            line.try_soon(now)
        elif waiter.doing is Turn.READ:
            line.read_soon(now)
        if had_duties:
            line.trier.wake()
            line.reader.wake()

    def turn(self, waiter: Waiter, now: float) -> Turn | float:
        """What it is to do, or until when it is to wait for its `wake`."""
        line = self._lines[waiter.key]
        if now >= waiter.until:
            return Turn.OVER
        turn = line.due(waiter, now)
        if turn is None:
            return min(line.moment(waiter), waiter.until)
        waiter.doing = turn
        if turn is Turn.TRY:
            waiter.try_at = line.try_at = math.inf
        else:
            line.read_at = math.inf
        return turn

    def failed(self, waiter: Waiter, error: VolcanoError, now: float) -> None:
        """Its try, or its read, was not answered as it should be.  Raises what is final."""
        line = self._lines[waiter.key]
        if not (is_passing(error) or isinstance(error, ConflictError)):
            raise error
        was, waiter.doing = waiter.doing, None
        if isinstance(error, ConflictError):
            waiter.contention = error
            line.heard()
            line.failures = 0
        elif was is Turn.TRY:
            waiter.error = error
            line.failures += 1
            later = now + pause(line.failures, self._jitter(), error.retry_after)
            line.not_before = max(line.not_before, later)
            line.try_soon(now)
        else:  # it is owed still, whether a stream tells of the key or not
            if now < waiter.until:  # else it was broken off, which says nothing
                for other in line.waiters:
                    other.error = error
            line.not_before = max(line.not_before, now + (error.retry_after or 0.0))
            line.read_soon(now + read_delay(self._jitter()))

    def read(self, waiter: Waiter, state: LockState, now: float, wall: float) -> None:
        """What its read has told.  `wall`: now, in seconds since 1970."""
        waiter.doing = None
        line = self._lines[waiter.key]
        line.heard()
        if not state.held:
            line.try_soon(now)
        at = self._next_read(waiter.key, now)
        if state.expires_at is not None and at < math.inf:
            left = state.expires_at.timestamp() + GRACE - wall
            if state.expires_at != line.overdue:
                at = min(at, now + max(left, _SOONEST_READ))
            if left <= 0:
                line.overdue = state.expires_at
        line.read_soon(min(line.read_at, at))  # a look that is owed since this one began stays so

    def _mark_untold(self, key: str, now: float) -> None:
        """No open stream tells of it: one that does is to be opened, and it is read meanwhile."""
        if key not in self._untold:
            self._untold[key] = None
            self._lines[key].read_soon(now + read_delay(self._jitter()))

    def _next_read(self, key: str, now: float) -> float:
        return now + read_delay(self._jitter()) if key in self._untold else math.inf

    def wake_all(self) -> None:
        """The client was closed."""
        for line in self._lines.values():
            for waiter in line.waiters:
                waiter.wake()

    # --- the stream ------------------------------------------------------------------------------

    def uses(self, subscription: Subscription) -> bool:
        """Whether its stream is to go on."""
        return subscription is self._open or subscription is self._opening

    @property
    def open_at(self) -> float:
        """When a stream is to be opened; infinite if none is, minus infinite if at once."""
        is_needed = self._untold and self._has_events and self._opening is None
        return self._open_at if is_needed else math.inf

    def open(self) -> Subscription:
        """What to open a stream for, when it is time for it."""
        filters = Filters.of(self._lines)
        self._opening, self._next = self._next or Subscription(filters), None
        self._opening.filters = filters
        return self._opening

    def opened(self, subscription: Subscription, now: float) -> None:
        """Its stream is there: no other is needed, and what was missed before is made good."""
        if subscription is not self._opening:
            return
        is_again = subscription.was_open
        subscription.opened()
        self._open, self._opening, self._next = subscription, None, None
        for key, line in self._lines.items():
            if not subscription.filters.cover(key):
                self._mark_untold(key, now)  # it came while this one was opened
            elif key in self._untold:
                del self._untold[key]
                line.read_at = math.inf
                line.try_soon(now + (spread(line.watchers, self._jitter()) if is_again else 0.0))
            else:
                # What the stream before may have had on its way is lost: one look makes it good.
                line.read_soon(min(line.read_at, now + read_delay(self._jitter())))

    def heard(self, subscription: Subscription, events: Sequence[LockEvent], now: float) -> None:
        """What its stream tells."""
        if subscription is self._open:
            for event in events:
                self._tell(event, now)

    def _tell(self, event: LockEvent, now: float) -> None:
        if event.type == "reset":
            lines = list(self._lines.values())
        else:
            line = self._lines.get(event.key or "")
            lines = [] if line is None else [line]
        for line in lines:
            line.watchers = event.watchers or line.watchers
            if event.type in FREEING or event.type == "reset":
                line.try_soon(now + spread(line.watchers, self._jitter()))
            else:
                line.heard()
                if not line.failures:
                    line.try_at = math.inf  # somebody was faster; there will be a further event

    def ended(self, subscription: Subscription, error: VolcanoError | None, now: float) -> None:
        """Its stream was lost, or was not opened because of `error`."""
        if not self.uses(subscription):
            return
        if isinstance(error, NotFoundError):
            self._has_events = False
        if subscription is self._open:
            self._open = None
            for key in self._lines:
                self._mark_untold(key, now)
        else:
            self._opening = None
        self._next = subscription
        self._open_at = now + subscription.ended(error, self._jitter)
