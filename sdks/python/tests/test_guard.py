import logging
import math
import threading

import pytest
from sync_stage import GONE, Stage, bang

from volcano_sdk.errors import LockLostError
from volcano_sdk.threads import Latch


def test_a_guard_tells_its_state_without_its_token(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        before = repr(guard)
        stage.advance(10)
        after = repr(guard)
        token = guard.lease.token

    assert "not lost" in before
    assert "not lost" not in after
    assert "lost" in after
    assert token not in before + after


def test_waiting_for_a_loss_ends_with_it(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        assert guard.wait_lost() is True
        assert stage.now == 110.0
        assert guard.wait_lost(0) is True


@pytest.mark.parametrize("timeout", [0, -1, -math.inf])
def test_waiting_for_no_time_is_a_look(stage: Stage, timeout: float) -> None:
    with stage.locks.with_lock("a", ttl=30) as guard:
        assert guard.wait_lost(timeout) is False
        assert stage.now == 100.0


def test_waiting_ends_when_its_time_is_over(stage: Stage) -> None:
    with stage.locks.with_lock("a", ttl=30) as guard:
        assert guard.wait_lost(12.5) is False
        assert stage.now == 112.5
        assert guard.wait_lost(12.5) is False
        assert stage.now == 125.0


@pytest.mark.parametrize("timeout", [None, math.inf, 1e10, 1e300])
def test_a_wait_may_be_longer_than_the_platform_can(stage: Stage, timeout: float | None) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        assert guard.wait_lost(timeout) is True


def test_a_wait_of_not_a_number_is_refused(stage: Stage) -> None:
    with stage.locks.with_lock("a", ttl=30) as guard:
        with pytest.raises(ValueError, match="timeout must be"):
            guard.wait_lost(math.nan)


def test_a_waiter_is_let_go_when_the_body_ends(stage: Stage) -> None:
    waiting = threading.Event()
    answers: list[bool] = []

    def wait(event: Latch) -> None:
        waiting.set()
        event.wait()

    stage.timers.wait = wait  # type: ignore[method-assign]
    with stage.locks.with_lock("a", ttl=30) as guard:
        thread = threading.Thread(target=lambda: answers.append(guard.wait_lost()))
        thread.start()
        assert waiting.wait(10)
    thread.join(10)

    assert answers == [False]
    assert guard.wait_lost() is False
    assert not guard.lost


def test_each_callback_is_called_once_with_the_loss(stage: Stage) -> None:
    stage.script(renew=[GONE])
    calls: list[LockLostError] = []
    with pytest.raises(LockLostError) as caught, stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(calls.append)
        guard.on_lost(calls.append)
        stage.advance(60)
        guard.on_lost(calls.append)
        stage.advance(60)

    assert calls == [caught.value] * 3


def test_after_the_end_no_callback_is_called(stage: Stage) -> None:
    stage.script(renew=[GONE])
    calls: list[LockLostError] = []
    with stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(calls.append)
    guard.on_lost(calls.append)
    stage.advance(60)
    with pytest.raises(LockLostError), stage.locks.with_lock("b", ttl=30) as other:
        stage.advance(10)
    other.on_lost(calls.append)
    stage.advance(60)

    assert calls == []


def test_who_has_waited_in_vain_leaves_nothing_behind(stage: Stage) -> None:
    with stage.locks.with_lock("a", ttl=30) as guard:
        assert not guard.wait_lost(1)
        assert guard._held._waiters == []


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_fails_is_logged_and_the_others_are_called(
    kind: type[BaseException], stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.script(renew=[GONE])
    calls: list[LockLostError] = []
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(lambda loss: bang(kind("the callback's"))(0.0))
        guard.on_lost(calls.append)
        stage.advance(10)

    assert len(calls) == 1
    assert "the callback's" in caplog.text


def test_without_a_thread_for_a_callback_the_loss_is_still_seen(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(lambda loss: None)
        stage.callbacks.refuses = True
        stage.advance(10)
        assert guard.lost

    assert "no thread" in caplog.text
