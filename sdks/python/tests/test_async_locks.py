import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest
from async_stage import (
    CONFLICT,
    EXPIRES_AT,
    HANG,
    Call,
    Stage,
    answer,
    granted,
    refused,
    reset,
    settle,
)

from volcano_sdk.errors import (
    AuthenticationError,
    ConflictError,
    LockLostError,
    NotFoundError,
    RateLimitedError,
    ServerError,
    TransportError,
    ValidationError,
    VolcanoError,
    chain,
)
from volcano_sdk.lease import LockLease, LockState

pytestmark = pytest.mark.anyio
TOKEN = "0d9c2f0e-6f9b-4b7a-9f0e-2a7f3c1b5d11"


@pytest.fixture
def stage() -> Stage:
    return Stage()


# --- direct calls ---------------------------------------------------------------------------------


async def test_acquire_returns_the_lease(stage: Stage) -> None:
    lease = await stage.client().locks.acquire("a:b", ttl=30)

    [sent] = stage.wire.sent
    assert (sent.operation, sent.key, sent.body) == ("acquire", "a%3Ab", b'{"ttl_seconds":30}')
    assert (lease.key, lease.token, lease.fencing_token) == ("a:b", sent.token, 7)
    assert lease.expires_at.isoformat() == "2026-11-29T12:00:00+00:00"


@pytest.mark.parametrize("trouble", [reset(), reset(reached=False), answer(503)])
async def test_an_acquire_without_an_answer_is_tried_once_more(stage: Stage, trouble: Any) -> None:
    stage.wire.script["acquire"] = [trouble]

    await stage.client().locks.acquire("k", ttl=30)

    first, second = stage.wire.sent
    assert (first.token, first.request_id) == (second.token, second.request_id)


async def test_an_acquire_that_stays_unknown_is_given_back(stage: Stage) -> None:
    stage.wire.script["acquire"] = [reset(), reset()]

    with pytest.raises(TransportError, match="reset"):
        await stage.client().locks.acquire("k", ttl=30)

    assert stage.wire.operations() == ["acquire", "acquire", "release"]
    assert len({sent.token for sent in stage.wire.sent}) == 1


async def test_an_acquire_with_the_callers_token_is_left_to_the_caller(stage: Stage) -> None:
    stage.wire.script["acquire"] = [reset(), reset()]

    with pytest.raises(TransportError):
        await stage.client().locks.acquire("k", ttl=30, token=TOKEN, request_id=TOKEN)

    assert stage.wire.operations() == ["acquire", "acquire"]
    assert {(sent.token, sent.request_id) for sent in stage.wire.sent} == {(TOKEN, TOKEN)}


async def test_an_acquire_that_never_connected_leaves_nothing_to_give_back(stage: Stage) -> None:
    stage.wire.script["acquire"] = [reset(reached=False), reset(reached=False)]

    with pytest.raises(TransportError):
        await stage.client().locks.acquire("k", ttl=30)

    assert stage.wire.operations() == ["acquire", "acquire"]


async def test_a_failing_compensation_is_only_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.wire.script = {"acquire": [answer(500)], "release": [answer(500), answer(500)]}

    with pytest.raises(ServerError, match="acquire"):
        await stage.client().locks.acquire("k", ttl=30)

    assert stage.wire.operations() == ["acquire", "release", "release"]
    assert "'k' may stay locked" in caplog.text
    assert str(stage.wire.sent[0].token) not in caplog.text


async def test_a_held_lock_is_a_conflict(stage: Stage) -> None:
    stage.wire.script["acquire"] = [refused(409, "lock_held")]

    with pytest.raises(ConflictError) as caught:
        await stage.client().locks.acquire("k", ttl=30)

    assert (caught.value.status, caught.value.code) == (409, "lock_held")
    assert stage.wire.operations() == ["acquire"]


async def test_an_acquire_is_as_old_as_its_first_try(stage: Stage) -> None:
    """Tried at 0 s and at 4 s; the answer to the second comes at 4.5 s, after the stop time."""
    stage.wire.script["acquire"] = [HANG]
    stage.wire.takes["acquire"] = [9, 0.5]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=5))
        await stage.clock.advance(5)

    assert call.error is None
    assert [sent.at for sent in stage.wire.sent] == [100, 104]


async def test_a_late_answer_is_given_back(stage: Stage) -> None:
    stage.wire.script["acquire"] = [granted(201, x_volcano_expires_in="2.000")]
    stage.wire.takes["acquire"] = [1.5]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=5))
        await stage.clock.advance(2)

    assert isinstance(call.error, TransportError)
    assert "not held" in str(call.error)
    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_late_answer_to_the_callers_token_is_left_to_the_caller(stage: Stage) -> None:
    stage.wire.script["acquire"] = [granted(201, x_volcano_expires_in="2.000")]
    stage.wire.takes["acquire"] = [1.5]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=5, token=TOKEN))
        await stage.clock.advance(2)

    assert isinstance(call.error, TransportError)
    assert stage.wire.operations() == ["acquire"]


async def test_renew_release_get_and_force_release(stage: Stage) -> None:
    locks = stage.client().locks
    stage.wire.script["renew"] = [granted(200, fencing_token=8)]
    body = f'{{"held":true,"expires_at":"{EXPIRES_AT}","fencing_token":9}}'
    stage.wire.script["get"] = [answer(200, body)]

    lease = await locks.acquire("k", ttl=30)
    renewed = await locks.renew("k", lease, ttl=60)
    await locks.release("k", lease)
    state = await locks.get("k")
    await locks.force_release("k", request_id=TOKEN)

    assert (renewed.token, renewed.fencing_token) == (lease.token, 8)
    assert state == LockState(held=True, expires_at=lease.expires_at, fencing_token=9)
    assert stage.wire.operations() == ["acquire", "renew", "release", "get", "force_release"]
    assert [sent.token for sent in stage.wire.sent] == [lease.token] * 3 + [None] * 2
    assert len({sent.request_id for sent in stage.wire.sent}) == 5
    assert stage.wire.sent[-1].request_id == TOKEN


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (refused(400, "invalid_request"), ValidationError),
        (answer(404), NotFoundError),
        (refused(429, "lock_rate_limited", retry_after="3"), RateLimitedError),
        (answer(500), ServerError),
        (answer(302), VolcanoError),
        (reset(), TransportError),
        (HANG, TransportError),
    ],
)
async def test_an_error_of_a_direct_call_is_raised_after_one_try(
    stage: Stage, response: Any, error: type[VolcanoError]
) -> None:
    stage.wire.script["get"] = [response]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client(timeout=4).locks.get("k"))
        await stage.clock.advance(4)

    assert type(call.error) is error
    assert len(stage.wire.sent) == 1


async def test_bad_arguments_are_refused_before_anything_is_sent(stage: Stage) -> None:
    locks = stage.client().locks
    lease = await locks.acquire("k", ttl=30)
    stage.wire.sent.clear()

    with pytest.raises(ValueError, match="key"):
        await locks.acquire("a/b", ttl=30)
    with pytest.raises(ValueError, match="ttl"):
        await locks.acquire("k", ttl=4)
    with pytest.raises(ValueError, match="token"):
        await locks.acquire("k", ttl=30, token="secret")
    with pytest.raises(ValueError, match="request_id"):
        await locks.acquire("k", ttl=30, request_id="1")
    with pytest.raises(ValueError, match="not of 'other'"):
        await locks.renew("other", lease, ttl=30)
    with pytest.raises(ValueError, match="ttl"):
        await locks.renew("k", lease, ttl=True)
    with pytest.raises(TypeError, match="LockLease"):
        await locks.release("k", "token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token"):
        await locks.release("k", LockLease("k", "junk", lease.expires_at, 1))
    with pytest.raises(ValueError, match="key"):
        await locks.get("..")
    with pytest.raises(ValueError, match="key"):
        await locks.force_release("")

    assert stage.wire.sent == []


async def test_a_released_token_never_acquires_again(stage: Stage) -> None:
    locks = stage.client().locks
    lease = await locks.acquire("k", ttl=30, token=TOKEN)
    await locks.release("k", lease)

    with pytest.raises(ValueError, match="make a new one") as caught:
        await locks.acquire("k", ttl=30, token=uuid.UUID(TOKEN))

    assert TOKEN not in str(caught.value)
    assert stage.wire.operations() == ["acquire", "release"]


async def test_without_a_service_key_nothing_is_sent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VOLCANO_SERVICE_KEY", raising=False)

    with pytest.raises(AuthenticationError, match="VOLCANO_SERVICE_KEY"):
        await stage.client(service_key=None).locks.acquire("k", ttl=30)

    assert stage.wire.sent == []


async def test_calls_wait_for_a_place(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volcano_sdk.async_calls._PLACES", 2)
    stage.wire.takes["get"] = [1.0] * 4
    client = stage.client(timeout=5)

    async with anyio.create_task_group() as tasks:
        calls = [Call(tasks, lambda: client.locks.get("k")) for _ in range(4)]
        await stage.clock.advance(2)

    assert [call.value for call in calls] == [LockState(held=False)] * 4
    assert stage.wire.most_in_flight == 2


async def test_a_call_without_a_place_was_not_sent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volcano_sdk.async_calls._PLACES", 1)
    stage.wire.script["acquire"] = [HANG]
    stage.wire.script["release"] = [HANG, HANG]
    client = stage.client(timeout=5)

    async with anyio.create_task_group() as tasks:
        Call(tasks, lambda: client.locks.acquire("k", ttl=6))
        await settle()
        stage.clock.jump(-0.1)  # asked a moment before the place is free again
        late = Call(tasks, lambda: client.locks.get("k"))
        await settle()
        stage.clock.jump(0.1)
        await stage.clock.advance(20)

    assert "was not sent" in str(late.error)
    assert "get" not in stage.wire.operations()


# --- with_lock ------------------------------------------------------------------------------------


async def test_with_lock_holds_and_releases(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        assert (guard.lease.key, guard.lost) == ("k", False)
        guard.check()

    assert stage.wire.operations() == ["acquire", "release"]
    assert stage.wire.sent[0].token == stage.wire.sent[1].token == guard.lease.token


async def test_with_lock_needs_an_entered_client(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="async with AsyncVolcanoClient"):
        stage.client().locks.with_lock("k", ttl=30)


async def test_a_with_lock_is_for_one_use(stage: Stage) -> None:
    async with stage.client() as client:
        context = client.locks.with_lock("k", ttl=30)
        async with context:
            with pytest.raises(RuntimeError, match="call with_lock again"):
                await context.__aenter__()


async def test_a_conflict_keeps_the_body_from_running(stage: Stage) -> None:
    stage.wire.script["acquire"] = [refused(409, "lock_held")]

    async with stage.client() as client:
        with pytest.raises(ConflictError):
            async with client.locks.with_lock("k", ttl=30):
                pytest.fail("the body ran")

    assert stage.wire.operations() == ["acquire"]


async def test_with_lock_gives_back_what_stays_unknown_whoever_made_the_token(stage: Stage) -> None:
    stage.wire.script["acquire"] = [reset(), reset()]

    async with stage.client() as client:
        with pytest.raises(TransportError):
            await client.locks.with_lock("k", ttl=30, token=TOKEN).__aenter__()

    assert stage.wire.operations() == ["acquire", "acquire", "release"]


async def test_the_error_of_the_body_comes_out_as_it_is(stage: Stage) -> None:
    with pytest.raises(KeyError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            raise KeyError("mine")

    assert chain(caught.value) == [caught.value]
    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_failed_release_does_not_mask_a_good_body(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.wire.script["release"] = [answer(500), reset()]

    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        pass

    assert stage.wire.operations() == ["acquire", "release", "release"]
    first, second = stage.wire.of("release")
    assert first.request_id == second.request_id
    assert first.timeout == 2
    assert "was not released" in caplog.text
    assert guard.lease.token not in caplog.text


async def test_a_failed_release_travels_beside_the_bodys_error(stage: Stage) -> None:
    stage.wire.script["release"] = [answer(500), answer(500)]

    with pytest.raises(KeyError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            raise KeyError("mine")

    assert [type(error) for error in chain(caught.value)] == [KeyError, ServerError]
    assert caught.value.__notes__[0].startswith("ServerError: release")


async def test_a_release_refused_at_first_is_a_loss(stage: Stage) -> None:
    stage.wire.script["release"] = [CONFLICT]

    with pytest.raises(LockLostError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            pass

    assert [type(error) for error in chain(caught.value)] == [LockLostError, ConflictError]


async def test_a_release_refused_at_the_second_try_was_done_by_the_first(stage: Stage) -> None:
    stage.wire.script["release"] = [reset(), CONFLICT]

    async with stage.client() as client, client.locks.with_lock("k", ttl=30):
        pass

    assert stage.wire.operations() == ["acquire", "release", "release"]


async def test_renewals_go_on_while_the_body_runs(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        await stage.clock.advance(100)
        assert not guard.lost

    renewals = stage.wire.of("renew")
    assert [round(sent.at) for sent in renewals] == [
        110,
        120,
        130,
        140,
        150,
        160,
        170,
        180,
        190,
        200,
    ]
    assert len({sent.request_id for sent in renewals}) == 10
    assert {sent.token for sent in renewals} == {guard.lease.token}


async def test_a_refused_renewal_cancels_the_body(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]
    was_cancelled = False

    with pytest.raises(LockLostError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            try:
                await stage.clock.advance(12)
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                was_cancelled = True
                raise

    assert was_cancelled
    assert [type(error) for error in chain(caught.value)] == [LockLostError, ConflictError]
    assert stage.wire.operations() == ["acquire", "renew", "release"]


async def test_a_body_that_swallows_the_cancellation_still_hears_of_the_loss(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            with anyio.CancelScope() as scope:
                await stage.clock.advance(12)
                scope.cancel()
                await anyio.sleep_forever()


async def test_a_loss_leaves_a_release_one_try(stage: Stage) -> None:
    stage.wire.script = {"renew": [CONFLICT], "release": [reset()]}

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            await stage.clock.advance(12)
            await anyio.sleep_forever()

    assert stage.wire.operations() == ["acquire", "renew", "release"]


async def test_the_bodys_own_error_wins_over_the_loss(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]

    with pytest.raises(KeyError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            try:
                await stage.clock.advance(12)
                await anyio.sleep_forever()
            finally:
                raise KeyError("mine")

    kinds = [type(error) for error in chain(caught.value)]
    assert kinds[0] is KeyError
    assert LockLostError in kinds
    assert any(note.startswith("LockLostError") for note in caught.value.__notes__)


async def test_a_loss_raised_in_the_bodys_task_group_comes_out_bare(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:

            async def work() -> None:
                with anyio.CancelScope(shield=True):
                    await stage.clock.advance(12)
                guard.check()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)


async def test_an_error_in_the_bodys_task_group_stays_in_its_group(stage: Stage) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            async with anyio.create_task_group():
                raise KeyError("mine")

    assert [type(error) for error in caught.value.exceptions] == [KeyError]


async def test_an_error_beside_our_cancellation_stays_in_its_group(stage: Stage) -> None:
    """The children of the body's task group are cancelled by the loss, and one of them fails."""
    stage.wire.script["renew"] = [CONFLICT]

    with pytest.raises(ExceptionGroup) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):

            async def fail() -> None:
                try:
                    await anyio.sleep_forever()
                finally:
                    raise KeyError("mine")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fail)
                tasks.start_soon(anyio.sleep_forever)
                await stage.clock.advance(12)
                await anyio.sleep_forever()

    assert caught.group_contains(KeyError)
    assert any(isinstance(error, LockLostError) for error in chain(caught.value))


async def test_the_first_look_after_a_blocked_loop_sees_the_loss(stage: Stage) -> None:
    with pytest.raises(LockLostError, match="not renewed in time"):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
            stage.clock.jump(10)
            assert guard.lost
            guard.check()
            pytest.fail("check did not raise")

    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_body_that_only_blocked_hears_of_the_loss_at_its_end(stage: Stage) -> None:
    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5):
            stage.clock.jump(4)


async def test_a_first_look_cancels_the_body(stage: Stage) -> None:
    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
            stage.clock.jump(10)
            assert guard.lost
            await anyio.sleep_forever()


async def test_an_acquire_that_was_slow_is_renewed_before_the_body_starts(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [0.9 * 20]
    stage.wire.script["renew"] = [answer(500)]
    order: list[str] = []

    async def hold() -> None:
        async with stage.client(timeout=60) as client, client.locks.with_lock("k", ttl=20):
            order.extend([*stage.wire.operations(), "body"])

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await stage.clock.advance(20)

    assert call.error is None
    assert order == ["acquire", "renew", "renew", "body"]


async def test_an_acquire_answered_after_the_stop_time_never_starts_the_body(stage: Stage) -> None:
    stage.wire.script["acquire"] = [granted(201, x_volcano_expires_in="2.000")]
    stage.wire.takes["acquire"] = [1.5]

    async def hold() -> None:
        async with stage.client() as client, client.locks.with_lock("k", ttl=5):
            pytest.fail("the body ran")

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await stage.clock.advance(2)

    assert type(call.error) is LockLostError
    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_lock_lost_before_the_body_starts_keeps_its_cause(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [15.0]
    stage.wire.script["renew"] = [CONFLICT]

    async def hold() -> None:
        async with stage.client(timeout=60) as client, client.locks.with_lock("k", ttl=20):
            pytest.fail("the body ran")

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await stage.clock.advance(16)

    assert call.error is not None
    assert [type(error) for error in chain(call.error)] == [LockLostError, ConflictError]
    assert stage.wire.operations() == ["acquire", "renew", "release"]


# --- direct calls that concern a running with_lock ------------------------------------------------


async def test_a_shorter_ttl_of_a_direct_renewal_counts_from_its_send(stage: Stage) -> None:
    stage.wire.script["renew"] = [HANG] * 9

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
            async with anyio.create_task_group() as tasks:
                Call(tasks, lambda: client.locks.renew("k", guard.lease, ttl=5))
                await stage.clock.advance(3.9)
                assert not guard.lost
                await stage.clock.advance(0.2)
                await anyio.sleep_forever()

    assert stage.clock.now() == pytest.approx(104.1)


async def test_a_direct_renewal_is_as_good_as_one_of_ours(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        await stage.clock.advance(9)
        await client.locks.renew("k", guard.lease, ttl=30)
        await stage.clock.advance(9)
        assert len(stage.wire.of("renew")) == 1


async def test_a_direct_acquire_with_the_guards_token_is_as_good_as_a_renewal(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=30, token=TOKEN):
        await stage.clock.advance(9)
        await client.locks.acquire("k", ttl=30, token=TOKEN)
        await stage.clock.advance(9)
        assert stage.wire.of("renew") == []


async def test_a_refused_direct_renewal_loses_the_lock(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
            with pytest.raises(ConflictError):
                await client.locks.renew("k", guard.lease, ttl=30)
            await anyio.sleep_forever()


async def test_a_direct_renewal_with_another_fencing_token_loses_the_lock(stage: Stage) -> None:
    stage.wire.script["renew"] = [granted(200, fencing_token=8)]

    with pytest.raises(LockLostError, match="fencing token 8"):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
            await client.locks.renew("k", guard.lease, ttl=30)
            await anyio.sleep_forever()


async def test_a_refused_direct_acquire_with_the_guards_token_loses_the_lock(stage: Stage) -> None:
    async with stage.client() as client:
        with pytest.raises(LockLostError) as caught:
            async with client.locks.with_lock("k", ttl=30, token=TOKEN) as guard:
                stage.wire.script["acquire"] = [CONFLICT]
                with pytest.raises(ConflictError) as refusal:
                    await client.locks.acquire("k", ttl=30, token=TOKEN)
                assert guard.lost

    assert caught.value.__cause__ is refusal.value


async def test_the_same_token_on_another_key_is_another_lease(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]
    async with stage.client() as client, client.locks.with_lock("k", ttl=30, token=TOKEN) as guard:
        other = LockLease("other", TOKEN, datetime.now(UTC), 7)
        with pytest.raises(ConflictError):
            await client.locks.renew("other", other, ttl=5)
        assert not guard.lost
        assert guard._held.holding.trust.ttl == 30


async def test_a_with_lock_lives_by_the_shortest_ttl_of_direct_calls_before_it(
    stage: Stage,
) -> None:
    """One of them may still be under way, and shorten the lease when it arrives."""
    async with stage.client() as client:
        lease = await client.locks.acquire("k", ttl=30, token=TOKEN)
        await client.locks.renew("k", lease, ttl=6)
        async with client.locks.with_lock("k", ttl=30, token=TOKEN):
            await stage.clock.advance(2)
            assert [sent.at for sent in stage.wire.of("renew")] == [100.0, 102.0]


async def test_after_a_direct_release_nothing_more_is_sent(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
        await client.locks.release("k", guard.lease)
        await stage.clock.advance(20)
        assert not guard.lost

    assert stage.wire.operations() == ["acquire", "release"]


async def test_after_a_direct_release_that_failed_the_exit_releases(stage: Stage) -> None:
    stage.wire.script["release"] = [answer(500), CONFLICT]

    async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
        with pytest.raises(ServerError):
            await client.locks.release("k", guard.lease)

    assert stage.wire.operations() == ["acquire", "release", "release"]


# --- cancelling -----------------------------------------------------------------------------------


async def test_a_cancelled_acquire_waits_for_its_answer_and_gives_it_back(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [1.0]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=30))
        await settle()
        call.scope.cancel()
        await stage.clock.advance(0.5)
        assert stage.wire.operations() == ["acquire"]
        await stage.clock.advance(0.5)

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_cancelled_acquire_waits_two_seconds_at_most(stage: Stage) -> None:
    stage.wire.script["acquire"] = [HANG]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=30))
        await settle()
        call.scope.cancel()
        await stage.clock.advance(1.9)
        assert not call.ended.is_set()
        await stage.clock.advance(0.1)
        assert call.ended.is_set()

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire", "release"]
    assert stage.wire.in_flight == 0


async def test_a_cancelled_acquire_that_was_refused_gives_nothing_back(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [1.0]
    stage.wire.script["acquire"] = [refused(409, "lock_held")]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=30))
        await settle()
        call.scope.cancel()
        await stage.clock.advance(1)

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire"]


async def test_a_cancelled_acquire_with_the_callers_token_ends_at_once(stage: Stage) -> None:
    stage.wire.script["acquire"] = [HANG]

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, lambda: stage.client().locks.acquire("k", ttl=30, token=TOKEN))
        await settle()
        call.scope.cancel()
        await settle()
        assert call.ended.is_set()

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire"]


async def test_a_cancelled_with_lock_gives_back_its_acquire(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [1.0]

    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=30, token=TOKEN):
            pytest.fail("the body ran")

    async with stage.client() as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await settle()
        call.scope.cancel()
        await stage.clock.advance(1)

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_with_lock_cancelled_while_it_renews_before_the_body_releases(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [15.0]
    stage.wire.script["renew"] = [HANG]

    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=20):
            pytest.fail("the body ran")

    async with stage.client(timeout=60) as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await stage.clock.advance(15.1)
        call.scope.cancel()
        await settle()
        assert call.ended.is_set()

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire", "renew", "release"]
    assert stage.wire.in_flight == 0


async def test_a_cancelled_body_releases_and_the_cancellation_goes_on(stage: Stage) -> None:
    stage.wire.takes["release"] = [1.0]

    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=30):
            await anyio.sleep_forever()

    async with stage.client() as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await settle()
        call.scope.cancel()
        await settle()
        call.scope.cancel()
        await stage.clock.advance(1)
        assert call.ended.is_set()

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire", "release"]


async def test_with_the_server_down_a_cancellation_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.wire.script["release"] = [HANG, HANG]

    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=30):
            await anyio.sleep_forever()

    async with stage.client() as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await settle()
        call.scope.cancel()
        await stage.clock.advance(4)
        assert call.ended.is_set()

    assert call.was_cancelled
    assert "was not released" in caplog.text


async def test_a_cancellation_during_the_exit_of_a_good_body_goes_on(stage: Stage) -> None:
    stage.wire.takes["release"] = [1.0]

    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=30):
            pass

    async with stage.client() as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)
        await settle()
        call.scope.cancel()
        await stage.clock.advance(1)

    assert call.was_cancelled
    assert stage.wire.operations() == ["acquire", "release"]


async def test_the_users_cancellation_wins_over_a_loss_of_the_same_moment(stage: Stage) -> None:
    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=5) as guard:
            stage.clock.jump(10)
            call.scope.cancel()
            assert guard.lost
            await anyio.sleep_forever()

    async with stage.client() as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)

    assert call.was_cancelled
    assert call.error is None


async def test_the_users_cancellation_wins_also_when_nothing_is_left_to_release(
    stage: Stage,
) -> None:
    async def hold() -> None:
        async with client.locks.with_lock("k", ttl=5) as guard:
            with anyio.CancelScope(shield=True):
                await client.aclose()
            call.scope.cancel()
            guard.check()

    async with stage.client() as client, anyio.create_task_group() as tasks:
        call = Call(tasks, hold)

    assert call.was_cancelled
    assert call.error is None


async def test_a_timeout_around_with_lock_is_a_timeout(stage: Stage) -> None:
    async with stage.client() as client:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0):
                async with client.locks.with_lock("k", ttl=30):
                    pytest.fail("the body ran")

    assert stage.wire.operations() == ["acquire", "release"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestTaskCancel:
    """asyncio's own `task.cancel()`, which no scope can shield from, and its counting."""

    async def test_cancelling_an_acquire_in_mid_flight_gives_it_back(self, stage: Stage) -> None:
        stage.wire.takes["acquire"] = [1.0]
        task = asyncio.create_task(stage.client().locks.acquire("k", ttl=30))
        await settle()

        task.cancel()
        await settle()
        task.cancel()
        await stage.clock.advance(1)

        with pytest.raises(asyncio.CancelledError):
            await task
        assert stage.wire.operations() == ["acquire", "release"]

    async def test_cancelling_the_body_and_the_exit_still_releases(self, stage: Stage) -> None:
        stage.wire.takes["release"] = [1.0]

        async def hold() -> None:
            async with client.locks.with_lock("k", ttl=30):
                await asyncio.sleep(1000)

        async with stage.client() as client:
            task = asyncio.create_task(hold())
            for _ in range(3):
                await settle()
                task.cancel()
            await settle()
            assert not task.done()
            await stage.clock.advance(1)

            with pytest.raises(asyncio.CancelledError):
                await task
        assert stage.wire.operations() == ["acquire", "release"]

    async def test_it_wins_over_a_loss_of_the_same_moment(self, stage: Stage) -> None:
        async def hold() -> None:
            async with client.locks.with_lock("k", ttl=5) as guard:
                guards.append(guard)
                await asyncio.sleep(1000)

        guards: list[Any] = []
        async with stage.client() as client:
            for cancels_first in (True, False):
                task = asyncio.create_task(hold())
                await settle()
                stage.clock.jump(10)
                if cancels_first:
                    task.cancel()
                assert guards.pop().lost
                if not cancels_first:
                    task.cancel()

                with pytest.raises(asyncio.CancelledError):
                    await task

    async def test_a_loss_leaves_no_cancellation_behind(self, stage: Stage) -> None:
        stage.wire.script["renew"] = [CONFLICT]

        with pytest.raises(LockLostError):
            async with stage.client() as client, client.locks.with_lock("k", ttl=30):
                await stage.clock.advance(12)
                await anyio.sleep_forever()

        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    async def test_asyncio_timeout_around_with_lock_is_a_timeout(self, stage: Stage) -> None:
        async with stage.client() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), client.locks.with_lock("k", ttl=30):
                    await asyncio.sleep(1000)

        assert stage.wire.operations() == ["acquire", "release"]

    async def test_a_generator_that_the_loop_closes_releases(self, stage: Stage) -> None:
        async def ticks() -> AsyncGenerator[int]:
            async with client.locks.with_lock("k", ttl=30):
                yield 1

        async with stage.client() as client:
            generator = ticks()
            await asyncio.create_task(generator.__anext__())
            await asyncio.create_task(_close(generator))

        assert stage.wire.operations() == ["acquire", "release"]

    async def test_a_body_left_in_another_task_is_released_and_told(self, stage: Stage) -> None:
        async with stage.client() as client:
            context = client.locks.with_lock("k", ttl=30)
            await asyncio.create_task(context.__aenter__())

            with pytest.raises(RuntimeError, match="different task"):
                await asyncio.create_task(context.__aexit__(None, None, None))

        assert stage.wire.operations() == ["acquire", "release"]


async def _close(generator: AsyncGenerator[int]) -> None:
    await generator.aclose()


async def test_a_generator_that_is_closed_releases(stage: Stage) -> None:
    async def ticks() -> AsyncGenerator[int]:
        async with client.locks.with_lock("k", ttl=30):
            yield 1

    async with stage.client() as client:
        generator = ticks()
        await anext(generator)
        await generator.aclose()

    assert stage.wire.operations() == ["acquire", "release"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_an_exit_of_the_process_releases_first(stage: Stage, error: BaseException) -> None:
    with pytest.raises(type(error)):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            raise error

    assert stage.wire.operations() == ["acquire", "release"]


async def test_the_next_lock_of_the_same_client_works_after_a_loss(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]

    async with stage.client() as client:
        with pytest.raises(LockLostError):
            async with client.locks.with_lock("k", ttl=30) as first:
                await stage.clock.advance(12)
                await anyio.sleep_forever()
        async with client.locks.with_lock("k", ttl=30) as second:
            await stage.clock.advance(12)
            assert first.lost
            assert not second.lost

    assert stage.wire.operations() == [
        "acquire", "renew", "release", "acquire", "renew", "release",
    ]  # fmt: skip


async def test_no_log_line_and_no_repr_shows_a_secret(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stage.wire.script["release"] = [answer(500), answer(500)]

    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        shown = f"{guard!r} {client!r}"

    assert guard.lease.token not in shown + caplog.text
    assert "sk-test" not in shown + caplog.text
