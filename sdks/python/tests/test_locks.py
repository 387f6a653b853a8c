import gc
import logging
import uuid
from collections.abc import Callable, Generator
from datetime import UTC, datetime

import pytest
from sync_stage import (
    GONE,
    HELD,
    SETTINGS,
    Interrupted,
    Said,
    Stage,
    Step,
    answer,
    bang,
    granted,
    hang,
    lost,
    refused,
    unreachable,
)

from volcano_sdk.errors import (
    AuthenticationError,
    ConflictError,
    LockLostError,
    PermissionDeniedError,
    ServerError,
    TransportError,
    VolcanoError,
    chain,
)
from volcano_sdk.guard import LockGuard
from volcano_sdk.lease import LockLease, LockState
from volcano_sdk.locks import Locks
from volcano_sdk.operations import Outcome
from volcano_sdk.renewal import Trust
from volcano_sdk.settings import Settings

TOKEN = "4b5c3f7e-8f0c-4c3b-9a55-0d9d3c0f7a11"
REQUEST_ID = "0e3a1c52-77aa-4a53-8b1a-5f6f3f4f9f00"


def a_lease(token: str = TOKEN) -> LockLease:
    return LockLease("a", token, datetime.now(UTC), 7)


# --- direct calls


def test_a_lease_is_acquired_renewed_and_released(stage: Stage) -> None:
    lease = stage.locks.acquire("a", ttl=30)
    renewed = stage.locks.renew("a", lease, ttl=60)
    stage.locks.release("a", renewed)

    assert (lease.key, lease.fencing_token) == ("a", 7)
    assert stage.wire.operations() == ["acquire", "renew", "release"]
    assert {one.token for one in stage.wire.sent} == {lease.token}
    assert len({one.request_id for one in stage.wire.sent}) == 3
    assert stage.wire.sent[1].body == b'{"ttl_seconds":60}'
    assert {one.timeout for one in stage.wire.sent} == {10.0}


def test_a_read_and_a_force_release_need_no_token(stage: Stage) -> None:
    assert stage.locks.get("a") == LockState(held=False)
    stage.locks.force_release("a", request_id=uuid.UUID(REQUEST_ID))

    assert [one.token for one in stage.wire.sent] == [None, None]
    assert stage.wire.sent[1].request_id == REQUEST_ID


def test_a_lease_built_by_hand_is_sent_with_its_canonical_token(stage: Stage) -> None:
    stage.locks.release("a", a_lease(TOKEN.upper()))
    assert stage.wire.sent[0].token == TOKEN


@pytest.mark.parametrize(
    "call",
    [
        lambda locks: locks.acquire("a b", ttl=30),
        lambda locks: locks.acquire("a", ttl=4),
        lambda locks: locks.acquire("a", ttl=30, token="x"),
        lambda locks: locks.acquire("a", ttl=30, request_id="x"),
        lambda locks: locks.with_lock("a\n", ttl=30),
        lambda locks: locks.renew("b", a_lease(), ttl=30),
        lambda locks: locks.renew("a", a_lease(), ttl="5"),
        lambda locks: locks.renew("a", a_lease("x"), ttl=5),
        lambda locks: locks.release("b", a_lease()),
        lambda locks: locks.get("a/b"),
        lambda locks: locks.force_release(".."),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_sent(
    stage: Stage, call: Callable[[Locks], object]
) -> None:
    with pytest.raises(ValueError, match=r"must be|is a lease of"):
        call(stage.locks)

    assert stage.wire.sent == []


def test_without_a_service_key_nothing_is_sent(stage: Stage) -> None:
    stage.runtime.settings = Settings("http://volcano.test")

    for call in (
        lambda: stage.locks.acquire("a", ttl=30),
        lambda: stage.locks.with_lock("a", ttl=30),
        lambda: stage.locks.get("a"),
    ):
        with pytest.raises(AuthenticationError, match="service_key"):
            call()
    assert stage.wire.sent == []


def test_a_lost_answer_to_an_acquire_is_retried_once_with_the_same_identity(stage: Stage) -> None:
    stage.script(acquire=[lost])
    lease = stage.locks.acquire("a", ttl=30)

    first, second = stage.wire.sent
    assert (first.token, first.request_id) == (second.token, second.request_id)
    assert second.token == lease.token


def test_contention_is_a_conflict_and_sends_nothing_more(stage: Stage) -> None:
    stage.script(acquire=[HELD])
    with pytest.raises(ConflictError) as refusal:
        stage.locks.acquire("a", ttl=30)

    assert refusal.value.code == "lock_held"
    assert chain(refusal.value) == [refusal.value]
    assert stage.wire.operations() == ["acquire"]


def test_an_acquire_of_unknown_outcome_is_released(stage: Stage) -> None:
    stage.script(acquire=[lost, lost])
    with pytest.raises(TransportError):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire", "acquire", "release"]
    assert len({one.token for one in stage.wire.sent}) == 1


def test_a_grant_that_cannot_be_read_is_released(stage: Stage) -> None:
    stage.script(acquire=[answer(201, "junk")])
    with pytest.raises(ServerError):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire", "release"]


def test_a_failed_connect_is_known_and_nothing_is_released(stage: Stage) -> None:
    stage.script(acquire=[unreachable, unreachable])
    with pytest.raises(TransportError):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire", "acquire"]


def test_with_a_token_of_ones_own_an_unknown_outcome_is_ones_own(stage: Stage) -> None:
    stage.script(acquire=[lost, lost])
    with pytest.raises(TransportError):
        stage.locks.acquire("a", ttl=30, token=TOKEN)
    assert stage.wire.operations() == ["acquire", "acquire"]

    assert stage.locks.acquire("a", ttl=30, token=TOKEN).token == TOKEN


def test_a_compensating_release_that_fails_is_only_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.script(acquire=[lost, lost], release=[lost, lost])
    with pytest.raises(TransportError):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire", "acquire", "release", "release"]
    assert "could not be given back" in caplog.text
    assert str(stage.wire.sent[0].token) not in caplog.text


def late(seconds: float, then: Said, stage: Stage) -> Step:
    def step(sent_at: float) -> Outcome:
        stage.advance(seconds)
        return then(sent_at)

    return step


def test_an_acquire_that_is_answered_too_late_is_not_held_and_given_back(stage: Stage) -> None:
    stage.script(acquire=[late(29.0, granted(201), stage)])
    with pytest.raises(TransportError, match="not held"):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire", "release"]


def test_with_a_token_of_ones_own_it_is_not_given_back(stage: Stage) -> None:
    stage.script(acquire=[late(29.0, granted(201), stage)])
    with pytest.raises(TransportError, match="not held"):
        stage.locks.acquire("a", ttl=30, token=TOKEN)

    assert stage.wire.operations() == ["acquire"]


def test_a_token_that_was_released_is_never_used_again(stage: Stage) -> None:
    lease = stage.locks.acquire("a", ttl=30, token=TOKEN)
    stage.script(release=[lost])
    with pytest.raises(TransportError):
        stage.locks.release("a", lease)

    for call in (stage.locks.acquire, stage.locks.with_lock):
        with pytest.raises(ValueError, match="make a new one") as refusal:
            call("a", ttl=30, token=TOKEN)
        assert TOKEN not in str(refusal.value)


# --- with_lock


def test_the_lock_is_held_while_the_block_runs(stage: Stage) -> None:
    with stage.locks.with_lock("a", ttl=30, token=TOKEN, request_id=REQUEST_ID) as guard:
        assert guard.lease.fencing_token == 7
        assert not guard.lost
        guard.check()
        assert stage.timers.due() == [10.0]  # one timer, for whatever comes next

    assert stage.wire.operations() == ["acquire", "release"]
    assert {one.token for one in stage.wire.sent} == {TOKEN}
    assert stage.wire.sent[0].request_id == REQUEST_ID


def test_it_is_renewed_at_a_third_again_and_again(stage: Stage) -> None:
    with stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(35)
        assert not guard.lost

    renewals = stage.wire.of("renew")
    assert [one.at for one in renewals] == [110.0, 120.0, 130.0]
    assert {one.token for one in stage.wire.sent} == {renewals[0].token}
    assert len({one.request_id for one in stage.wire.sent}) == 5


def test_held_elsewhere_the_block_does_not_run(stage: Stage) -> None:
    stage.script(acquire=[HELD])
    with pytest.raises(ConflictError), stage.locks.with_lock("a", ttl=30):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire"]


@pytest.mark.parametrize("token", [None, TOKEN])
def test_an_unknown_outcome_is_released_whoever_made_the_token(
    stage: Stage, token: str | None
) -> None:
    stage.script(acquire=[lost, lost])
    with pytest.raises(TransportError), stage.locks.with_lock("a", ttl=30, token=token):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "acquire", "release"]


def test_each_is_entered_once(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    with lock:
        pass
    with pytest.raises(RuntimeError, match="call with_lock again"), lock:
        pytest.fail("the block ran")


def test_transient_failures_are_survived_with_one_operation(stage: Stage) -> None:
    stage.script(
        renew=[
            lost,
            refused(500),
            answer(200, "junk"),
            refused(429, retry_after="2"),
            granted(200),
        ]
    )
    with stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(19)
        assert not guard.lost

    renewals = stage.wire.of("renew")
    assert [round(one.at - 100, 3) for one in renewals] == [10.0, 10.1, 10.3, 10.7, 12.7]
    assert len({one.request_id for one in renewals}) == 1  # tries of one operation


def test_when_all_renewals_fail_it_is_lost_at_the_stop_time(stage: Stage) -> None:
    stage.script(renew=[lost] * 1000)
    losses: list[tuple[float, LockLostError]] = []

    with pytest.raises(LockLostError) as caught, stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(lambda loss: losses.append((stage.now, loss)))
        stage.advance(28.9)
        assert losses == []
        stage.advance(0.2)

    assert losses == [(129.0, caught.value)]
    assert isinstance(caught.value.__cause__, TransportError)
    assert stage.wire.operations()[-1] == "release"
    assert len(stage.wire.of("release")) == 1


def test_hanging_renewals_leave_room_and_do_not_hide_the_loss(stage: Stage) -> None:
    stage.script(renew=[hang] * 1000)
    seen: list[float] = []

    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(lambda loss: seen.append(stage.now))
        stage.advance(30)

    assert seen == [129.0]
    assert len(stage.wire.of("renew")) >= 3


def test_the_trust_in_a_slow_renewal_counts_from_its_send(stage: Stage) -> None:
    stage.script(renew=[late(5, granted(200), stage)] + [lost] * 1000)
    seen: list[float] = []

    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(lambda loss: seen.append(stage.now))
        stage.advance(60)

    assert seen == [110.0 + 29.0]


def test_a_refused_renewal_is_a_loss_while_the_block_runs(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError) as caught, stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(10)
        assert guard.lost
        with pytest.raises(LockLostError):
            guard.check()

    assert isinstance(caught.value.__cause__, ConflictError)
    assert (caught.value.status, caught.value.code) == (409, "lock_ownership_lost")
    assert len(stage.wire.of("renew")) == 1
    assert len(stage.wire.of("release")) == 1


def test_a_lost_lock_is_released_with_one_short_try(stage: Stage) -> None:
    stage.script(renew=[GONE], release=[lost])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30):
        stage.advance(10)

    assert [one.timeout for one in stage.wire.of("release")] == [2.0]


def test_a_process_that_stood_still_sees_the_loss_at_its_first_look(stage: Stage) -> None:
    seen: list[LockLostError] = []
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(seen.append)
        stage.block(36)
        assert guard.lost
        stage.advance(0)
        stage.advance(60)
        assert guard.lost

    assert len(seen) == 1
    assert stage.wire.operations() == ["acquire", "release"]


def test_the_end_of_the_block_looks_too(stage: Stage) -> None:
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30):
        stage.block(29)


def test_the_bodys_error_goes_up_with_the_loss_beside_it(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(KeyError) as caught, stage.locks.with_lock("a", ttl=30):
        stage.advance(10)
        raise KeyError("the body's")

    assert [type(one) for one in chain(caught.value)] == [KeyError, LockLostError, ConflictError]
    assert "LockLostError" in caught.value.__notes__[0]


def test_the_loss_that_the_body_let_through_is_raised_as_it_is(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError) as caught, stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(10)
        guard.check()

    assert not hasattr(caught.value, "__notes__")


def test_a_failed_release_never_masks_the_bodys_error(stage: Stage) -> None:
    stage.script(release=[refused(500), refused(500)])
    with pytest.raises(KeyError) as caught, stage.locks.with_lock("a", ttl=30):
        raise KeyError("the body's")

    assert [type(one) for one in chain(caught.value)] == [KeyError, ServerError]


def test_a_failed_release_never_masks_the_bodys_result(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.script(release=[lost, refused(403)])
    with stage.locks.with_lock("a", ttl=30):
        pass

    assert [one.request_id for one in stage.wire.of("release")] == [
        stage.wire.sent[1].request_id
    ] * 2
    assert "'a' could not be released" in caplog.text


def test_a_release_that_is_refused_at_once_was_a_loss(stage: Stage) -> None:
    stage.script(release=[GONE])
    with pytest.raises(LockLostError) as caught, stage.locks.with_lock("a", ttl=30):
        pass

    assert isinstance(caught.value.__cause__, ConflictError)


def test_a_release_that_is_refused_at_the_second_try_was_done_by_the_first(stage: Stage) -> None:
    stage.script(release=[lost, GONE])
    with stage.locks.with_lock("a", ttl=30):
        pass


def test_a_refused_release_after_a_known_loss_is_no_second_loss(stage: Stage) -> None:
    stage.script(renew=[GONE], release=[GONE])
    with pytest.raises(LockLostError, match="its renewal was refused"):
        with stage.locks.with_lock("a", ttl=30):
            stage.advance(10)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_every_way_out_of_the_block_releases(stage: Stage, error: BaseException) -> None:
    with pytest.raises(type(error)), stage.locks.with_lock("a", ttl=30):
        raise error

    assert stage.wire.operations() == ["acquire", "release"]


def test_return_break_and_a_closed_generator_release_too(stage: Stage) -> None:
    def returns() -> int:
        with stage.locks.with_lock("a", ttl=30):
            return 7

    def generates() -> Generator[int, None, None]:
        with stage.locks.with_lock("a", ttl=30):
            yield 1

    assert returns() == 7
    for _ in range(2):
        with stage.locks.with_lock("a", ttl=30):
            break
    generator = generates()
    next(generator)
    generator.close()

    assert stage.wire.operations() == ["acquire", "release"] * 3
    assert len({one.token for one in stage.wire.sent}) == 3


def test_an_answer_that_took_long_is_renewed_before_the_block_runs(stage: Stage) -> None:
    stage.script(acquire=[late(20, granted(201), stage)], renew=[lost, granted(200)])
    with stage.locks.with_lock("a", ttl=30) as guard:
        assert stage.wire.operations() == ["acquire", "renew", "renew"]
        assert not guard.lost


def test_a_block_whose_first_renewal_is_refused_never_starts(stage: Stage) -> None:
    stage.script(acquire=[late(20, granted(201), stage)], renew=[GONE])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "renew", "release"]


def test_an_answer_after_the_stop_time_never_starts_the_block(stage: Stage) -> None:
    stage.script(acquire=[late(29, granted(201), stage)])
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "release"]


def test_a_ttl_of_90_days_is_renewed_after_30(stage: Stage) -> None:
    day = 86_400
    with stage.locks.with_lock("a", ttl=90 * day) as guard:
        stage.advance(1)
        assert stage.wire.operations() == ["acquire"]
        stage.advance(31 * day)
        assert stage.wire.operations() == ["acquire", "renew"]
        assert not guard.lost


def test_a_loss_stays_and_the_next_lock_works(stage: Stage) -> None:
    stage.script(renew=[GONE])
    first = stage.locks.with_lock("a", ttl=30)
    guard = first.__enter__()
    stage.advance(10)

    with stage.locks.with_lock("a", ttl=30) as second:
        stage.advance(25)
        assert guard.lost
        assert not second.lost
    with pytest.raises(LockLostError):
        first.__exit__(None, None, None)


# --- crossing


def next_moments(stage: Stage, guard: LockGuard) -> tuple[float, float]:
    """Seconds from now to the next renewal and to the stop time; the timer is set to the first."""
    holding = guard._held.holding
    moments = holding.schedule.due_at - stage.now, holding.trust.stop_at - stage.now
    assert stage.timers.due() == [pytest.approx(min(moments))]
    return round(moments[0], 6), round(moments[1], 6)


def test_a_direct_renewal_with_a_shorter_ttl_shortens_the_guards_trust(stage: Stage) -> None:
    stage.script(renew=[lost] * 100)
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(1)
        with pytest.raises(TransportError):
            stage.locks.renew("a", guard.lease, ttl=5)
        assert next_moments(stage, guard)[1] == 4.0
        stage.advance(3.9)
        assert not guard.lost
        stage.advance(0.2)
        assert guard.lost


def test_a_direct_renewal_that_succeeds_is_news_of_the_guards_lease(stage: Stage) -> None:
    stage.script(renew=[lost, granted(200), granted(200)])
    with stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(10.05)
        stage.locks.renew("a", guard.lease, ttl=30)
        stage.advance(9.9)
        assert len(stage.wire.of("renew")) == 2
        stage.advance(0.2)

    first, second, third = stage.wire.of("renew")
    assert len({first.request_id, second.request_id, third.request_id}) == 3


def test_a_direct_renewal_that_is_refused_is_the_guards_loss(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with pytest.raises(LockLostError) as caught, stage.locks.with_lock("a", ttl=30) as guard:
        with pytest.raises(ConflictError) as refusal:
            stage.locks.renew("a", guard.lease, ttl=30)
        assert guard.lost

    assert caught.value.__cause__ is refusal.value


def test_a_direct_acquire_with_the_guards_token_is_told_to_it(stage: Stage) -> None:
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30, token=TOKEN) as guard:
        stage.advance(5)
        stage.locks.acquire("a", ttl=6, token=TOKEN)
        assert next_moments(stage, guard) == (2.0, 5.0)
        stage.script(acquire=[HELD])
        with pytest.raises(ConflictError):
            stage.locks.acquire("a", ttl=6, token=TOKEN)
        assert guard.lost


def test_the_same_token_on_another_key_is_another_lease(stage: Stage) -> None:
    stage.script(renew=[GONE])
    with stage.locks.with_lock("a", ttl=30, token=TOKEN) as guard:
        with pytest.raises(ConflictError):
            stage.locks.renew("b", LockLease("b", TOKEN, datetime.now(UTC), 7), ttl=5)
        assert not guard.lost


def test_a_direct_release_ends_the_guard_without_a_loss(stage: Stage) -> None:
    seen: list[LockLostError] = []
    with stage.locks.with_lock("a", ttl=30) as guard:
        guard.on_lost(seen.append)
        stage.locks.release("a", guard.lease)
        stage.advance(60)
        assert not guard.lost
        assert guard.wait_lost() is False

    assert stage.wire.operations() == ["acquire", "release"]
    assert seen == []


def test_after_a_direct_release_that_failed_the_end_releases_again(stage: Stage) -> None:
    stage.script(release=[lost])
    with stage.locks.with_lock("a", ttl=30) as guard, pytest.raises(TransportError):
        stage.locks.release("a", guard.lease)

    assert stage.wire.operations() == ["acquire", "release", "release"]


def test_of_two_with_locks_that_share_a_token_the_first_end_is_the_others_loss(
    stage: Stage,
) -> None:
    """Its release frees the key: from then on somebody else may have it."""
    with (
        pytest.raises(LockLostError, match="another with_lock"),
        stage.locks.with_lock("a", ttl=30, token=TOKEN) as outer,
    ):
        with stage.locks.with_lock("a", ttl=30, token=TOKEN):
            assert len(stage.runtime.running["a", TOKEN]) == 2
            assert not outer.lost
        assert outer.lost


def test_a_with_lock_lives_by_the_shortest_ttl_of_direct_calls_before_it(stage: Stage) -> None:
    """One of them may still be under way, and shorten the lease when it arrives."""
    lease = stage.locks.acquire("a", ttl=20, token=TOKEN)
    stage.locks.renew("a", lease, ttl=6)
    stage.locks.renew("a", lease, ttl=60)
    with stage.locks.with_lock("b", ttl=30, token=TOKEN) as guard:
        assert next_moments(stage, guard) == (10.0, 29.0)
    with pytest.raises(ValueError, match="make a new one"):
        stage.locks.with_lock("a", ttl=30, token=TOKEN)

    lease = stage.locks.acquire("a", ttl=6, token=REQUEST_ID)
    with stage.locks.with_lock("a", ttl=30, token=REQUEST_ID) as guard:
        assert next_moments(stage, guard) == (2.0, 5.0)


def test_a_direct_acquire_that_crosses_that_of_a_with_lock_shortens_it(stage: Stage) -> None:
    def crossed(sent_at: float) -> Outcome:
        stage.locks.acquire("a", ttl=6, token=TOKEN)
        return granted(201)(sent_at)

    stage.script(acquire=[crossed])
    with stage.locks.with_lock("a", ttl=30, token=TOKEN) as guard:
        assert next_moments(stage, guard) == (2.0, 5.0)


def test_an_interrupt_after_the_answer_to_a_direct_acquire_gives_it_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(acquired: object, ttl: int) -> Trust:
        raise KeyboardInterrupt

    monkeypatch.setattr("volcano_sdk.acquisition.Trust.begun", interrupted)

    with pytest.raises(KeyboardInterrupt):
        stage.locks.acquire("a", ttl=30)
    with pytest.raises(KeyboardInterrupt):
        stage.locks.acquire("a", ttl=30, token=TOKEN)
    assert stage.wire.operations() == ["acquire", "release", "acquire"]


def test_a_renewal_that_answers_after_the_end_does_nothing(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    lock.__enter__()

    def ends_meanwhile(sent_at: float) -> Outcome:
        lock.__exit__(None, None, None)
        return GONE(sent_at)

    stage.script(renew=[ends_meanwhile])
    stage.advance(10)

    assert stage.timers.due() == []
    stage.advance(100)
    assert stage.wire.operations() == ["acquire", "renew", "release"]


def test_a_renewal_that_waited_for_its_turn_until_the_end_is_not_sent(stage: Stage) -> None:
    stage.timers.after = lambda: None
    with stage.locks.with_lock("a", ttl=30):
        stage.advance(10)
        assert len(stage.workers.jobs) == 1
    stage.run_jobs()

    assert stage.wire.operations() == ["acquire", "release"]


def test_an_unexpected_error_in_a_renewal_does_not_end_the_renewing(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.script(renew=[bang(ZeroDivisionError("a bug")), granted(200)])
    with stage.locks.with_lock("a", ttl=30) as guard:
        stage.advance(11)
        assert not guard.lost

    assert len(stage.wire.of("renew")) == 2
    assert "ZeroDivisionError" in caplog.text


def test_without_a_thread_for_a_renewal_the_stop_time_has_the_last_word(stage: Stage) -> None:
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30) as guard:
        stage.workers.refuses = True
        stage.advance(28.9)
        assert not guard.lost
        stage.advance(0.2)
        assert guard.lost


# --- interrupts


def test_an_interrupted_acquire_waits_for_its_answer_and_gives_back_what_it_got(
    stage: Stage,
) -> None:
    stage.script(acquire=[Interrupted(KeyboardInterrupt(), granted(201))])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "release"]


def test_an_interrupted_acquire_that_was_refused_gives_nothing_back(stage: Stage) -> None:
    stage.script(acquire=[Interrupted(KeyboardInterrupt(), HELD)])
    with pytest.raises(KeyboardInterrupt):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire"]


def test_an_interrupted_acquire_without_an_answer_is_not_retried_but_released(
    stage: Stage,
) -> None:
    stage.script(acquire=[Interrupted(KeyboardInterrupt(), lost)])
    with pytest.raises(KeyboardInterrupt):
        stage.locks.acquire("a", ttl=30)

    assert stage.wire.operations() == ["acquire", "release"]


def test_with_a_token_of_ones_own_an_interrupted_acquire_is_not_released(stage: Stage) -> None:
    stage.script(acquire=[Interrupted(KeyboardInterrupt(), lost), bang(KeyboardInterrupt())])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            stage.locks.acquire("a", ttl=30, token=TOKEN)

    assert stage.wire.operations() == ["acquire", "acquire"]


def test_an_acquire_that_was_broken_off_is_released(stage: Stage) -> None:
    stage.script(acquire=[bang(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "release"]


def test_an_interrupt_between_the_grant_and_the_block_gives_the_lease_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    monkeypatch.setattr("volcano_sdk.locks.HeldLock", lambda runtime, holding: 1 / 0)
    with pytest.raises(ZeroDivisionError), lock:
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "release"]


def test_an_interrupted_release_is_finished_first(stage: Stage) -> None:
    stage.script(release=[Interrupted(KeyboardInterrupt(), answer(204))])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        pass
    stage.run_jobs()

    assert stage.wire.operations() == ["acquire", "release"]


def test_an_interrupted_release_is_tried_twice_like_any_other(stage: Stage) -> None:
    stage.script(release=[Interrupted(KeyboardInterrupt(), lost), lost])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        pass
    stage.run_jobs()

    assert stage.wire.operations() == ["acquire", "release", "release"]


def test_a_release_that_is_broken_off_is_done_by_a_worker(stage: Stage) -> None:
    stage.script(release=[bang(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        pass
    assert stage.wire.operations() == ["acquire", "release"]
    stage.run_jobs()

    assert stage.wire.operations() == ["acquire", "release", "release"]


def test_a_workers_release_that_fails_is_only_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.script(release=[bang(KeyboardInterrupt()), lost, lost])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        pass
    stage.run_jobs()

    assert "could not be given back" in caplog.text


def test_without_a_thread_for_the_release_the_interrupt_still_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.script(release=[bang(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt), stage.locks.with_lock("a", ttl=30):
        stage.workers.refuses = True

    assert "no thread" in caplog.text


def test_an_end_that_is_interrupted_before_the_release_is_ended_by_a_worker(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    guard = lock.__enter__()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(guard._held), "finish", lambda held: bang(KeyboardInterrupt())(0.0))
        lock.__exit__(None, None, None)
    stage.run_jobs()

    assert stage.wire.operations() == ["acquire", "release"]


def test_a_with_lock_that_is_dropped_is_given_back(stage: Stage) -> None:
    stage.locks.with_lock("a", ttl=30).__enter__()
    gc.collect()
    stage.advance(0)

    assert stage.wire.operations() == ["acquire", "release"]


def test_a_guard_that_is_kept_keeps_its_lock(stage: Stage) -> None:
    guard = stage.locks.with_lock("a", ttl=30).__enter__()
    gc.collect()
    stage.advance(15)
    assert stage.wire.operations() == ["acquire", "renew"]

    del guard
    gc.collect()
    stage.advance(0)
    assert stage.wire.operations() == ["acquire", "renew", "release"]


def test_a_dropped_with_lock_that_was_released_is_left_alone(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    stage.locks.release("a", lock.__enter__().lease)
    del lock
    gc.collect()
    stage.advance(0)

    assert stage.wire.operations() == ["acquire", "release"]


def test_a_with_lock_dropped_while_the_interpreter_ends_is_silent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    lock.__enter__()
    held = lock._held
    assert held is not None
    with monkeypatch.context() as patch:
        patch.setattr(stage.timers, "call_at", lambda at, action: bang(RuntimeError("no"))(at))
        del lock
        gc.collect()

    held.abandon()


def test_without_threads_no_lock_is_taken(stage: Stage) -> None:
    stage.workers.refuses = True
    with pytest.raises(VolcanoError, match="no thread can renew it"):
        with stage.locks.with_lock("a", ttl=30):
            pytest.fail("the block ran")

    assert stage.wire.sent == []


# --- closing


def test_closing_loses_all_guards_first_then_releases_each_and_reports_one_failure(
    stage: Stage,
) -> None:
    locks = [stage.locks.with_lock(key, ttl=30) for key in "abc"]
    guards = [lock.__enter__() for lock in locks]
    order: list[str] = []
    for guard in guards:
        guard.on_lost(lambda loss: order.append(str(loss)))
    stage.script(release=[answer(204), refused(500), refused(403)])

    with pytest.raises(ServerError) as failure:
        stage.runtime.close()

    assert all(guard.lost for guard in guards)
    assert [text[:12] for text in sorted(order)] == ["the lock 'a'", "the lock 'b'", "the lock 'c'"]
    assert len(stage.wire.of("release")) == 3
    assert len({one.token for one in stage.wire.of("release")}) == 3
    assert "PermissionDeniedError" in failure.value.__notes__[0]
    assert stage.wire.is_closed
    for lock in locks:
        with pytest.raises(LockLostError, match="its client was closed"):
            lock.__exit__(None, None, None)
    assert len(stage.wire.of("release")) == 3
    stage.runtime.close()


def test_closing_sends_nothing_for_what_was_released(stage: Stage) -> None:
    with stage.locks.with_lock("a", ttl=30) as guard:
        stage.locks.release("a", guard.lease)
        stage.runtime.close()

    assert stage.wire.operations() == ["acquire", "release"]


def test_closing_without_a_thread_still_releases(stage: Stage) -> None:
    with pytest.raises(LockLostError), stage.locks.with_lock("a", ttl=30):
        stage.workers.refuses = True
        stage.runtime.close()

    assert stage.wire.operations() == ["acquire", "release"]


def test_a_closed_client_says_so(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    stage.runtime.close()

    for call in (
        lambda: stage.locks.get("a"),
        lambda: stage.locks.acquire("a", ttl=30),
        lambda: stage.locks.with_lock("a", ttl=30),
        lock.__enter__,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_client_that_is_closed_during_an_acquire_does_not_start_the_block(stage: Stage) -> None:
    def closes(sent_at: float) -> Outcome:
        stage.runtime.close()
        return granted(201)(sent_at)

    stage.script(acquire=[closes])
    with pytest.raises(LockLostError, match="closed"), stage.locks.with_lock("a", ttl=30):
        pytest.fail("the block ran")

    assert stage.wire.operations() == ["acquire", "release"]


# --- forks


def test_in_the_child_of_a_fork_nothing_is_held_and_nothing_sent(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    guard = lock.__enter__()
    guard.on_lost(lambda loss: pytest.fail("no callback in the child"))

    stage.runtime.become_child()
    stage.runtime.workers, stage.runtime.callbacks = stage.workers, stage.callbacks
    stage.timers.pending.clear()

    assert guard.lost
    assert guard.wait_lost() is True
    with pytest.raises(LockLostError, match="forked"):
        lock.__exit__(None, None, None)
    assert stage.wire.operations() == ["acquire"]
    assert stage.wire.forgot == 1
    with stage.locks.with_lock("a", ttl=30) as own:
        stage.advance(35)
        assert not own.lost


def test_nothing_that_is_logged_shows_a_secret(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stage.script(acquire=[lost, lost], release=[lost, lost, refused(500), refused(500)])
    with pytest.raises(TransportError):
        stage.locks.acquire("a", ttl=30)
    with stage.locks.with_lock("a", ttl=30, token=TOKEN) as guard:
        told = repr([guard, guard.lease, stage.locks, SETTINGS])

    for secret in (TOKEN, "sk-stage"):
        assert secret not in caplog.text + told
    assert PermissionDeniedError.__mro__[1] is AuthenticationError


def test_an_end_without_a_beginning_does_nothing(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)

    assert lock.__exit__(None, None, None) is False
    assert stage.wire.sent == []
