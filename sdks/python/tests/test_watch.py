import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sync_stage import SETTINGS, bang, lost, refused
from threads_stage import Call, Stream, ThreadsStage

from volcano_sdk import VolcanoClient
from volcano_sdk.errors import (
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
    ValidationError,
)
from volcano_sdk.events import LockEvent
from volcano_sdk.threads import Latch
from volcano_sdk.watch import LockWatch


@pytest.fixture
def watch(threads: ThreadsStage) -> Iterator[LockWatch]:
    made = threads.locks.watch("k", prefix=["t:", "u:"])
    yield made
    made.close()


def following(threads: ThreadsStage, watch: LockWatch) -> Call:
    """A thread that waits for the next event."""
    return threads.call(lambda: next(watch))


def stream_of(threads: ThreadsStage, watch: LockWatch) -> Stream:
    """What it reads, after a first event."""
    first = following(threads, watch)
    stream = threads.wire.streams[-1]
    stream.tell("acquired", number=41)
    assert first.value.type == "acquired"
    return stream


def test_the_events_come_one_after_the_other(threads: ThreadsStage, watch: LockWatch) -> None:
    assert iter(watch) is watch
    assert threads.wire.sent == []
    call = following(threads, watch)
    [stream] = threads.wire.streams
    assert stream.path == "/lock-events?key=k&prefix=t%3A&prefix=u%3A"
    stream.say(": a comment\n")
    assert not call.is_over

    stream.tell("acquired", watchers=3)
    stream.tell("released")

    assert (call.value.type, call.value.key, call.value.watchers) == ("acquired", "k", 3)
    assert next(watch).type == "released"


def test_leaving_the_block_ends_the_connection(threads: ThreadsStage) -> None:
    with threads.locks.watch(prefix="t:") as watch:
        stream = stream_of(threads, watch)
        assert stream.is_open()

    assert not stream.is_open()
    assert list(watch) == []
    watch.close()


def test_one_that_was_never_read_has_nothing_to_end(threads: ThreadsStage) -> None:
    with threads.locks.watch("k"):
        pass

    assert threads.wire.sent == []


def test_closing_it_ends_an_iteration_that_waits_for_an_event(
    threads: ThreadsStage, watch: LockWatch
) -> None:
    stream = stream_of(threads, watch)
    call = threads.call(lambda: list(watch))

    watch.close()
    threads.settle()

    assert call.value == []
    assert not stream.is_open()


def test_closing_it_ends_an_iteration_that_waits_for_the_connection(
    threads: ThreadsStage, watch: LockWatch
) -> None:
    threads.wire.held_up = Latch()
    call = threads.call(lambda: list(watch))

    watch.close()
    threads.settle()

    assert threads.wire.abandoned == ["watch"]
    assert call.value == []


def test_closing_it_ends_an_iteration_that_pauses(threads: ThreadsStage, watch: LockWatch) -> None:
    threads.script(watch=[refused(503)])
    call = threads.call(lambda: list(watch))
    assert threads.sleeps() == [0.1]

    watch.close()
    threads.settle()

    assert call.value == []


def test_an_event_that_comes_while_it_is_closed_is_still_given(
    threads: ThreadsStage, watch: LockWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(threads, watch)
    read = stream.read

    def closed_meanwhile(until: float) -> bytes:
        closer = threading.Thread(target=watch.close)
        chunk = read(until)
        closer.start()
        closer.join()
        return chunk

    monkeypatch.setattr(stream, "read", closed_meanwhile)
    call = following(threads, watch)
    stream.tell("released")

    assert call.value.type == "released"
    assert not stream.is_open()


def test_a_lost_connection_goes_on_behind_the_last_event(
    threads: ThreadsStage, watch: LockWatch
) -> None:
    first = stream_of(threads, watch)
    call = following(threads, watch)
    first.say("")
    assert not first.is_open()
    assert threads.sleeps() == [0.1]
    threads.advance(0.1)
    second = threads.wire.streams[-1]
    assert second.last_id == "41"

    second.tell("released", number=42)

    assert call.value.type == "released"


def test_what_may_be_missing_is_a_reset(threads: ThreadsStage, watch: LockWatch) -> None:
    call = following(threads, watch)
    threads.wire.streams[-1].say("")
    threads.advance(0.1)

    assert call.value == LockEvent("reset")


def test_a_silent_connection_is_lost(threads: ThreadsStage, watch: LockWatch) -> None:
    first = stream_of(threads, watch)
    following(threads, watch)
    threads.advance(39)
    assert first.is_open()
    threads.advance(2)

    assert not first.is_open()
    assert len(threads.wire.streams) == 2


def test_a_stream_that_makes_no_sense_is_lost(threads: ThreadsStage, watch: LockWatch) -> None:
    first = stream_of(threads, watch)
    call = following(threads, watch)
    first.say("x" * (1 << 21))
    assert not first.is_open()
    threads.advance(0.1)
    threads.wire.streams[-1].tell("lapsed")

    assert call.value.type == "lapsed"


def test_passing_trouble_is_waited_out(
    threads: ThreadsStage, watch: LockWatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads.script(watch=[lost, refused(503), refused(429, retry_after="7")])
    call = following(threads, watch)
    threads.advance(0.1)
    assert threads.sleeps() == [0.2]
    threads.advance(0.2)
    assert threads.sleeps() == [7.0]
    threads.advance(7)
    threads.wire.streams[-1].tell("acquired")

    assert call.value.type == "acquired"
    assert "events are asked for again in 7.0 s" in caplog.text


@pytest.mark.parametrize(
    ("status", "error"),
    [(404, NotFoundError), (403, PermissionDeniedError), (400, ValidationError)],
)
def test_what_does_not_pass_is_raised_and_the_end(
    threads: ThreadsStage, watch: LockWatch, status: int, error: type[Exception]
) -> None:
    threads.script(watch=[refused(status)])
    call = following(threads, watch)

    assert isinstance(call.error, error)
    assert list(watch) == []
    assert threads.wire.operations() == ["watch"]


def test_closing_the_client_ends_it(threads: ThreadsStage, watch: LockWatch) -> None:
    stream = stream_of(threads, watch)
    call = following(threads, watch)

    threads.runtime.close()
    threads.settle()

    assert isinstance(call.error, StopIteration)
    assert not stream.is_open()
    with pytest.raises(RuntimeError, match="closed"):
        threads.locks.watch("k")


def test_a_closed_clients_watch_does_not_wait(threads: ThreadsStage, watch: LockWatch) -> None:
    threads.runtime.close()

    assert isinstance(following(threads, watch).error, StopIteration)
    assert threads.wire.sent == []


def test_closing_the_client_ends_its_pause(threads: ThreadsStage, watch: LockWatch) -> None:
    threads.script(watch=[refused(503)])
    call = following(threads, watch)

    threads.runtime.close()
    threads.settle()

    assert isinstance(call.error, StopIteration)


def test_it_does_not_pause_when_the_end_came_with_the_refusal(
    threads: ThreadsStage, watch: LockWatch
) -> None:
    def closing(sent_at: float) -> Any:
        threads.runtime.close()
        return lost(sent_at)

    threads.script(watch=[closing])

    assert isinstance(following(threads, watch).error, StopIteration)


def test_nor_when_it_comes_while_the_pause_begins(
    threads: ThreadsStage, watch: LockWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_at = threads.timers.call_at

    def closing(*args: Any) -> Any:
        threads.runtime.close()
        return call_at(*args)

    monkeypatch.setattr(threads.timers, "call_at", closing)
    threads.script(watch=[lost])

    assert isinstance(following(threads, watch).error, StopIteration)


def test_an_interrupt_ends_it(threads: ThreadsStage, watch: LockWatch) -> None:
    stream = stream_of(threads, watch)
    threads.script(watch=[bang(KeyboardInterrupt())])
    call = following(threads, watch)
    stream.say("")
    threads.advance(0.1)

    assert isinstance(call.error, KeyboardInterrupt)
    assert list(watch) == []


def test_one_that_is_dropped_ends_its_connection(threads: ThreadsStage) -> None:
    watch = threads.locks.watch("k")
    stream = stream_of(threads, watch)

    del watch
    gc.collect()
    threads.advance(0)

    assert not stream.is_open()


def test_one_that_is_dropped_when_the_interpreter_ends_is_no_trouble(
    threads: ThreadsStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    watch = threads.locks.watch("k")
    stream = stream_of(threads, watch)
    with monkeypatch.context() as patch:
        patch.setattr(threads.timers, "call_at", no_thread)
        del watch
        gc.collect()

    assert stream.is_open()
    stream.close()


def test_a_child_goes_on_over_a_connection_of_its_own(
    threads: ThreadsStage, watch: LockWatch
) -> None:
    parents = stream_of(threads, watch)

    threads.runtime.become_child()
    following(threads, watch)

    assert parents.is_open()
    assert threads.wire.streams[-1].last_id == "41"
    parents.close()


def test_it_names_what_it_watches(watch: LockWatch) -> None:
    assert repr(watch) == "<LockWatch key=['k'] prefix=['t:', 'u:']>"


def test_without_a_service_key_nothing_is_watched() -> None:
    client = VolcanoClient(api_url=SETTINGS.api_url, service_key="", trust_env=False)

    with client, pytest.raises(AuthenticationError):
        client.locks.watch("k")
