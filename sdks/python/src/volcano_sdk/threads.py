"""Time and threads of the sync flavour: one thread of timers, and a few that renew.

    call_at ──> heap of timers ──> "volcano-timers" ──due──> jobs ──> "volcano-worker" × 0 to 6
                                        └── never runs user code, never waits for the network

All are daemons, started when needed and gone soon after nothing needs them, so a thousand leases
share seven threads and a process that ends with a lease held ends at once.

Callers are interrupted at any moment (Ctrl-C).  What they share with these threads is locked by a
`with` on a lock itself, which is one step; that of a Condition or an Event is written in Python,
and an interrupt inside it leaves the lock taken for ever.
"""

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from volcano_sdk.clock import Clock

MOST_WORKERS = 6
LINGER = 2.0
"""Seconds that an idle thread stays."""
_SLICE = 0.5
"""Seconds.  Waiting stands still while the host sleeps; a look at the clock each slice shows a
suspend soon after the resume, and no wait is too long for the platform."""


class Timer:
    """Something to do at `at`; `cancel` makes it nothing."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at = at
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None

    def taken(self) -> Callable[[], None]:
        """The action, once."""
        action, self.action = self.action, None
        return action or _nothing


class Latch:
    """A threading.Event whose `set` may be interrupted, and then be called again."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []  # each taken, until it is set

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for each in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # it was released before
                each.release()

    def wait(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        if not self._is_set:
            lock.acquire()


class Timers(Clock, Protocol):
    """The seam of time of the sync flavour: everything that waits, waits through it."""

    def start(self) -> None:
        """See that `call_at` will work; RuntimeError where its thread cannot be started."""

    def call_at(self, at: float, action: Callable[[], None]) -> Timer:
        """Do it at `at`, quickly and without raising, on a thread of the clock's.

        RuntimeError where that thread cannot be started.
        """

    def socket_timeout(self, until: float) -> float | None:
        """For how long a socket may block by itself; None where only `call_at` ends it."""

    def wait(self, event: Latch) -> None:
        """Wait for what another thread does; a `call_at` may set a limit."""


class TimerThread:
    """Timers on the real clock.  `is_needed` keeps the thread while it says so."""

    def __init__(self, clock: Clock, is_needed: Callable[[], bool]) -> None:
        self.now = clock.now
        self.wall = clock.wall
        self._is_needed = is_needed
        self._lock = threading.RLock()  # a destructor may come while its own thread has it
        self._changed = threading.Condition(self._lock)
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = _thread(self._run, "volcano-timers")
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    raise

    def call_at(self, at: float, action: Callable[[], None]) -> Timer:
        timer = Timer(at, action)
        with self._lock:
            if len(self._heap) > 64 and self._is_mostly_cancelled():
                self._heap = [entry for entry in self._heap if entry[2].action is not None]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, (at, next(self._numbers), timer))
            if self._heap[0][2] is timer:
                self._changed.notify()
            self.start()
        return timer

    def socket_timeout(self, until: float) -> float | None:
        return max(until - self.now(), 0.001)

    def wait(self, event: Latch) -> None:
        event.wait()

    def _is_mostly_cancelled(self) -> bool:
        # Looked at only now and then: counting costs as much as dropping.
        if next(self._numbers) % len(self._heap):
            return False
        return sum(entry[2].action is None for entry in self._heap) * 2 > len(self._heap)

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        """The next action that is due, or None when the thread has nothing to wait for."""
        idle_since = self.now()
        with self._lock:
            while True:
                now = self.now()
                while self._heap and self._heap[0][2].action is None:
                    heapq.heappop(self._heap)
                if self._heap or self._is_needed():
                    idle_since = now
                elif now - idle_since >= LINGER:
                    self._thread = None
                    return None
                if self._heap and self._heap[0][0] <= now:
                    return heapq.heappop(self._heap)[2].taken()
                next_at = self._heap[0][0] if self._heap else now + _SLICE
                self._changed.wait(min(next_at - now, _SLICE))


class Workers:
    """Threads that carry out jobs, the most urgent first.  `is_needed` keeps one of them."""

    def __init__(self, most: int, is_needed: Callable[[], bool], name: str) -> None:
        self._most = most
        self._is_needed = is_needed
        self._name = name
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._idle = 0

    def start(self) -> None:
        """See that there is one; RuntimeError where it cannot be started."""
        with self._lock:
            if not self._threads:
                self._add()

    def submit(self, job: Callable[[], object], *, urgency: float = 0.0) -> None:
        """Do it soon, the lowest `urgency` first.  RuntimeError where there is no thread for it."""
        with self._lock:
            heapq.heappush(self._jobs, (urgency, next(self._numbers), job))
            if self._idle >= len(self._jobs):
                self._changed.notify()
            elif len(self._threads) < self._most:
                try:
                    self._add()
                except RuntimeError:
                    if not self._threads:
                        self._jobs.clear()
                        raise
                    # The threads that there are will come to it.

    @property
    def are_busy(self) -> bool:
        """Whether a job has to wait for another one's end."""
        with self._lock:
            return len(self._threads) == self._most and self._idle < len(self._jobs)

    def _add(self) -> None:
        thread = _thread(self._run, self._name)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # after an interrupt it may run all the same, uncounted, and leaves
            self._threads.discard(thread)
            raise

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # an idle thread keeps nothing alive

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            while not self._jobs:
                self._idle += 1
                woken = self._changed.wait(LINGER)
                self._idle -= 1
                if not (woken or self._jobs or (self._is_needed() and len(self._threads) == 1)):
                    self._threads.discard(threading.current_thread())
                    return None
            return heapq.heappop(self._jobs)[2]


def _thread(run: Callable[[], object], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def _nothing() -> None:
    """What a timer does that was cancelled while it became due."""
