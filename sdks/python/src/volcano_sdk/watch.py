"""What `watch` of the sync flavour returns: the events of locks, one after the other."""

import logging
import threading
from collections import deque
from types import TracebackType
from typing import Literal, Self

from volcano_sdk.errors import ServerError, VolcanoError
from volcano_sdk.events import Filters, LockEvent
from volcano_sdk.operations import Answer, Failure, Try
from volcano_sdk.runtime import Runtime, new_uuid
from volcano_sdk.subscription import SILENCE, Subscription, is_passing, refusal
from volcano_sdk.threads import Latch
from volcano_sdk.transport import EventStream

_log = logging.getLogger("volcano_sdk")


class LockWatch:
    """An iterator over LockEvents without an end, over a connection of its own.

        with client.locks.watch(prefix="ticket:") as events:
            for event in events:
                ...

    A lost connection is made again, and goes on behind the last event.  `close`, from any thread,
    ends the iteration and the connection; so do leaving the `with`, closing the client, dropping
    the iterator, and an error that comes out of it.
    """

    def __init__(self, runtime: Runtime, filters: Filters) -> None:
        self._runtime = runtime
        self._subscription = Subscription(filters)
        self._events: deque[LockEvent] = deque()
        self._lock = threading.Lock()  # whoever has it, may use the stream
        self._stream: EventStream | None = None
        self._attempt: Try | None = None
        self._pause: Latch | None = None
        self._is_closed = False
        runtime.watches.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LockEvent:
        try:
            with self._lock:
                while not self._events:
                    if self._is_over:
                        raise StopIteration
                    self._go_on()
                event = self._events.popleft()
        except BaseException:
            self._is_closed = True
            self._leave()
            raise
        if self._is_closed:  # meanwhile: who did it could not leave
            self._leave()
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        self.close()
        return False

    def __del__(self) -> None:
        if self._stream is not None:
            try:
                # Not here: this may run anywhere, whatever lock its thread holds.
                self._runtime.timers.call_at(self._runtime.timers.now(), self._stream.close)
            except RuntimeError:
                pass  # the interpreter is going down

    def __repr__(self) -> str:
        filters = self._subscription.filters
        return f"<LockWatch key={list(filters.keys)} prefix={list(filters.prefixes)}>"

    def close(self) -> None:
        """End it.  An iteration that waits on another thread ends, too."""
        self._is_closed = True
        self.shut()
        self._leave()

    def shut(self) -> None:
        """Whatever it waits for, it waits no longer."""
        stream, attempt, pause = self._stream, self._attempt, self._pause
        if stream is not None:
            stream.shut()
        elif attempt is not None:
            self._runtime.transport.abandon(attempt)
        if pause is not None:
            pause.set()

    def become_childs(self) -> None:
        """In the child of a fork: the connection is the parent's.  No lock of before is touched."""
        self._lock = threading.Lock()
        self._stream = self._attempt = self._pause = None

    def _leave(self) -> None:
        """Close the stream, unless it is being used: its user will do it."""
        if self._lock.acquire(blocking=False):
            try:
                self._close_stream()
            finally:
                self._lock.release()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._runtime.is_closed

    # --- whoever has the lock --------------------------------------------------------------------

    def _go_on(self) -> None:
        """Open the stream, or read what comes next."""
        error: VolcanoError | None = None
        try:
            if self._stream is None:
                error = self._open()
            elif chunk := self._stream.read(self._runtime.timers.now() + SILENCE):
                self._events.extend(self._subscription.received(chunk))
            else:
                self._close_stream()
        except ServerError as useless:
            error = useless
            self._close_stream()
        if error is not None and not is_passing(error):
            raise error
        if self._stream is None and not self._is_over:
            self._wait(self._subscription.ended(error, self._runtime.jitter), error)

    def _open(self) -> VolcanoError | None:
        """Why there is no stream, if there is none."""
        self._attempt = self._subscription.attempt(
            timeout=self._runtime.settings.timeout,
            request_id=new_uuid(),
            service_key=self._runtime.settings.credential,
        )
        opened = self._runtime.transport.stream(self._attempt)
        if isinstance(opened, Answer | Failure):
            return refusal(self._attempt.request, opened)
        self._stream = opened
        self._events.extend(self._subscription.opened())
        if self._is_over:
            opened.shut()
        return None

    def _wait(self, seconds: float, error: VolcanoError | None) -> None:
        level = logging.INFO if self._subscription.was_open else logging.WARNING
        _log.log(level, "events are asked for again in %.1f s: %s", seconds, error or "stream lost")
        timers = self._runtime.timers
        self._pause = pause = Latch()
        timer = timers.call_at(timers.now() + seconds, pause.set)
        try:
            if not self._is_over:
                timers.wait(pause)
        finally:
            timer.cancel()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
