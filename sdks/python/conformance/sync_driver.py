# ruff: noqa: INP001  a program, not a package
"""The sync flavour's driver: one thread a call, and a clock that stands still.

Python interrupts its main thread alone (KeyboardInterrupt), so that thread takes the first call
and can be cancelled in it; the commands are read by another.

Quiet: every thread of the SDK is idle, that is, it waits for a timer, for an answer that was asked
for, for `finish`, or for another thread that is idle itself.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from typing import Any

import driver
from driver import BodyError, UnsupportedError

from volcano_sdk import LockGuard, LockLease, LockWatch
from volcano_sdk.lane import Connection, Lane, Shield
from volcano_sdk.locks import Locks
from volcano_sdk.operations import Answer, Failure, Outcome, Try
from volcano_sdk.runtime import Runtime
from volcano_sdk.settings import Settings
from volcano_sdk.threads import MOST_WORKERS, Latch, Timer, Timers, Workers
from volcano_sdk.transport import EventStream, Lanes

_PATIENCE = 10.0
"""Real seconds after which a driver that does not become quiet is at fault."""

_ROUNDING = 1e-9
"""Seconds: sums of fractions do not come out even."""

_CAPABILITIES = [
    "with_lock",
    "direct_calls",
    "pushed_loss",
    "cancel",
    "close",
    "renew_many",
    "wait",
    "events",
]


class Activity:
    """Who is busy."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0
        self._awaited: list[Latch] = []
        self._is_interrupting = False
        self._reading: set[Lane] = set()
        self._shut: set[Lane] = set()  # of these, and their readers have not seen it yet
        self.in_flight = 0
        self.streams: set[ObservedStream] = set()

    def begins(self) -> None:
        self._count(1)

    def ends(self) -> None:
        self._count(-1)

    @contextlib.contextmanager
    def reading(self, lane: Lane) -> Iterator[None]:
        """A thread that reads from the server has sent all that it had to send: it is idle."""
        with self._changed:
            self._busy -= 1
            self._reading.add(lane)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._reading.discard(lane)
                if lane in self._shut:
                    self._shut.discard(lane)
                else:
                    self._busy += 1
            self.interrupt_was_seen()

    def shut(self, lane: Lane) -> None:
        """Its reader, if there is one, is about to see it."""
        with self._changed:
            if lane in self._reading and lane not in self._shut:
                self._shut.add(lane)
                self._busy += 1

    def wait(self, event: Latch) -> None:
        """Wait for it, idle as long as it is not set."""
        with self._changed:
            self._busy -= 1
            self._awaited.append(event)
            self._changed.notify_all()
        try:
            event.wait()
        finally:
            with self._changed:
                self._busy += 1
                self._awaited.remove(event)
            self.interrupt_was_seen()

    def interrupt(self) -> None:
        """Interrupt the main thread; nothing is quiet until it has seen it."""
        self._is_interrupting = True
        self._count(1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def interrupt_was_seen(self) -> None:
        """By the main thread, if there was one."""
        if self._is_interrupting and threading.current_thread() is threading.main_thread():
            self._is_interrupting = False
            self._count(-1)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        with self._changed:
            self.in_flight += 1
        try:
            yield
        finally:
            with self._changed:
                self.in_flight -= 1

    def wait_quiet(self) -> None:
        with self._changed:
            if not self._changed.wait_for(self._is_quiet, _PATIENCE):
                raise RuntimeError(f"not quiet: {self._busy} threads are busy")

    def _is_quiet(self) -> bool:
        return self._busy == 0 and not any(event.is_set() for event in self._awaited)

    def _count(self, change: int) -> None:
        with self._changed:
            self._busy += change
            self._changed.notify_all()


class VirtualTimers:
    """The SDK's seam of time, moved by `advance` alone."""

    def __init__(self, activity: Activity, wall: str) -> None:
        self._activity = activity
        self._lock = threading.Lock()
        self._now = 0.0
        self._wall = datetime.fromisoformat(wall).timestamp()
        self._numbers = itertools.count()
        self._pending: list[tuple[float, int, float, Timer]] = []  # at, number, length, timer

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall + self._now

    def start(self) -> None:
        """No thread is needed."""

    def call_at(self, at: float, action: Callable[[], None]) -> Timer:
        timer = Timer(at, action)
        with self._lock:
            self._pending.append((at, next(self._numbers), at - self._now, timer))
        return timer

    def socket_timeout(self, until: float) -> float | None:  # noqa: ARG002
        return None

    def wait(self, event: Latch) -> None:
        self._activity.wait(event)

    def lengths(self) -> list[float]:
        with self._lock:
            self._drop_cancelled()
            return [length for _, _, length, _ in self._pending]

    def advance(self, seconds: float, *, blocked: bool) -> None:
        end = round(self._now + seconds, 9)  # many small steps end where one large one does
        if not blocked:
            self._activity.wait_quiet()
            while (timer := self._next(end)) is not None:
                self._now = max(self._now, timer.at)
                timer.taken()()
                self._activity.wait_quiet()
        self._now = max(self._now, end)

    def _next(self, end: float) -> Timer | None:
        with self._lock:
            self._drop_cancelled()
            self._pending.sort(key=lambda entry: entry[:2])
            if self._pending and self._pending[0][0] <= end + _ROUNDING:
                return self._pending.pop(0)[3]
            return None

    def _drop_cancelled(self) -> None:
        self._pending = [entry for entry in self._pending if entry[3].action is not None]


class ObservedLanes(Lanes):
    """The SDK's own connections, counted."""

    def __init__(self, settings: Settings, timers: Timers, activity: Activity) -> None:
        super().__init__(settings, timers)
        self._activity = activity
        self._is_dropped = threading.Event()

    def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
        self._wait_for_ever_if_dropped()
        with self._activity.exchange():
            outcome = super().exchange(attempt, shield=shield)
        self._wait_for_ever_if_dropped()
        return outcome

    def stream(self, attempt: Try) -> EventStream | Outcome:
        self._wait_for_ever_if_dropped()
        with self._activity.exchange():
            opened = super().stream(attempt)
            if not isinstance(opened, Answer | Failure):
                opened = ObservedStream(opened, self._activity)
        return opened

    def drop(self) -> None:
        """Close the sockets; whoever uses them is left where it is."""
        self._is_dropped.set()
        self.close()

    def _wait_for_ever_if_dropped(self) -> None:
        if self._is_dropped.is_set():
            threading.Event().wait()


class ObservedStream:
    """An open stream of events; `taken`: how many bytes of it have come."""

    def __init__(self, stream: EventStream, activity: Activity) -> None:
        self._stream = stream
        self._activity = activity
        self.shut = stream.shut
        self.taken = 0
        activity.streams.add(self)

    def read(self, until: float) -> bytes:
        chunk = self._stream.read(until)
        self.taken += len(chunk)
        if not chunk:
            self._activity.streams.discard(self)
        return chunk

    def close(self) -> None:
        self._stream.close()
        self._activity.streams.discard(self)


class ObservedWorkers(Workers):
    def __init__(self, most: int, name: str, activity: Activity) -> None:
        super().__init__(most, bool, name)
        self._activity = activity

    def submit(self, job: Callable[[], object], *, urgency: float = 0.0) -> None:
        def observed() -> None:
            try:
                job()
            finally:
                self._activity.ends()

        self._activity.begins()
        super().submit(observed, urgency=urgency)


class Driver:
    """One client and what is running on it; a second `hello` makes a new one."""

    def __init__(
        self, command: dict[str, Any], main_calls: "SimpleQueue[Callable[[], None]]"
    ) -> None:
        self._main_calls = main_calls
        self._mains: str | None = None
        """The call that the main thread is in."""
        self.activity = Activity()
        is_virtual = command["clock"] == "virtual"
        self._timers = VirtualTimers(self.activity, command["now"]) if is_virtual else None
        settings = Settings.resolve(
            api_url=command["base_url"],
            service_key=command["service_key"] or "",
            timeout=command.get("timeout"),
            trust_env=False,
        )
        self._runtime = Runtime(settings, timers=self._timers, transport=self._observed(settings))
        if self._timers is not None:
            self._runtime.workers = ObservedWorkers(MOST_WORKERS, "worker", self.activity)
            self._runtime.callbacks = ObservedWorkers(1, "callbacks", self.activity)
            self._runtime.readers = ObservedWorkers(2, "events", self.activity)
        self._locks = Locks(self._runtime)
        self.after_reply: Callable[[], None] = _nothing
        self._finishes: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, Latch] = {}
        self._guards: dict[str, LockGuard] = {}
        self._leases: dict[str, LockLease] = {}
        self._watches: dict[str, LockWatch] = {}

    def _observed(self, settings: Settings) -> Callable[[Timers], Lanes]:
        def transport(timers: Timers) -> Lanes:
            self._lanes = ObservedLanes(settings, timers, self.activity)
            return self._lanes

        return transport

    @property
    def holds_main(self) -> bool:
        return self._mains is not None

    def drop(self) -> None:
        """Forget everything, without a request."""
        self._lanes.drop()

    def command(self, command: dict[str, Any]) -> dict[str, Any]:
        """The reply's `ok`; what must not begin before the reply is left to `after_reply`."""
        name = command["cmd"]
        match name:
            case "with_lock":
                self._ended[command["call"]] = Latch()
                self._start(command, self._with_lock)
            case "acquire" | "renew" | "release" | "get" | "force_release" | "close" | "watch":
                self._start(command, getattr(self, f"_{name}"))
            case "finish":
                self._finishes[command["call"]] = command
                self.after_reply = self._ended[command["call"]].set
            case "look":
                return self._look(command)
            case "sleeping":
                timers = self._virtual()
                self.activity.wait_quiet()
                return {
                    "seconds": timers.lengths(),
                    "in_flight": self.activity.in_flight,
                    "streaming": [stream.taken for stream in self.activity.streams],
                }
            case "advance":
                blocked = command.get("blocked", False)
                self._virtual().advance(command["seconds"], blocked=blocked)
            case "cancel" if command["call"] in self._watches:
                self.after_reply = self._watches[command["call"]].close
            case "cancel":
                if command["call"] != self._mains:
                    raise UnsupportedError("only the main thread of Python can be interrupted")
                self.after_reply = self.activity.interrupt
            case _:
                raise UnsupportedError(f"no command {name!r} here")
        return {}

    def _virtual(self) -> VirtualTimers:
        if self._timers is None:
            raise UnsupportedError("the clock is real")
        return self._timers

    def _look(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._timers is not None:
            self.activity.wait_quiet()
        guard = self._guards[command["call"]]
        lost = guard.lost
        lease = driver.described(guard.lease)
        return {"lost": lost, **{name: lease[name] for name in ("fencing_token", "expires_at")}}

    def _start(self, command: dict[str, Any], call: Callable[[dict[str, Any]], object]) -> None:
        def run() -> None:
            try:
                value = call(command)
            except BaseException as error:  # noqa: BLE001  it is reported, whatever it is
                driver.raised("raised", command["call"], error, KeyboardInterrupt)
            else:
                driver.returned(command["call"], value)
            finally:
                if self._mains == command["call"]:
                    self._mains = None
                self.activity.interrupt_was_seen()
                self.activity.ends()

        self.activity.begins()
        if self._mains is None:
            self._mains = command["call"]
            self.after_reply = partial(self._main_calls.put, run)
        else:
            self.after_reply = threading.Thread(target=run, daemon=True).start

    # --- calls, each on a thread of its own --------------------------------------------------

    def _with_lock(self, command: dict[str, Any]) -> object:
        call = command["call"]
        with self._locks.with_lock(command["key"], **driver.options(command)) as guard:
            self._guards[call] = guard
            lease = driver.described(guard.lease)
            lease.pop("key")
            driver.emit(event="entered", call=call, **lease)
            guard.on_lost(lambda loss: driver.raised("lost", call, loss, KeyboardInterrupt))
            try:
                self.activity.wait(self._ended[call])
            except KeyboardInterrupt:
                self.activity.wait(self._ended[call])  # a body ends on `finish` alone
                if "raise" not in self._finishes[call]:
                    raise
            finish = self._finishes[call]
            if "raise" in finish:
                raise BodyError(finish["raise"])
        return finish["return"]

    def _acquire(self, command: dict[str, Any]) -> LockLease:
        lease = self._locks.acquire(command["key"], **driver.options(command))
        self._leases[command["call"]] = lease
        return lease

    def _renew(self, command: dict[str, Any]) -> LockLease:
        lease = self._lease(command)
        renewed = self._locks.renew(command["key"], lease, **driver.options(command))
        self._leases[command["call"]] = renewed
        return renewed

    def _release(self, command: dict[str, Any]) -> None:
        self._locks.release(command["key"], self._lease(command), **driver.options(command))

    def _get(self, command: dict[str, Any]) -> object:
        return self._locks.get(command["key"], **driver.options(command))

    def _force_release(self, command: dict[str, Any]) -> None:
        self._locks.force_release(command["key"], **driver.options(command))

    def _watch(self, command: dict[str, Any]) -> None:
        call = command["call"]
        self._watches[call] = watch = self._locks.watch(**driver.filters(command))
        for event in watch:
            driver.watched(call, event)

    def _close(self, command: dict[str, Any]) -> None:  # noqa: ARG002
        self._runtime.close()

    def _lease(self, command: dict[str, Any]) -> LockLease:
        lease = command["lease"]
        return self._leases[lease] if isinstance(lease, str) else driver.lease_from(lease)


def main() -> None:
    """Carry out what the commands leave to the main thread, until stdin ends."""
    # A shell's background job ignores SIGINT, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    while True:
        calls.get()()


def _read(calls: "SimpleQueue[Callable[[], None]]") -> None:
    current: Driver | None = None
    _observe_reads(lambda: current)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["cmd"] == "hello":
                if current is not None:
                    current.drop()
                    if current.holds_main:
                        raise UnsupportedError("the main thread is still in a call")
                current = Driver(command, calls)
                virtual = ["virtual_clock"] if command["clock"] == "virtual" else []
                driver.reply(command["id"], driver.hello("python", _CAPABILITIES + virtual))
            elif current is None:
                driver.emit(id=command["id"], error="hello must come first")
            else:
                driver.reply(command["id"], current.command(command))
                current.after_reply()
                current.after_reply = _nothing
        except UnsupportedError as reason:
            driver.emit(id=command["id"], unsupported=str(reason))
        except Exception as error:  # noqa: BLE001  the protocol has a word for it
            driver.emit(id=command["id"], error=f"{type(error).__name__}: {error}")
    os._exit(0)  # whatever the SDK is doing


def _nothing() -> None:
    """Nothing was left for after the reply."""


def _observe_reads(current: Callable[[], Driver | None]) -> None:
    read = Connection.read

    def observed(stream: Any, max_bytes: int, timeout: float | None = None) -> bytes:
        active = current()
        assert active is not None
        with active.activity.reading(stream._lane):  # noqa: SLF001  no seam but here
            return read(stream, max_bytes, timeout)

    Connection.read = observed  # type: ignore[assignment, method-assign]
    shut = Lane._shut  # noqa: SLF001  as above

    def observed_shut(lane: Lane) -> None:
        active = current()
        assert active is not None
        active.activity.shut(lane)
        shut(lane)

    Lane._shut = observed_shut  # type: ignore[assignment, method-assign]  # noqa: SLF001  as above
    holds_back = Lane.holds_back

    def observed_holding(lane: Any, error: BaseException) -> bool:
        is_held = holds_back(lane, error)
        active = current()
        assert active is not None
        active.activity.interrupt_was_seen()
        return is_held

    Lane.holds_back = observed_holding  # type: ignore[assignment, method-assign]
