import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from volcano_sdk import threads
from volcano_sdk.clock import SystemClock
from volcano_sdk.threads import Latch, Timer, TimerThread, Workers

PATIENCE = 10.0


def eventually(holds: Callable[[], bool]) -> bool:
    """A bounded wait for what a real thread does."""
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("volcano-")]


@pytest.fixture(autouse=True)
def _short_lingering(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "LINGER", 0.1)
    monkeypatch.setattr(threads, "_SLICE", 0.02)
    yield
    assert eventually(lambda: names() == [])


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# --- timers


def test_timers_run_in_their_order_and_their_thread_goes() -> None:
    timers = TimerThread(SystemClock(), lambda: False)
    ran: list[int] = []
    now = timers.now()

    timers.call_at(now + 0.06, lambda: ran.append(2))
    timers.call_at(now + 0.03, lambda: ran.append(1))
    timers.call_at(now - 5.0, lambda: ran.append(0))
    timers.call_at(now + 0.04, lambda: ran.append(9)).cancel()

    assert eventually(lambda: ran == [0, 1, 2])
    assert eventually(lambda: names() == [])
    timers.call_at(now, lambda: ran.append(3))
    assert eventually(lambda: ran == [0, 1, 2, 3])


def test_the_timer_thread_stays_while_it_is_needed() -> None:
    needed = True
    timers = TimerThread(SystemClock(), lambda: needed)
    timers.start()
    timers.start()

    assert names() == ["volcano-timers"]
    time.sleep(0.25)  # longer than it lingers
    assert names() == ["volcano-timers"]
    needed = False


def test_a_timer_of_90_days_and_one_that_jumped_over_are_no_trouble() -> None:
    class Clock:
        time = 0.0

        def now(self) -> float:
            return self.time

        def wall(self) -> float:
            return self.time

    clock = Clock()
    needed = True
    timers = TimerThread(clock, lambda: needed)
    ran = threading.Event()
    timers.call_at(90 * 86_400.0, ran.set)
    assert not ran.wait(0.05)

    clock.time = 91 * 86_400.0  # a suspend: no waiting thread was told
    assert ran.wait(PATIENCE)
    needed = False

    def has_gone() -> bool:
        clock.time += 1.0
        return names() == []

    assert eventually(has_gone)


def test_timers_that_were_cancelled_do_not_pile_up() -> None:
    needed = True
    timers = TimerThread(SystemClock(), lambda: needed)
    far = timers.now() + 1e6
    kept = timers.call_at(far, lambda: None)
    for _ in range(5000):
        timers.call_at(far, lambda: None).cancel()

    assert len(timers._heap) < 500
    kept.cancel()
    needed = False


def test_many_live_timers_are_kept() -> None:
    timers = TimerThread(SystemClock(), lambda: False)
    far = timers.now() + 1e6
    kept = [timers.call_at(far, lambda: None) for _ in range(500)]

    assert len(timers._heap) == 500
    for timer in kept:
        timer.cancel()


def test_a_timer_runs_once() -> None:
    ran: list[int] = []
    timer = Timer(0.0, lambda: ran.append(1))
    timer.taken()()
    timer.taken()()

    assert ran == [1]


def test_without_a_thread_timers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    timers = TimerThread(SystemClock(), lambda: False)

    with pytest.raises(RuntimeError, match="can't start"):
        timers.start()
    with pytest.raises(RuntimeError, match="can't start"):
        timers.call_at(0.0, lambda: None)


def test_a_socket_may_block_until_the_end_but_never_for_ever() -> None:
    timers = TimerThread(SystemClock(), lambda: False)

    assert timers.socket_timeout(timers.now() - 5) == 0.001
    assert timers.socket_timeout(timers.now() + 5) == pytest.approx(5, abs=0.5)
    latch = Latch()
    latch.set()
    timers.wait(latch)


# --- workers


def test_no_more_threads_than_asked_for_work_at_a_time() -> None:
    workers = Workers(3, lambda: False, "volcano-worker")
    together = threading.Barrier(3)
    go = threading.Event()
    done: list[int] = []

    def job() -> None:
        if len(done) == 0:
            together.wait(PATIENCE)
        go.wait(PATIENCE)
        done.append(1)

    for _ in range(12):
        workers.submit(job)
    assert eventually(lambda: together.broken or len(names()) == 3)
    go.set()
    assert eventually(lambda: len(done) == 12)


def test_the_most_urgent_job_comes_first() -> None:
    workers = Workers(1, lambda: False, "volcano-worker")
    go = threading.Event()
    ran: list[int] = []
    workers.submit(lambda: go.wait(PATIENCE))
    for urgency in (3, 1, 2):
        workers.submit(partial(ran.append, urgency), urgency=urgency)
    go.set()

    assert eventually(lambda: ran == [1, 2, 3])


def test_one_worker_stays_while_it_is_needed() -> None:
    needed = True
    workers = Workers(4, lambda: needed, "volcano-worker")
    workers.start()
    workers.start()
    gate = threading.Barrier(4)
    for _ in range(4):
        workers.submit(lambda: gate.wait(PATIENCE))

    assert eventually(lambda: names() == ["volcano-worker"])
    time.sleep(0.25)
    assert names() == ["volcano-worker"]
    needed = False


def test_an_idle_worker_takes_the_job() -> None:
    workers = Workers(4, lambda: False, "volcano-worker")
    ran = threading.Semaphore(0)
    for _ in range(20):
        workers.submit(ran.release)
        assert ran.acquire(timeout=PATIENCE)
        assert eventually(lambda: workers._idle >= 1)

    assert len(names()) == 1


def test_when_no_more_threads_can_be_had_those_there_are_do_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(4, lambda: False, "volcano-worker")
    go, ran = threading.Event(), threading.Event()
    workers.submit(lambda: go.wait(PATIENCE))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        workers.submit(ran.set)
    go.set()

    assert ran.wait(PATIENCE)


def test_when_no_thread_can_be_had_at_all_the_job_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(4, lambda: False, "volcano-worker")
    ran: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            workers.submit(lambda: ran.append(1))
        with pytest.raises(RuntimeError, match="can't start"):
            workers.start()
    workers.submit(lambda: ran.append(2))

    assert eventually(lambda: ran == [2])


# --- interrupts


def interrupted_everywhere(step: Callable[[], object]) -> Iterator[None]:
    """Do it again and again, broken off where a function begins or returns, each time one further.

    Ends when nothing is left to break off.
    """
    place = 0
    while True:
        left = place

        def tracer(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if event in ("call", "return"):
                if left == 0:
                    left = -1
                    raise KeyboardInterrupt
                left -= 1
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            step()
        except KeyboardInterrupt:
            sys.settrace(before)
            yield
        finally:
            sys.settrace(before)
        if left >= 0:
            assert place >= 3
            return
        place += 1


def test_an_interrupt_anywhere_in_it_stops_no_timer() -> None:
    needed = [True]
    timers = TimerThread(SystemClock(), lambda: bool(needed))

    for _ in interrupted_everywhere(lambda: timers.call_at(timers.now(), threads._nothing)):
        done = Latch()
        timers.call_at(timers.now(), done.set)
        done.wait()

    needed.clear()


def test_an_interrupt_anywhere_in_it_stops_no_worker() -> None:
    needed = [True]
    workers = Workers(2, lambda: bool(needed), "volcano-test")

    for _ in interrupted_everywhere(lambda: workers.submit(threads._nothing)):
        done = Latch()
        workers.submit(done.set)
        done.wait()

    needed.clear()


def test_a_latch_whose_set_was_interrupted_can_be_set() -> None:
    latch = Latch()
    waiting = [threading.Thread(target=latch.wait) for _ in range(2)]
    for thread in waiting:
        thread.start()

    for _ in interrupted_everywhere(latch.set):
        latch.set()

    for thread in waiting:
        thread.join()
    assert latch.is_set()
