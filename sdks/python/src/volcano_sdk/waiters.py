"""How the sync flavour waits: calls that wait on their own threads, and a thread for each stream.

    call ── joins ──> waiting ──> stream wanted ──> "volcano-events": opens it, reads it
      ^                  │                              │
      └── its turn ──────┴───── event, end ─────────────┘

There is one such thread while somebody waits, and two for a moment when a wider stream takes the
place of a narrower one.  The async twin is in async_waiters.py.
"""

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

from volcano_sdk.errors import TransportError, VolcanoError
from volcano_sdk.lease import LockState
from volcano_sdk.operations import Answer, Failure, Try
from volcano_sdk.subscription import SILENCE, Subscription, refusal
from volcano_sdk.threads import Latch, Timer
from volcano_sdk.transport import EventStream
from volcano_sdk.waiting import Turn, Waiter, Waiting

if TYPE_CHECKING:
    from volcano_sdk.runtime import Runtime

_log = logging.getLogger("volcano_sdk")


class _Reader:
    """Who opens one stream and reads it; `stream`: once it is open."""

    def __init__(self, subscription: Subscription, attempt: Try) -> None:
        self.subscription = subscription
        self.attempt = attempt
        self.stream: EventStream | None = None


class Waiters:
    """Of one client.  Thread-safe by the runtime's lock."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._waiting = Waiting(runtime.jitter)
        self._readers: dict[Subscription, _Reader] = {}
        self._timer: Timer | None = None

    # --- calls -----------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> None:
        with self._runtime.lock:
            self._waiting.join(waiter, self._runtime.timers.now())
            self._arrange()

    def leave(self, waiter: Waiter, *, got_it: bool) -> None:
        """May be called again, when it was interrupted."""
        with self._runtime.lock:
            self._waiting.leave(waiter, self._runtime.timers.now(), got_it=got_it)
            self._arrange()

    def turn(self, waiter: Waiter) -> Turn:
        """Wait until it is this one's turn, and for what.  RuntimeError: the client was closed."""
        timers = self._runtime.timers
        while True:
            latch, timer = Latch(), None
            with self._runtime.lock:
                self._runtime.refuse_closed()
                turn = self._waiting.turn(waiter, timers.now())
                if isinstance(turn, Turn):
                    return turn
                waiter.wake = latch.set
            try:
                if turn < inf:
                    timer = timers.call_at(turn, latch.set)
                timers.wait(latch)
            finally:
                if timer is not None:
                    timer.cancel()

    def failed(self, waiter: Waiter, error: VolcanoError) -> None:
        """Its try or read; raises what is final."""
        with self._runtime.lock:
            self._waiting.failed(waiter, error, self._runtime.timers.now())

    def read(self, waiter: Waiter, state: LockState) -> None:
        with self._runtime.lock:
            timers = self._runtime.timers
            self._waiting.read(waiter, state, timers.now(), timers.wall())

    def close(self) -> None:
        """The client is closed: nobody waits any more, and no stream stays; the lock is held."""
        self._waiting.wake_all()
        for reader in self._readers.values():
            self._shut(reader)
        self._disarm()

    # --- streams; the lock is held ---------------------------------------------------------------

    def _arrange(self) -> None:
        """Let the streams follow what is wanted."""
        for reader in self._readers.values():
            if not self._waiting.uses(reader.subscription):
                self._shut(reader)
        self._disarm()
        now = self._runtime.timers.now()
        while not self._runtime.is_closed and (at := self._waiting.open_at) < inf:
            if at > now:
                self._timer = self._runtime.timers.call_at(at, self._on_time)
                break
            self._open(now)

    def _open(self, now: float) -> None:
        subscription = self._waiting.open()
        attempt = subscription.attempt(
            timeout=self._runtime.settings.timeout,
            request_id=str(uuid4()),
            service_key=self._runtime.settings.credential,
        )
        reader = _Reader(subscription, attempt)
        try:
            self._runtime.readers.submit(partial(self._run, reader))
            self._readers[subscription] = reader
        except RuntimeError as error:
            _log.warning("no thread can be started for events: the keys are read now and then")
            self._waiting.ended(subscription, TransportError(str(error)), now)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        with self._runtime.lock:
            self._arrange()

    def _shut(self, reader: _Reader) -> None:
        if reader.stream is not None:
            reader.stream.shut()
        else:
            self._runtime.transport.abandon(reader.attempt)

    # --- on a thread for events ------------------------------------------------------------------

    def _run(self, reader: _Reader) -> None:
        error: VolcanoError | None
        try:
            error = self._stream(reader)
        except VolcanoError as broken:
            error = broken
        except Exception as broken:  # noqa: BLE001
            # An injected client may raise anything; the keys are read meanwhile.
            _log.exception("a stream of events failed in an unexpected way")
            error = TransportError(f"watch failed: {broken!r}")
        with self._runtime.lock:
            del self._readers[reader.subscription]
            self._waiting.ended(reader.subscription, error, self._runtime.timers.now())
            self._arrange()

    def _stream(self, reader: _Reader) -> VolcanoError | None:
        """Open it and read it to its end; why it was not opened, if it was not."""
        timers, subscription = self._runtime.timers, reader.subscription
        opened = self._runtime.transport.stream(reader.attempt)
        if isinstance(opened, Answer | Failure):
            return refusal(reader.attempt.request, opened)
        try:
            with self._runtime.lock:
                reader.stream = opened
                self._waiting.opened(subscription, timers.now())
                self._arrange()  # others are over now, or this one is
            while self._is_used(subscription) and (chunk := opened.read(timers.now() + SILENCE)):
                with self._runtime.lock:
                    events = subscription.received(chunk)
                    self._waiting.heard(subscription, events, timers.now())
            return None
        finally:
            opened.close()

    def _is_used(self, subscription: Subscription) -> bool:
        with self._runtime.lock:
            return not self._runtime.is_closed and self._waiting.uses(subscription)
