"""The decisions about waiting, without a thread, a task or a socket."""

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from tables import rows

from volcano_sdk.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    ServerError,
    TransportError,
    ValidationError,
    VolcanoError,
)
from volcano_sdk.events import Filters, LockEvent
from volcano_sdk.lease import LockState
from volcano_sdk.subscription import Subscription
from volcano_sdk.waiting import Turn, Waiter, Waiting, checked_wait, read_delay, spread

HELD = ConflictError("held", status=409)
WALL = 1_800_000_000.0


# --- the rules


@pytest.mark.parametrize("row", rows("waits"), ids=lambda row: str(row.get("note", row)))
def test_which_wait_is_right(row: dict[str, Any]) -> None:
    wait = float(row["number"]) if "number" in row else row["wait"]

    if row["valid"]:
        assert checked_wait(wait) == wait
    else:
        with pytest.raises(ValueError, match="wait must be a number of seconds"):
            checked_wait(wait)


def test_a_wait_that_is_too_large_for_a_float_is_long_enough() -> None:
    assert checked_wait(10**400) >= 1e100


@pytest.mark.parametrize(
    ("watchers", "jitter", "expected"),
    [(1, 1.0, 0.0), (2, 1.0, 0.002), (2, -1.0, 0.0), (11, 0.0, 0.01), (10_000, 1.0, 1.0)],
)
def test_a_crowd_spreads_its_tries(watchers: int, jitter: float, expected: float) -> None:
    assert spread(watchers, jitter) == pytest.approx(expected)


def test_a_key_is_read_every_one_to_five_seconds() -> None:
    assert [read_delay(jitter) for jitter in (-1.0, 0.0, 1.0)] == [1.0, 3.0, 5.0]


# --- one who waits


class Stage:
    """Calls that wait, at `now`; jitter is `jitter`, so that a read comes after 3 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.jitter = 0.0
        self.waiting = Waiting(lambda: self.jitter)
        self.woken: list[Waiter] = []

    def join(self, key: str = "k", wait: float = 1000.0) -> Waiter:
        waiter = Waiter(key, self.now + wait, HELD, lambda: self.woken.append(waiter))
        self.waiting.join(waiter, self.now)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        self.waiting.leave(waiter, self.now)

    def turn(self, waiter: Waiter) -> Turn | float:
        """What it is to do, or in how many seconds it may be its turn."""
        turn = self.waiting.turn(waiter, self.now)
        return turn if isinstance(turn, Turn) else round(turn - self.now, 6)

    def open(self) -> Subscription:
        """A stream is there."""
        subscription = self.opening()
        self.waiting.opened(subscription, self.now)
        return subscription

    def opening(self) -> Subscription:
        assert self.waiting.open_at <= self.now
        return self.waiting.open()

    def lose(self, subscription: Subscription, error: VolcanoError | None = None) -> None:
        self.waiting.ended(subscription, error, self.now)

    def hear(
        self, subscription: Subscription, kind: Any, key: str = "k", watchers: int = 1
    ) -> None:
        event = LockEvent(kind, key, 7, datetime.now(UTC), watchers)
        self.waiting.heard(subscription, [event], self.now)

    def is_refused(self, waiter: Waiter, error: VolcanoError = HELD) -> None:
        """It was told to try, and tries."""
        assert self.turn(waiter) is Turn.TRY
        self.waiting.failed(waiter, error, self.now)

    def reads(self, waiter: Waiter, state: LockState) -> None:
        assert self.turn(waiter) is Turn.READ
        self.waiting.read(waiter, state, self.now, WALL)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def is_held(left: float = 1e6) -> LockState:
    """By a lease with so many seconds left."""
    return LockState(True, datetime.fromtimestamp(WALL + left, UTC), 7)


FREE = LockState(False)


def test_once_the_stream_is_open_it_tries_again_and_then_waits_for_events(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()

    assert stage.woken[-1] is waiter
    stage.is_refused(waiter)
    assert stage.turn(waiter) == 1000.0
    assert subscription.filters == Filters(("k",))


@pytest.mark.parametrize("kind", ["released", "force_released", "lapsed"])
def test_it_tries_when_the_key_is_free(stage: Stage, kind: str) -> None:
    waiter = stage.join()
    subscription = stage.open()
    stage.is_refused(waiter)
    stage.woken.clear()

    stage.hear(subscription, kind)

    assert stage.woken == [waiter]
    assert stage.turn(waiter) is Turn.TRY


def test_an_event_of_another_key_is_none_of_its_business(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()
    stage.is_refused(waiter)

    stage.hear(subscription, "released", key="other")

    assert stage.turn(waiter) == 1000.0


def test_an_event_of_a_stream_that_is_not_ours_any_more_says_nothing(stage: Stage) -> None:
    waiter = stage.join()
    stage.open()
    stage.is_refused(waiter)

    stage.hear(Subscription(Filters(("k",))), "released")

    assert stage.turn(waiter) == 1000.0


def test_one_of_a_crowd_waits_a_little_and_not_at_all_if_another_was_faster(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()
    stage.is_refused(waiter)

    stage.hear(subscription, "released", watchers=101)

    assert stage.turn(waiter) == 0.1
    stage.hear(subscription, "acquired")
    assert stage.turn(waiter) == 1000.0


def test_a_reset_is_a_reason_to_try_for_everybody(stage: Stage) -> None:
    waiters = [stage.join("a"), stage.join("b")]
    subscription = stage.open()
    for waiter in waiters:
        stage.is_refused(waiter)

    stage.waiting.heard(subscription, [LockEvent("reset")], stage.now)

    assert [stage.turn(waiter) for waiter in waiters] == [Turn.TRY, Turn.TRY]


def test_when_its_time_is_over_it_ends_as_contention_does(stage: Stage) -> None:
    waiter = stage.join(wait=5)
    subscription = stage.open()
    again = ConflictError("still held")
    stage.is_refused(waiter, again)
    stage.now += 5
    stage.hear(subscription, "released")

    assert stage.turn(waiter) is Turn.OVER
    assert waiter.error is again


def test_an_infinite_wait_has_no_end(stage: Stage) -> None:
    waiter = stage.join(wait=math.inf)
    stage.open()
    stage.is_refused(waiter)

    assert stage.turn(waiter) == math.inf


# --- tries that fail


@pytest.mark.parametrize("error", [TransportError("lost"), ServerError("500", status=500)])
def test_tries_that_fail_are_made_again_ever_later(stage: Stage, error: VolcanoError) -> None:
    waiter = stage.join()
    stage.open()
    pauses = []
    for _ in range(9):
        stage.is_refused(waiter, error)
        pause = stage.turn(waiter)
        assert isinstance(pause, float)
        pauses.append(pause)
        stage.now += pause

    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(("jitter", "expected"), [(-1.0, 0.05), (1.0, 0.15)])
def test_the_pause_after_a_failure_has_jitter(stage: Stage, jitter: float, expected: float) -> None:
    waiter = stage.join()
    stage.open()
    stage.jitter = jitter

    stage.is_refused(waiter, TransportError("lost"))

    assert stage.turn(waiter) == expected


def test_contention_begins_the_pauses_anew(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()
    for error in (TransportError("lost"), TransportError("lost"), HELD):
        stage.is_refused(waiter, error)
        stage.now += 1
    stage.hear(subscription, "released")

    stage.is_refused(waiter, TransportError("lost"))

    assert stage.turn(waiter) == 0.1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RateLimitedError("slowly", status=429, retry_after=7.0), 7.0),
        (RateLimitedError("slowly", status=429), 0.1),
        (ServerError("busy", status=503, retry_after=2.0), 2.0),
    ],
)
def test_it_does_not_come_back_before_the_server_wants_it(
    stage: Stage, error: VolcanoError, expected: float
) -> None:
    waiter = stage.join()
    subscription = stage.open()
    stage.is_refused(waiter, error)
    stage.hear(subscription, "released")

    assert stage.turn(waiter) == expected


def test_a_wait_that_ends_in_trouble_ends_with_it(stage: Stage) -> None:
    waiter = stage.join(wait=5)
    stage.open()
    limited = RateLimitedError("slowly", status=429, retry_after=60.0)
    stage.is_refused(waiter, limited)

    assert stage.turn(waiter) == 5
    stage.now += 5
    assert stage.turn(waiter) is Turn.OVER
    assert waiter.error is limited


def test_somebody_elses_grant_does_not_end_the_tries_of_an_unknown_outcome(stage: Stage) -> None:
    """It may be our own: with the caller's own lock token, the next try gets it."""
    waiter = stage.join()
    subscription = stage.open()
    stage.is_refused(waiter, TransportError("lost"))

    stage.hear(subscription, "acquired")

    assert stage.turn(waiter) == 0.1


@pytest.mark.parametrize(
    "error",
    [
        ValidationError("", status=400),
        AuthenticationError("", status=401),
        PermissionDeniedError("", status=403),
        NotFoundError("", status=404),
        VolcanoError("", status=418),
    ],
)
def test_what_will_not_pass_is_final(stage: Stage, error: VolcanoError) -> None:
    waiter, next_one = stage.join(), stage.join()
    stage.open()
    with pytest.raises(type(error)) as caught:
        stage.is_refused(waiter, error)
    stage.leave(waiter)

    assert caught.value is error
    assert stage.turn(next_one) is Turn.TRY  # it is to hear it, too


# --- several who wait for one key


def test_of_many_one_tries(stage: Stage) -> None:
    waiters = [stage.join() for _ in range(3)]
    subscription = stage.open()
    stage.is_refused(waiters[0])
    stage.hear(subscription, "released")

    assert [stage.turn(waiter) for waiter in waiters[1:]] == [1000.0, 1000.0]
    stage.is_refused(waiters[0])
    assert [stage.turn(waiter) for waiter in waiters] == [1000.0] * 3


def test_who_comes_when_the_stream_is_open_tries_once_by_itself(stage: Stage) -> None:
    first = stage.join()
    stage.open()
    stage.is_refused(first)
    second = stage.join()

    stage.is_refused(second)

    assert [stage.turn(waiter) for waiter in (first, second)] == [1000.0, 1000.0]
    assert stage.waiting.open_at == math.inf


def test_when_the_first_has_got_it_the_second_stands_first(stage: Stage) -> None:
    first, second = stage.join(), stage.join()
    subscription = stage.open()
    assert stage.turn(first) is Turn.TRY
    stage.waiting.leave(first, stage.now, got_it=True)

    assert stage.woken[-1] is second
    assert stage.turn(second) == 1000.0  # it is held
    stage.hear(subscription, "released")
    assert stage.turn(second) is Turn.TRY


def test_what_one_leaves_undone_the_next_one_does(stage: Stage) -> None:
    first, second = stage.join(), stage.join()
    stage.open()
    assert stage.turn(first) is Turn.TRY
    stage.leave(first)  # cancelled while it tried

    assert stage.woken[-1] is second
    assert stage.turn(second) is Turn.TRY


def test_an_event_is_not_lost_with_him_whose_wait_is_over(stage: Stage) -> None:
    first, second = stage.join(wait=5), stage.join()
    subscription = stage.open()
    stage.is_refused(first)
    stage.now += 5
    stage.hear(subscription, "released")
    assert stage.turn(first) is Turn.OVER
    stage.leave(first)

    assert stage.turn(second) is Turn.TRY


def test_an_event_that_comes_while_one_tries_is_not_lost(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()
    assert stage.turn(waiter) is Turn.TRY
    stage.hear(subscription, "released")
    stage.waiting.failed(waiter, HELD, stage.now)

    assert stage.turn(waiter) is Turn.TRY


def test_who_is_neither_first_nor_last_and_leaves_disturbs_nobody(stage: Stage) -> None:
    first, second, _ = stage.join(), stage.join(), stage.join()
    stage.open()
    stage.woken.clear()
    stage.leave(second)
    stage.leave(second)

    assert stage.woken == []
    assert stage.turn(first) is Turn.TRY


# --- without a stream


def test_without_a_stream_the_key_is_read_now_and_then(stage: Stage) -> None:
    waiter = stage.join()

    assert stage.turn(waiter) == 3.0
    stage.now += 3
    stage.reads(waiter, is_held())
    assert stage.turn(waiter) == 3.0
    stage.now += 3
    stage.reads(waiter, FREE)
    stage.is_refused(waiter)  # somebody was faster
    assert stage.turn(waiter) == 3.0


@pytest.mark.parametrize(
    ("left", "expected"),
    [(1.5, 2.5), (0.2, 1.2), (-0.5, 0.5), (-1.0, 0.1), (-9.0, 0.1), (9.0, 3.0)],
)
def test_a_key_is_read_when_its_lease_and_grace_are_over(
    stage: Stage, left: float, expected: float
) -> None:
    waiter = stage.join()
    stage.now += 3

    stage.reads(waiter, is_held(left))

    assert stage.turn(waiter) == pytest.approx(expected, abs=1e-5)


def test_a_read_before_the_end_of_a_lease_does_not_stand_for_the_one_at_its_end(
    stage: Stage,
) -> None:
    waiter = stage.join()
    stage.now += 3
    stage.jitter = -1.0
    stage.reads(waiter, is_held(1.5))
    assert stage.turn(waiter) == 1.0
    stage.now += 1
    stage.jitter = 0.0
    stage.reads(waiter, is_held(1.5))

    assert stage.turn(waiter) == pytest.approx(2.5, abs=1e-5)


def test_a_wall_clock_that_goes_before_is_no_reason_to_read_without_a_pause(stage: Stage) -> None:
    waiter = stage.join()
    stage.now += 3
    stage.reads(waiter, is_held(-3600))
    stage.now += 0.1

    stage.reads(waiter, is_held(-3600))

    assert stage.turn(waiter) == 3.0


def test_a_server_without_events_is_polled_for_ever(stage: Stage) -> None:
    waiter = stage.join()
    stage.lose(stage.opening(), NotFoundError("no such route", status=404))

    assert stage.waiting.open_at == math.inf
    assert stage.turn(waiter) == 3.0
    stage.leave(waiter)
    other = stage.join("other")
    assert stage.waiting.open_at == math.inf
    assert stage.turn(other) == 3.0


def test_reads_that_fail_are_made_again_and_told_if_the_wait_ends_so(stage: Stage) -> None:
    other, waiter = stage.join(wait=10), stage.join(wait=10)
    lost = TransportError("lost")
    stage.now += 3
    assert stage.turn(waiter) is Turn.READ
    stage.waiting.failed(waiter, lost, stage.now)

    assert [waiter.error, other.error] == [lost, lost]
    assert stage.turn(waiter) == 3.0
    stage.now += 3
    stage.reads(waiter, is_held())
    assert [waiter.error, other.error] == [HELD, HELD]


@pytest.mark.parametrize("gets_it", [True, False])
def test_what_a_try_was_answered_stands_for_all_whatever_failed_before(
    stage: Stage, gets_it: bool
) -> None:
    waiter, other = stage.join(), stage.join()
    stage.now += 3
    assert stage.turn(other) is Turn.READ
    stage.waiting.failed(other, TransportError("lost"), stage.now)
    stage.open()
    if gets_it:
        assert stage.turn(waiter) is Turn.TRY
        stage.waiting.leave(waiter, stage.now, got_it=True)
    else:
        stage.is_refused(waiter)

    assert other.error == HELD


def test_a_read_over_the_quota_waits_as_long_as_it_is_told(stage: Stage) -> None:
    waiter = stage.join()
    stage.now += 3
    assert stage.turn(waiter) is Turn.READ
    stage.waiting.failed(waiter, RateLimitedError("", retry_after=30.0), stage.now)

    assert stage.turn(waiter) == 30.0


def test_what_was_to_be_left_alone_for_longer_still_is(stage: Stage) -> None:
    waiter = stage.join()
    stage.open()
    stage.is_refused(waiter, RateLimitedError("", retry_after=30.0))
    stage.join("other")
    stage.open()
    stage.now += 3.0
    stage.waiting.failed(waiter, TransportError("lost"), stage.now)

    assert stage.turn(waiter) == 27.0


def test_a_later_failure_does_not_shorten_what_was_asked_for(stage: Stage) -> None:
    first, second = stage.join(), stage.join()
    stage.open()
    assert stage.turn(first) is Turn.TRY
    stage.join("other")
    second.try_at = stage.now
    assert stage.turn(second) is Turn.TRY

    stage.waiting.failed(first, RateLimitedError("", retry_after=30.0), stage.now)
    stage.waiting.failed(second, TransportError("lost"), stage.now)

    assert stage.turn(first) == 30.0


def test_a_read_that_the_end_of_the_wait_breaks_off_says_nothing(stage: Stage) -> None:
    other, waiter = stage.join(wait=60), stage.join(wait=4)
    stage.now += 3
    assert stage.turn(waiter) is Turn.READ
    stage.now += 1
    stage.waiting.failed(waiter, TransportError("no answer within 1 s"), stage.now)

    assert stage.turn(waiter) is Turn.OVER
    assert [waiter.error, other.error] == [HELD, HELD]


def test_word_of_an_acquisition_says_that_the_key_is_held(stage: Stage) -> None:
    waiter, other = stage.join(), stage.join()
    stream = stage.open()
    stage.join("wider")
    stage.is_refused(waiter, TransportError("lost"))
    stage.hear(stream, "acquired")

    assert [waiter.error, other.error] == [HELD, HELD]


def test_a_read_that_is_final_is_the_end(stage: Stage) -> None:
    next_one, waiter = stage.join(), stage.join()
    stage.now += 3
    assert stage.turn(waiter) is Turn.READ
    with pytest.raises(AuthenticationError):
        stage.waiting.failed(waiter, AuthenticationError("", status=401), stage.now)
    stage.leave(waiter)

    assert stage.turn(next_one) is Turn.READ


def test_of_many_one_reads_and_it_is_the_last(stage: Stage) -> None:
    """Who came first has least left of its wait, and an answer may take long."""
    first, second = stage.join(), stage.join()
    stage.now += 3

    assert stage.turn(first) == 997.0
    stage.reads(second, FREE)
    assert stage.turn(first) is Turn.TRY


def test_who_leaves_in_its_try_leaves_its_reads_to_the_next_one(stage: Stage) -> None:
    first, second, last = stage.join(), stage.join(), stage.join()
    last.try_at = stage.now
    assert stage.turn(last) is Turn.TRY
    stage.woken.clear()

    stage.leave(last)

    assert set(stage.woken) == {first, second}
    stage.is_refused(first)
    stage.now += 3
    assert stage.turn(second) is Turn.READ


def test_a_read_that_hangs_keeps_nobody_else_from_trying(stage: Stage) -> None:
    reading = stage.join()
    stage.now += 3
    assert stage.turn(reading) is Turn.READ
    second, third = stage.join(), stage.join()

    stage.open()

    assert stage.turn(third) == 1000.0
    assert stage.turn(second) is Turn.TRY


# --- the stream


def test_a_key_that_the_stream_does_not_tell_of_needs_a_wider_one(stage: Stage) -> None:
    one = stage.join("a")
    narrow = stage.open()
    stage.is_refused(one)
    other = stage.join("b")
    assert stage.turn(other) == 3.0  # meanwhile it would be read

    wide = stage.opening()
    assert wide.filters == Filters(("a", "b"))
    assert stage.waiting.uses(narrow)
    stage.waiting.opened(wide, stage.now)

    assert not stage.waiting.uses(narrow)
    assert stage.turn(other) is Turn.TRY


def test_what_the_narrower_stream_had_on_its_way_is_made_good_by_a_look(stage: Stage) -> None:
    one = stage.join("a")
    stage.open()
    stage.is_refused(one)
    stage.join("b")
    stage.open()

    assert stage.turn(one) == 3.0
    stage.now += 3
    stage.reads(one, is_held(0.5))
    assert stage.turn(one) == 997.0


def test_a_look_that_failed_is_owed_still(stage: Stage) -> None:
    waiter = stage.join()
    stage.open()
    stage.is_refused(waiter)
    stage.join("other")
    stage.open()  # a wider one in its place
    stage.now += 5.0
    assert stage.turn(waiter) is Turn.READ
    stage.waiting.failed(waiter, TransportError("lost"), stage.now)

    stage.now += 5.0

    assert stage.turn(waiter) is Turn.READ


def test_keys_that_come_while_a_stream_is_opened_need_a_further_one(stage: Stage) -> None:
    stage.join("a")
    first = stage.opening()
    stage.join("b")
    assert stage.waiting.open_at == math.inf
    stage.waiting.opened(first, stage.now)

    assert stage.opening().filters == Filters(("a", "b"))


def test_a_key_that_comes_again_while_a_stream_without_it_is_opened_is_not_lost(
    stage: Stage,
) -> None:
    """The open stream told of it, and the new one does not."""
    one, _ = stage.join("a"), stage.join("b")
    stage.open()
    stage.leave(one)
    stage.join("c")
    narrow = stage.opening()
    again = stage.join("a")
    stage.is_refused(again)
    stage.waiting.opened(narrow, stage.now)

    assert stage.turn(again) == 3.0
    assert stage.opening().filters == Filters(("a", "b", "c"))


def test_a_look_is_owed_still_when_a_read_before_it_is_answered(stage: Stage) -> None:
    waiter = stage.join()
    stage.now += 3.0
    assert stage.turn(waiter) is Turn.READ
    stage.open()
    stage.join("other")
    stage.open()  # a wider one in its place: what the narrow one had on its way is lost
    stage.waiting.read(waiter, is_held(), stage.now, WALL)
    stage.is_refused(waiter)

    assert stage.turn(waiter) == 3.0
    stage.now += 3.0
    stage.reads(waiter, is_held())
    assert stage.turn(waiter) == 994.0


def test_a_key_that_nobody_waits_for_any_more_is_no_reason_for_another_stream(stage: Stage) -> None:
    one, _ = stage.join("a"), stage.join("b")
    subscription = stage.open()
    stage.leave(one)

    assert stage.waiting.open_at == math.inf
    assert stage.waiting.uses(subscription)


@pytest.mark.parametrize("is_open", [True, False])
def test_without_anybody_who_waits_there_is_no_stream(stage: Stage, is_open: bool) -> None:
    waiter = stage.join()
    subscription = stage.open() if is_open else stage.opening()

    stage.leave(waiter)

    assert not stage.waiting.uses(subscription)
    assert stage.waiting.open_at == math.inf
    stage.waiting.opened(subscription, stage.now)  # too late
    stage.lose(subscription)
    assert stage.join().key == "k"
    assert stage.opening() is not subscription


def test_a_stream_that_is_lost_is_opened_again_behind_its_last_event(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()
    stage.is_refused(waiter)
    subscription.received(b"id: 42\ndata: {}\n\n")
    stage.join("b")  # in the same moment
    stage.waiting.open_at  # noqa: B018  nothing was opened for it yet

    stage.lose(subscription)

    assert stage.waiting.open_at == stage.now + 0.1
    assert stage.turn(waiter) == 3.0  # meanwhile
    stage.now += 0.1
    again = stage.opening()
    assert again is subscription
    assert again.filters == Filters(("b", "k"))
    attempt = again.attempt(timeout=1, request_id="r", service_key="s")
    assert attempt.request.headers["Last-Event-ID"] == "42"
    stage.waiting.opened(again, stage.now)
    assert stage.turn(waiter) is Turn.TRY


def test_after_a_reconnect_a_crowd_spreads_its_tries(stage: Stage) -> None:
    waiter = stage.join()
    subscription = stage.open()
    stage.hear(subscription, "acquired", watchers=101)
    stage.is_refused(waiter) if stage.turn(waiter) is Turn.TRY else None
    stage.lose(subscription)
    stage.now += 0.1

    stage.open()

    assert stage.turn(waiter) == 0.1


def test_streams_that_cannot_be_opened_are_tried_ever_later(stage: Stage) -> None:
    stage.join()
    pauses = []
    for _ in range(8):
        stage.lose(stage.opening(), TransportError("refused"))
        pauses.append(round(stage.waiting.open_at - stage.now, 6))
        stage.now = stage.waiting.open_at

    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_wider_stream_that_cannot_be_opened_does_not_cost_the_narrow_one(stage: Stage) -> None:
    one = stage.join("a")
    narrow = stage.open()
    stage.is_refused(one)
    other = stage.join("b")
    too_many = RateLimitedError("too many streams", status=429, retry_after=20.0)
    stage.lose(stage.opening(), too_many)

    assert stage.waiting.open_at == stage.now + 20
    assert stage.waiting.uses(narrow)
    assert stage.turn(one) == 1000.0
    assert stage.turn(other) == 3.0
    stage.lose(narrow)
    assert stage.turn(one) == 3.0


def test_the_narrow_stream_may_be_lost_while_the_wider_one_is_opened(stage: Stage) -> None:
    one = stage.join("a")
    narrow = stage.open()
    stage.is_refused(one)
    stage.join("b")
    wide = stage.opening()
    stage.lose(narrow)

    stage.waiting.opened(wide, stage.now)

    assert stage.turn(one) is Turn.TRY
    assert stage.waiting.open_at == math.inf


def test_everybody_can_be_woken(stage: Stage) -> None:
    waiters = [stage.join("a"), stage.join("b"), stage.join("a")]
    stage.woken.clear()

    stage.waiting.wake_all()

    assert set(stage.woken) == set(waiters)
