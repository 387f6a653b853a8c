"""A stream of events and those that follow it when it is lost: what to ask for, and when.  Pure.

    opened ── bytes ──> events          lost, refused ── pause ──> opened, behind the last event

docs/semantics.md#waiting, #watching.
"""

from collections.abc import Callable

from volcano_sdk import operations
from volcano_sdk.errors import RateLimitedError, ServerError, TransportError, VolcanoError
from volcano_sdk.events import EventParser, Filters, LockEvent, lock_event
from volcano_sdk.operations import Answer, Failure, Request, Try

SILENCE = 40.0
"""Seconds without a byte, after which a stream counts as lost: a comment comes every 15 s."""

_SHORTEST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


def pause(failures: int, jitter: float, retry_after: float | None = None) -> float:
    """Seconds after the last of so many failures in a row, 1 or more.  `jitter`: -1 to 1."""
    backoff = min(_SHORTEST_PAUSE * 2.0 ** min(failures - 1, 60), _LONGEST_PAUSE)
    return max(backoff * (1 + 0.5 * jitter), retry_after or 0.0)


class Subscription:
    """`was_open`: it was, at least once.  Not thread-safe."""

    def __init__(self, filters: Filters) -> None:
        self.filters = filters
        self.was_open = False
        self._failures = 0
        self._parser = EventParser()

    def attempt(self, *, timeout: float, request_id: str, service_key: str) -> Try:
        """To open it: `timeout` is that of the answer's headers."""
        request = operations.watch(
            self.filters.keys,
            self.filters.prefixes,
            last_id=self._parser.last_id,
            request_id=request_id,
            service_key=service_key,
        )
        return Try(request, timeout)

    def opened(self) -> list[LockEvent]:
        """A stream is there.  One that cannot go on behind the last begins with a `reset`."""
        is_gap = self.was_open and not self._parser.last_id
        self.was_open = True
        self._parser = EventParser(self._parser.last_id)
        return [LockEvent("reset")] if is_gap else []

    def received(self, chunk: bytes) -> list[LockEvent]:
        """The events in it.  ServerError: the stream is of no use."""
        messages = self._parser.feed(chunk)
        if self._parser.heard:
            self._failures = 0
        return [event for message in messages if (event := lock_event(message)) is not None]

    def ended(self, error: VolcanoError | None, jitter: Callable[[], float]) -> float:
        """It was lost, or it was not opened because of `error`: how long to pause, in seconds."""
        self._failures += 1
        return pause(self._failures, jitter(), error.retry_after if error else None)


def refusal(request: Request, outcome: Answer | Failure) -> VolcanoError:
    """Why there is no stream."""
    if isinstance(outcome, Failure):
        return outcome.error
    return operations.not_streamed(request, outcome)


def is_passing(error: VolcanoError) -> bool:
    """Whether asking again may help: no answer, 5xx, 429."""
    return isinstance(error, TransportError | ServerError | RateLimitedError)
