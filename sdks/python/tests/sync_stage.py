"""What the sync tests share: time that they move, threads that run when told, a scripted transport.

Everything runs on the test's own thread.  A hanging exchange moves the time to the end of its try,
and whatever is due on the way happens on the way.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from many import Items, keys

from volcano_sdk.errors import TransportError
from volcano_sdk.lane import Shield
from volcano_sdk.locks import Locks
from volcano_sdk.operations import Answer, Failure, Outcome, Try
from volcano_sdk.runtime import Runtime
from volcano_sdk.settings import Settings
from volcano_sdk.threads import Latch, Timer, Workers

START = 100.0
WALL = 1_700_000_000.0
SETTINGS = Settings("http://volcano.test", service_key="sk-stage")
Said = Callable[[float], Outcome]
Step = Said | Items


class ManualTimers:
    """The seam of time; `after` runs after each action, as the worker threads would."""

    def __init__(self) -> None:
        self.time = START
        self.after: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self.pending: list[tuple[float, int, Timer]] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return WALL + self.time

    def start(self) -> None: ...

    def call_at(self, at: float, action: Callable[[], None]) -> Timer:
        timer = Timer(at, action)
        self.pending.append((at, next(self._numbers), timer))
        return timer

    def socket_timeout(self, until: float) -> float | None:
        return None

    def wait(self, event: Latch) -> None:
        self.after()
        while not event.is_set():
            assert self._run_next(float("inf")), "waits for what never comes"

    def advance_to(self, end: float) -> None:
        self.after()
        while self._run_next(end):
            pass
        self.time = max(self.time, end)

    def due(self) -> list[float]:
        """When timers are due, from now on."""
        return sorted(at - self.time for at, _, timer in self.pending if timer.action is not None)

    def _run_next(self, end: float) -> bool:
        self.pending = sorted(entry for entry in self.pending if entry[2].action is not None)
        if not self.pending or self.pending[0][0] > end:
            return False
        at, _, timer = self.pending.pop(0)
        self.time = max(self.time, at)
        timer.taken()()
        self.after()
        return True


class ManualWorkers(Workers):
    """Jobs wait until `run_all`."""

    def __init__(self) -> None:
        super().__init__(0, bool, "manual")
        self.jobs: list[Callable[[], object]] = []
        self.refuses = False
        self.busy = False

    @property
    def are_busy(self) -> bool:
        return self.busy

    def start(self) -> None:
        if self.refuses:
            raise RuntimeError("can't start new thread")

    def submit(self, job: Callable[[], object], *, urgency: float = 0.0) -> None:
        self.start()
        self.jobs.append(job)

    def run_all(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


@dataclass
class Sent:
    operation: str
    at: float
    token: str | None
    request_id: str
    timeout: float
    body: bytes
    key: str

    @property
    def keys(self) -> list[str]:
        """Those of the leases that it is about."""
        return keys(self.body) or [self.key]


@dataclass
class ScriptedTransport:
    """Answers by script, per operation and in order; well where the script is over."""

    timers: ManualTimers
    script: dict[str, list[Step]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    is_closed: bool = False
    forgot: int = 0
    abandoned: list[str] = field(default_factory=list)  # the paths of tries

    def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
        request, now = attempt.request, self.timers.now()
        self.sent.append(
            Sent(
                request.operation,
                now,
                request.headers.get("X-Volcano-Lock-Token"),
                request.request_id,
                attempt.timeout,
                request.body,
                request.path.partition("/locks/")[2].partition("/")[0],
            )
        )
        if shield is not None:
            shield.reached = True
        steps = self.script.get(request.operation)
        step = steps.pop(0) if steps else GOOD[request.operation]
        if step is hang:
            self.timers.advance_to(now + attempt.timeout)
            return Failure(now, TransportError("no answer in time"), reached=True)
        if isinstance(step, Interrupted):
            assert shield is not None
            shield.interrupt = step.interrupt
            step = step.then
        if isinstance(step, Items):
            step = answer(200, step.body(request.body))
        return step(now)

    def stream(self, attempt: Try) -> Outcome:
        """Where it is not about streams, the server has none."""
        return self.exchange(attempt)

    def abandon(self, attempt: Try) -> None:
        self.abandoned.append(attempt.request.path)

    def close(self) -> None:
        self.is_closed = True

    def forget(self) -> None:
        self.forgot += 1

    def operations(self) -> list[str]:
        return [one.operation for one in self.sent]

    def of(self, operation: str) -> list[Sent]:
        return [one for one in self.sent if one.operation == operation]


def answer(status: int, body: str = "", **headers: str) -> Said:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda sent_at: Answer(sent_at, status, named, body.encode())


def granted(status: int, fencing_token: int = 7, **headers: str) -> Said:
    body = f'{{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": {fencing_token}}}'
    return answer(status, body, **headers)


def refused(status: int, code: str = "x", **headers: str) -> Said:
    return answer(status, f'{{"error": "A sentence.", "code": "{code}"}}', **headers)


def lost(sent_at: float) -> Outcome:
    return Failure(sent_at, TransportError("the answer was lost"), reached=True)


def unreachable(sent_at: float) -> Outcome:
    return Failure(sent_at, TransportError("refused"), reached=False)


def hang(sent_at: float) -> Outcome:
    raise AssertionError("the transport knows what to do")


def bang(error: BaseException) -> Said:
    """The thread is interrupted there."""

    def step(sent_at: float) -> Outcome:
        raise error

    return step


class Interrupted:
    """The wait for the answer is interrupted; the shield holds it back and the answer comes."""

    def __init__(self, interrupt: BaseException, then: Step) -> None:
        self.interrupt = interrupt
        self.then = then

    def __call__(self, sent_at: float) -> Outcome:
        raise AssertionError("the transport knows what to do")


HELD = refused(409, "lock_held")
GONE = refused(409, "lock_ownership_lost")
GOOD: dict[str, Step] = {
    "acquire": granted(201),
    "renew": granted(200),
    "renew_many": Items(),
    "release": answer(204),
    "get": answer(200, '{"held": false}'),
    "force_release": answer(204),
    "watch": refused(404, "not_found"),
}


class Stage:
    """One client's locks over a script."""

    def __init__(self) -> None:
        self.timers = ManualTimers()
        self.wire = ScriptedTransport(self.timers)
        self.runtime = Runtime(
            SETTINGS,
            timers=self.timers,
            transport=lambda timers: self.wire,
            jitter=lambda: 0.0,
        )
        self.workers = ManualWorkers()
        self.callbacks = ManualWorkers()
        self.readers = ManualWorkers()
        self.runtime.workers, self.runtime.callbacks = self.workers, self.callbacks
        self.runtime.readers = self.readers
        self.timers.after = self.run_jobs
        self.locks = Locks(self.runtime)

    @property
    def now(self) -> float:
        return self.timers.time

    def run_jobs(self) -> None:
        while self.workers.jobs or self.callbacks.jobs or self.readers.jobs:
            self.workers.run_all()
            self.callbacks.run_all()
            self.readers.run_all()

    def script(self, **steps: list[Step]) -> None:
        self.wire.script.update(steps)

    def advance(self, seconds: float) -> None:
        self.timers.advance_to(self.now + seconds)

    def block(self, seconds: float) -> None:
        """The process stands still: time passes and no timer runs."""
        self.timers.time += seconds


@pytest.fixture
def stage() -> Iterator[Stage]:
    """At its end nothing may be left running or waiting."""
    made = Stage()
    yield made
    made.run_jobs()
    assert made.runtime.running == {}
    assert made.runtime.entering == set()
    assert made.timers.due() == []
