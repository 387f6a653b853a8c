"""What the sync tests of waiting share: real threads, time that the test moves, a scripted wire.

The driver of the conformance suite has the means: its clock knows when every thread is at rest.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sync_driver import Activity, ObservedWorkers, VirtualTimers
from sync_stage import GOOD, SETTINGS, Interrupted, Sent

from volcano_sdk.lane import Shield
from volcano_sdk.locks import Locks
from volcano_sdk.operations import Outcome, Try
from volcano_sdk.runtime import Runtime
from volcano_sdk.threads import MOST_WORKERS, Latch
from volcano_sdk.transport import EventStream

NOON = "2026-12-01T12:00:00.000Z"


class Stream:
    """An open stream of events, at whose other end the test is."""

    def __init__(self, stage: "ThreadsStage", attempt: Try) -> None:
        self._stage = stage
        self._chunks: list[bytes] = []
        self._came = Latch()
        self.path = attempt.request.path
        self.last_id = attempt.request.headers.get("Last-Event-ID")
        self.is_shut = False
        self._is_closed = False

    def is_open(self) -> bool:
        return not self._is_closed

    def say(self, text: str) -> None:
        """What the server sends; nothing: it ends the stream."""
        self._chunks.append(text.encode())
        self._came.set()
        self._stage.settle()

    def tell(self, kind: str, key: str = "k", watchers: int = 1, number: int = 1) -> None:
        data = f'{{"key":"{key}","fencing_token":7,"at":"{NOON}","watchers":{watchers}}}'
        self.say(f"event: {kind}\nid: {number}\ndata: {data}\n\n")

    def read(self, until: float) -> bytes:
        timers = self._stage.timers
        silence = timers.call_at(until, self._came.set)
        self._stage.activity.wait(self._came)
        silence.cancel()
        self._came = Latch()
        if self.is_shut or not self._chunks:
            return b""
        return self._chunks.pop(0)

    def shut(self) -> None:
        self.is_shut = True
        self._came.set()

    def close(self) -> None:
        assert self.is_open()
        self._is_closed = True


class Wire:
    """Answers by script, per operation and in order; well where the script is over.

    `stream`: without a script, a stream is opened.  `held_up`: opening waits for it.
    """

    def __init__(self, stage: "ThreadsStage") -> None:
        self._stage = stage
        self._lock = threading.Lock()
        self.script: dict[str, list[Any]] = {}
        self.sent: list[Sent] = []
        self.streams: list[Stream] = []
        self.abandoned: list[str] = []
        self.held_up: Latch | None = None
        self.is_closed = False

    def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
        step: Any = self._step(attempt) or GOOD[attempt.request.operation]
        if shield is not None:
            shield.reached = True
        if isinstance(step, Interrupted):
            assert shield is not None
            shield.interrupt = step.interrupt
            step = step.then
        said: Outcome = step(self._stage.timers.now())
        return said

    def stream(self, attempt: Try) -> EventStream | Outcome:
        step = self._step(attempt)
        if self.held_up is not None:
            self._stage.activity.wait(self.held_up)
        if step is not None:
            said: Outcome = step(self._stage.timers.now())
            return said
        self.streams.append(Stream(self._stage, attempt))
        return self.streams[-1]

    def abandon(self, attempt: Try) -> None:
        self.abandoned.append(attempt.request.operation)
        if self.held_up is not None:
            self.held_up.set()

    def close(self) -> None:
        self.is_closed = True

    def forget(self) -> None: ...

    def operations(self) -> list[str]:
        return [one.operation for one in self.sent]

    def summary(self) -> str:
        return " ".join(self.operations())

    def of(self, operation: str) -> list[Sent]:
        return [one for one in self.sent if one.operation == operation]

    def _step(self, attempt: Try) -> Any:
        request = attempt.request
        with self._lock:
            self.sent.append(
                Sent(
                    request.operation,
                    self._stage.timers.now(),
                    request.headers.get("X-Volcano-Lock-Token"),
                    request.request_id,
                    attempt.timeout,
                    request.body,
                    request.path.partition("/locks/")[2].partition("/")[0],
                )
            )
            steps = self.script.get(request.operation)
            return steps.pop(0) if steps else None


class Call:
    """What a thread of the test's does."""

    def __init__(self, stage: "ThreadsStage", work: Callable[[], object]) -> None:
        self._stage = stage
        self._work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        stage.activity.begins()
        self.thread.start()
        stage.settle()

    def _run(self) -> None:
        try:
            self.value = self._work()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error
        finally:
            self.is_over = True
            self._stage.activity.ends()


class ThreadsStage:
    """One client's locks."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.timers = VirtualTimers(self.activity, NOON)
        self.wire = Wire(self)
        self.runtime = Runtime(
            SETTINGS,
            timers=self.timers,
            transport=lambda timers: self.wire,
            jitter=lambda: 0.0,
        )
        self.runtime.workers = ObservedWorkers(MOST_WORKERS, "worker", self.activity)
        self.runtime.readers = ObservedWorkers(2, "events", self.activity)
        self.locks = Locks(self.runtime)

    def call(self, work: Callable[[], object]) -> Call:
        return Call(self, work)

    def script(self, **steps: list[Any]) -> None:
        self.wire.script.update(steps)

    def settle(self) -> None:
        self.activity.wait_quiet()

    def advance(self, seconds: float) -> None:
        self.timers.advance(seconds, blocked=False)

    def sleeps(self) -> list[float]:
        return sorted(round(length, 6) for length in self.timers.lengths())


@pytest.fixture
def threads() -> Iterator[ThreadsStage]:
    """At its end nothing may be left running or waiting, and no stream open."""
    made = ThreadsStage()
    yield made
    made.settle()
    assert made.runtime.running == {}
    assert made.sleeps() == []
    assert not any(stream.is_open() for stream in made.wire.streams)
