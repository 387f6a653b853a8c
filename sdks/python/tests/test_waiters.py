"""Waiting of the sync flavour: real threads on a clock that the test moves."""

import gc
import itertools
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sync_stage import HELD, Interrupted, answer, bang, granted, lost, refused
from threads_stage import Stream, ThreadsStage

from volcano_sdk.acquisition import Acquisition, _Wait
from volcano_sdk.errors import (
    AuthenticationError,
    ConflictError,
    RateLimitedError,
    ServerError,
    TransportError,
    VolcanoError,
)
from volcano_sdk.lease import LockLease
from volcano_sdk.threads import Latch

FREE = answer(200, '{"held": false}')


def is_held(expires_at: str) -> Any:
    return answer(200, f'{{"held": true, "expires_at": "{expires_at}", "fencing_token": 7}}')


def hold(threads: ThreadsStage, wait: float = 60, **options: Any) -> Callable[[], int]:
    def body() -> int:
        with threads.locks.with_lock("k", ttl=30, wait=wait, **options) as guard:
            return guard.lease.fencing_token

    return body


def acquire(threads: ThreadsStage, wait: float = 60, **options: Any) -> Callable[[], LockLease]:
    return lambda: threads.locks.acquire("k", ttl=30, wait=wait, **options)


def waits(threads: ThreadsStage) -> Stream:
    """Its first tries have met contention, and its stream is open."""
    threads.settle()
    return threads.wire.streams[-1]


# --- the way to a lock


def test_without_wait_nothing_but_the_one_request_is_done(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD])
    for wait in (0, 0.0):
        call = threads.call(acquire(threads, wait=wait))
        assert isinstance(call.error, ConflictError)

    assert threads.wire.operations() == ["acquire", "acquire"]


def test_a_free_lock_is_got_without_waiting(threads: ThreadsStage) -> None:
    assert threads.call(hold(threads)).value == 7
    assert threads.wire.operations() == ["acquire", "release"]


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_lock_that_is_released_is_got_at_once(threads: ThreadsStage, is_direct: bool) -> None:
    threads.script(acquire=[HELD, HELD])
    call = threads.call((acquire if is_direct else hold)(threads))
    stream = waits(threads)
    assert stream.path == "/lock-events?key=k"
    assert threads.wire.operations() == ["acquire", "watch", "acquire"]
    assert not call.is_over

    stream.tell("released")

    assert call.error is None
    tries = threads.wire.of("acquire")
    assert len(tries) == 3
    assert len({one.token for one in tries}) == 1
    assert len({one.request_id for one in tries}) == 3
    assert not stream.is_open()
    if is_direct:
        assert call.value.token == tries[0].token


def test_the_first_request_id_is_the_callers(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD])
    chosen = str(uuid.uuid4())

    threads.call(acquire(threads, request_id=chosen))

    first, second = threads.wire.of("acquire")
    assert first.request_id == chosen
    assert second.request_id != chosen


def test_the_leases_time_starts_with_the_try_that_got_it(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD])
    renewed: list[bool] = []

    def body() -> None:
        with threads.locks.with_lock("k", ttl=30, wait=60) as guard:
            renewed.append(guard.wait_lost(1))

    threads.call(body)
    threads.advance(10)
    threads.advance(19)
    waits(threads).tell("released")

    assert sorted(threads.sleeps()) == [1.0, 10.0]  # the body's wait, the first renewal
    threads.advance(1)
    assert renewed == [False]


def test_when_the_time_is_over_it_is_contention(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, refused(409, "lock_ownership_lost")])
    call = threads.call(acquire(threads, wait=2.5))
    stream = waits(threads)
    assert threads.sleeps() == [2.5, 40.0]
    threads.advance(2.5)

    assert isinstance(call.error, ConflictError)
    assert call.error.code == "lock_ownership_lost"
    assert call.error.__suppress_context__
    assert not stream.is_open()


def test_it_may_wait_for_ever(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD])
    call = threads.call(acquire(threads, wait=float("inf")))
    stream = waits(threads)
    assert threads.sleeps() == [40.0]

    stream.tell("lapsed")

    assert call.error is None


def test_a_first_try_that_took_longer_than_the_wait_is_the_last(threads: ThreadsStage) -> None:
    def slow(sent_at: float) -> Any:
        threads.timers._now += 3
        return HELD(sent_at)

    threads.script(acquire=[slow])
    call = threads.call(acquire(threads, wait=2))

    assert isinstance(call.error, ConflictError)
    assert threads.wire.of("acquire")[1:] == []


@pytest.mark.parametrize("wait", [-1, True, None, "5", float("nan")])
def test_a_wrong_wait_is_refused_before_anything_is_sent(threads: ThreadsStage, wait: Any) -> None:
    with pytest.raises(ValueError, match="wait"):
        threads.locks.acquire("k", ttl=30, wait=wait)
    with pytest.raises(ValueError, match="wait"):
        threads.locks.with_lock("k", ttl=30, wait=wait)
    assert threads.wire.sent == []


# --- trouble on the way


def test_the_first_trys_errors_are_raised_as_without_wait(threads: ThreadsStage) -> None:
    threads.script(acquire=[refused(429, retry_after="5")])

    assert isinstance(threads.call(acquire(threads)).error, RateLimitedError)


def test_an_unknown_outcome_is_given_back_and_the_next_try_has_a_new_token(
    threads: ThreadsStage,
) -> None:
    threads.script(acquire=[HELD, lost, lost])
    call = threads.call(acquire(threads))
    assert threads.sleeps() == [0.1, 40.0]
    threads.advance(0.1)

    assert call.error is None
    held, lost_one, again, got = threads.wire.of("acquire")
    (release,) = threads.wire.of("release")
    assert held.token == lost_one.token == again.token == release.token
    assert lost_one.request_id == again.request_id
    assert got.token == call.value.token != held.token


def test_that_somebody_else_has_what_is_given_back_is_no_news(
    threads: ThreadsStage, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise ConflictError("somebody else's")

    threads.script(acquire=[HELD, lost, lost], release=[refused(409, "lock_ownership_lost")])
    threads.call(acquire(threads))
    threads.runtime.in_background(refuse)
    threads.advance(0.1)

    assert caplog.text == ""


def test_a_callers_own_token_that_was_given_back_is_not_used_again(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, lost, lost])
    call = threads.call(hold(threads, token=uuid.uuid4()))

    assert isinstance(call.error, TransportError)
    assert len(threads.wire.of("release")) == 1


def test_a_callers_own_token_recovers_what_it_may_have_got(threads: ThreadsStage) -> None:
    own = uuid.uuid4()
    threads.script(acquire=[HELD, lost, lost])
    call = threads.call(acquire(threads, token=own))
    threads.advance(0.1)

    assert call.value.token == str(own)
    assert threads.wire.of("release") == []
    assert {one.token for one in threads.wire.of("acquire")} == {str(own)}


def test_a_callers_own_token_stays_the_callers_from_try_to_try(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD, lost, lost])
    call = threads.call(acquire(threads, token=uuid.uuid4()))
    waits(threads).tell("released")
    threads.advance(0.1)

    assert call.error is None
    assert threads.wire.of("release") == []


def test_a_refused_credential_is_the_end(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, refused(401)])

    assert isinstance(threads.call(acquire(threads)).error, AuthenticationError)


def test_a_wait_that_ends_in_trouble_raises_it(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, refused(500)])
    call = threads.call(acquire(threads, wait=0.05))
    threads.advance(0.05)

    assert isinstance(call.error, ServerError)


def test_an_answer_that_comes_too_late_is_tried_again(threads: ThreadsStage) -> None:
    def slow(sent_at: float) -> Any:
        threads.timers._now += 40
        return granted(201)(sent_at)

    threads.script(acquire=[HELD, slow])
    call = threads.call(acquire(threads))
    threads.advance(0.1)

    assert call.error is None
    assert len(threads.wire.of("release")) == 1


# --- without a stream


def test_a_server_without_events_is_polled(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD], watch=[refused(404)])
    threads.script(get=[is_held("2026-12-01T12:00:05.000Z"), FREE, is_held("2027-01-01T00:00:00Z")])
    call = threads.call(acquire(threads))
    assert threads.sleeps() == [3.0]
    threads.advance(3)
    assert threads.wire.operations()[-1] == "get"
    threads.advance(3)  # its lease and grace are over
    assert threads.wire.operations()[-2:] == ["get", "acquire"]
    threads.advance(6)

    assert call.error is None
    assert threads.wire.summary() == "acquire watch get get acquire get get acquire"


def test_a_poll_has_two_seconds_and_no_more_than_is_left_of_the_wait(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD], watch=[refused(404)], get=[is_held("2027-01-01T00:00:00Z")] * 2)
    call = threads.call(acquire(threads, wait=7))
    threads.advance(7)

    assert isinstance(call.error, ConflictError)
    assert [one.timeout for one in threads.wire.of("get")] == [2.0, 1.0]


def test_a_poll_that_fails_is_made_again(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD], watch=[refused(404)], get=[lost, refused(503), FREE])
    call = threads.call(acquire(threads))
    threads.advance(9)

    assert call.error is None
    assert threads.wire.summary() == "acquire watch get get get acquire"


def test_a_lost_stream_is_opened_again(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD, HELD])
    call = threads.call(acquire(threads))
    first = waits(threads)
    first.tell("acquired", number=42)
    first.say("")
    assert not first.is_open()
    assert threads.sleeps() == [0.1, 3.0]
    threads.advance(0.1)
    second = waits(threads)

    assert second.last_id == "42"
    assert len(threads.wire.of("acquire")) == 3
    second.tell("lapsed")
    assert call.error is None


def test_a_stream_that_is_silent_for_too_long_is_lost(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD])
    call = threads.call(acquire(threads, wait=100))
    first = waits(threads)
    threads.advance(30)
    first.say(": still there\n")
    threads.advance(39.9)
    assert first.is_open()
    threads.advance(0.2)

    assert not first.is_open()
    assert call.error is None  # the next one is open, and with it a try was made
    assert len(threads.wire.streams) == 2


def test_a_stream_that_makes_no_sense_is_lost(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, HELD])
    call = threads.call(acquire(threads))
    first = waits(threads)
    first.say("x" * (1 << 21))
    assert not first.is_open()
    threads.advance(0.1)

    assert call.error is None


def test_a_stream_that_breaks_in_an_unexpected_way_is_lost(
    threads: ThreadsStage, caplog: pytest.LogCaptureFixture
) -> None:
    threads.script(acquire=[HELD], watch=[bang(ZeroDivisionError())])
    call = threads.call(acquire(threads))
    assert "unexpected" in caplog.text
    threads.advance(0.1)

    assert call.error is None


def test_without_a_thread_for_the_stream_the_key_is_polled(
    threads: ThreadsStage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.runtime.readers, "submit", no_thread)
    threads.script(acquire=[HELD])
    call = threads.call(acquire(threads))
    assert threads.sleeps() == [0.1, 3.0]
    threads.advance(3.0)

    assert call.error is None
    assert threads.wire.operations() == ["acquire", "get", "acquire"]
    assert "no thread can be started for events" in caplog.text


def test_without_a_thread_for_the_time_nobody_can_wait(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    threads.script(acquire=[HELD])
    monkeypatch.setattr(threads.timers, "start", no_thread)
    call = threads.call(acquire(threads))

    assert isinstance(call.error, VolcanoError)
    assert "no thread keeps the time" in str(call.error)


# --- several who wait


def test_of_many_who_wait_for_one_key_one_tries(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD] * 21)
    calls = [threads.call(hold(threads)) for _ in range(10)]
    stream = waits(threads)
    assert len(threads.wire.streams) == 1
    before = len(threads.wire.of("acquire"))
    threads.script(acquire=[])

    for number in range(10):
        stream.tell("released", number=number)

    assert [call.error for call in calls] == [None] * 10
    assert len(threads.wire.of("acquire")) - before == 10


def test_another_key_gets_a_stream_of_both_and_the_old_one_goes_after_it(
    threads: ThreadsStage,
) -> None:
    threads.script(acquire=[HELD] * 4)
    one = threads.call(acquire(threads))
    narrow = waits(threads)
    threads.wire.held_up = Latch()
    other = threads.call(lambda: threads.locks.acquire("other", ttl=30, wait=60))
    assert narrow.is_open()
    threads.wire.held_up.set()
    threads.wire.held_up = None
    wide = waits(threads)

    assert not narrow.is_open()
    assert wide.path == "/lock-events?key=k&key=other"
    wide.tell("released", key="other")
    assert other.error is None
    assert not one.is_over
    wide.tell("released")
    assert one.error is None


def test_an_opening_that_nobody_needs_any_more_is_abandoned(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD])
    threads.wire.held_up = Latch()
    call = threads.call(acquire(threads, wait=1))
    threads.advance(1)

    assert isinstance(call.error, ConflictError)
    assert threads.wire.abandoned == ["watch"]


# --- ends


def test_closing_the_client_ends_the_waiting(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD] * 4)
    calls = [threads.call(acquire(threads)), threads.call(hold(threads))]
    stream = waits(threads)
    threads.runtime.close()
    threads.settle()

    for call in calls:
        assert isinstance(call.error, RuntimeError)
        assert "closed" in str(call.error)
    assert not stream.is_open()


def test_closing_the_client_ends_the_pause_before_a_stream(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD], watch=[lost])
    call = threads.call(acquire(threads))
    threads.runtime.close()
    threads.settle()

    assert isinstance(call.error, RuntimeError)
    assert threads.sleeps() == []


def test_closing_the_client_waits_for_a_release_under_way(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body's thread may be faster to release than the one that closes."""
    has_begun, goes_on = Latch(), Latch()

    def slow(sent_at: float) -> Any:
        has_begun.set()
        threads.activity.wait(goes_on)
        return answer(204)(sent_at)

    def body() -> None:
        with threads.locks.with_lock("k", ttl=30) as guard:
            guard.wait_lost(None)

    def after_the_body(job: Callable[[], object]) -> None:
        threads.activity.wait(has_begun)
        submit(job)

    submit = threads.runtime.workers.submit
    threads.script(release=[slow])
    threads.call(body)
    monkeypatch.setattr(threads.runtime.workers, "submit", after_the_body)

    closing = threads.call(threads.runtime.close)
    assert has_begun.is_set()
    assert (closing.is_over, threads.wire.is_closed) == (False, False)
    goes_on.set()
    threads.settle()

    assert closing.error is None
    assert (closing.is_over, threads.wire.is_closed) == (True, True)
    assert threads.wire.summary() == "acquire release"


def test_a_child_waits_with_a_stream_of_its_own(threads: ThreadsStage) -> None:
    parents = threads.runtime.waiters

    threads.runtime.become_child()

    assert threads.runtime.waiters is not parents
    assert threads.runtime.readers is not None


def test_an_interrupt_while_it_waits_leaves_nothing(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads.script(acquire=[HELD])
    wait = threads.timers.wait

    def interrupted(latch: Latch) -> None:
        if threading.current_thread() is not threading.main_thread():
            return wait(latch)
        threads.settle()
        raise KeyboardInterrupt

    monkeypatch.setattr(threads.timers, "wait", interrupted)
    threads.activity.begins()
    with pytest.raises(KeyboardInterrupt):
        threads.activity.ends()
        threads.locks.acquire("k", ttl=30, wait=60)

    threads.settle()
    assert not waits(threads).is_open()


def test_an_interrupt_after_the_grant_gives_it_back(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threads.runtime.waiters.leave
    interrupts = itertools.chain([KeyboardInterrupt()], itertools.repeat(None))

    def interrupted(*args: Any, **options: Any) -> None:
        if (interrupt := next(interrupts)) is not None:
            raise interrupt
        leave(*args, **options)

    monkeypatch.setattr(threads.runtime.waiters, "leave", interrupted)
    threads.script(acquire=[HELD])
    call = threads.call(acquire(threads))

    assert isinstance(call.error, KeyboardInterrupt)
    assert len(threads.wire.of("release")) == 1


def test_who_was_interrupted_even_in_leaving_is_not_there_for_ever(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    threads.script(acquire=[HELD, refused(403)])
    with monkeypatch.context() as patch:
        patch.setattr(threads.runtime.waiters, "leave", interrupted)
        call = threads.call(acquire(threads))
        assert isinstance(call.error, KeyboardInterrupt)
    assert waits(threads).is_open()
    call.error = None
    gc.collect()
    threads.advance(0)

    assert not waits(threads).is_open()


def test_a_wait_that_is_forgotten_when_the_interpreter_ends_is_no_trouble(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    first = Acquisition(threads.runtime, "k", 30, token=None, request_id=None)
    wait = _Wait(first, Acquisition.give_back, 0.0, ConflictError(""))
    wait._is_over = False
    monkeypatch.setattr(threads.timers, "call_at", no_thread)

    del wait

    gc.collect()


def test_an_interrupted_try_that_was_granted_is_given_back(threads: ThreadsStage) -> None:
    threads.script(acquire=[HELD, Interrupted(KeyboardInterrupt(), granted(201))])
    call = threads.call(acquire(threads))

    assert isinstance(call.error, KeyboardInterrupt)
    assert len(threads.wire.of("release")) == 1
