import json
import math
import os
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from async_stage import CONFLICT, HANG, Call, Stage, answer, granted, refused, reset, settle
from many import GOOD_ITEM, LOST, Items

from volcano_sdk.errors import LockLostError, TransportError, chain
from volcano_sdk.operations import Answer, Outcome

pytestmark = pytest.mark.anyio


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_a_renewal_is_due_after_a_third_of_the_ttl_with_jitter() -> None:
    for jitter, due_at in ((-1.0, 109.0), (1.0, 111.0)):
        stage = Stage(jitter)
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            await stage.clock.advance(12)
        assert [sent.at for sent in stage.wire.of("renew")] == [due_at]


async def test_transient_failures_are_survived_and_the_renewer_lives(stage: Stage) -> None:
    stage.wire.script["renew"] = [
        reset(),
        answer(500),
        answer(200, "junk"),
        refused(429, "lock_rate_limited", retry_after="1"),
    ]

    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        await stage.clock.advance(25)
        assert not guard.lost

    times = [round(sent.at, 3) for sent in stage.wire.of("renew")]
    assert times == [110, 110.1, 110.3, 110.7, 111.7, 121.7]
    ids = [sent.request_id for sent in stage.wire.of("renew")]
    assert len(set(ids[:5])) == 1  # one renewal, tried five times
    assert ids[5] != ids[4]


@pytest.mark.parametrize("trouble", [HANG, reset(), answer(503)])
async def test_failing_renewals_end_in_a_loss_at_the_stop_time(stage: Stage, trouble: Any) -> None:
    stage.wire.script["renew"] = [trouble] * 99
    losses: list[tuple[float, LockLostError]] = []

    with pytest.raises(LockLostError, match="not renewed in time"):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
            guard.on_lost(lambda loss: losses.append((stage.clock.now(), loss)))
            await stage.clock.advance(40)
            await anyio.sleep_forever()

    [(at, loss)] = losses
    assert at == pytest.approx(129)
    assert len(chain(loss)) == 2  # the loss, and what failed last
    assert all(sent.at < 129 for sent in stage.wire.of("renew"))
    assert stage.wire.in_flight == 0


async def test_a_hung_renewal_leaves_room_for_two_more(stage: Stage) -> None:
    stage.wire.script["renew"] = [HANG, HANG]

    async with stage.client() as client, client.locks.with_lock("k", ttl=15) as guard:
        await stage.clock.advance(13)
        assert not guard.lost

    first, second, third = stage.wire.of("renew")
    assert first.timeout == pytest.approx(3)
    assert second.at == pytest.approx(first.at + 3)
    assert third.at < 114


async def test_the_body_ends_while_a_renewal_hangs(stage: Stage) -> None:
    stage.wire.script["renew"] = [HANG]

    async with stage.client() as client, client.locks.with_lock("k", ttl=30):
        await stage.clock.advance(11)
        assert stage.wire.in_flight == 1
    await stage.clock.advance(60)

    assert stage.wire.in_flight == 0
    assert stage.wire.operations() == ["acquire", "renew", "release"]


async def test_another_fencing_token_in_a_renewal_is_a_loss(stage: Stage) -> None:
    stage.wire.script["renew"] = [granted(200, fencing_token=8)]

    with pytest.raises(LockLostError, match="fencing token 8"):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            await stage.clock.advance(11)
            await anyio.sleep_forever()


async def test_a_late_timer_sends_no_renewal_after_the_stop_time(stage: Stage) -> None:
    """A blocked loop: the renewal and the stop time are both due when the scheduler runs again."""
    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5):
            await settle()
            stage.clock.jump(10)
            await stage.clock.advance(0)
            await anyio.sleep_forever()

    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_body_that_blocked_the_loop_is_cancelled_within_a_few_turns(stage: Stage) -> None:
    turns = 0

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5):
            await settle()
            stage.clock.jump(10)
            [sleep] = stage.clock.pending
            sleep.scope.cancel()  # the first thing that the loop's timers do
            while turns < 100:
                await checkpoint()
                turns += 1

    assert turns <= 4


async def test_ninety_days_send_nothing_in_the_first_second(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=7_776_000):
        await stage.clock.advance(1)

    assert stage.wire.operations() == ["acquire", "release"]


async def test_renewals_in_flight_are_bounded_and_the_earliest_stop_time_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(shares=False)
    monkeypatch.setattr("volcano_sdk.async_renewal._ANSWERED_SOON", 1)

    async with stage.client() as client, AsyncExitStack() as stack:
        for number, ttl in enumerate((30, 9, 60, 12, 6)):
            await stack.enter_async_context(client.locks.with_lock(f"k{number}", ttl=ttl))
        await settle()
        stage.wire.sent.clear()
        stage.clock.jump(4.5)  # the loop was blocked: three are due at once
        await stage.clock.advance(0)

        assert [sent.key for sent in stage.wire.sent] == ["k4", "k1", "k3"]
        assert stage.wire.most_in_flight == 1


async def test_hung_renewals_do_not_keep_the_others_from_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(shares=False)
    monkeypatch.setattr("volcano_sdk.async_renewal._ANSWERED_SOON", 2)
    monkeypatch.setattr("volcano_sdk.async_renewal._IN_FLIGHT", 3)
    stage.wire.script["renew"] = [HANG] * 4

    async with stage.client() as client, AsyncExitStack() as stack:
        for number in range(4):
            await stack.enter_async_context(client.locks.with_lock(f"k{number}", ttl=30))
        await stage.clock.advance(10)
        assert stage.wire.in_flight == 2
        await stage.clock.advance(0.9)
        assert stage.wire.in_flight == 2
        await stage.clock.advance(0.1)
        assert stage.wire.in_flight == 3
        await stage.clock.advance(3)
        assert stage.wire.in_flight == 3
        await stage.clock.advance(12)
        assert stage.wire.in_flight == 0


@pytest.mark.parametrize("shares", [True, False])
async def test_sixty_leases_whose_renewals_are_slow_all_live(*, shares: bool) -> None:
    stage = Stage(shares=shares)
    stage.wire.takes["renew_many"] = [0.2] * 2000
    stage.wire.takes["renew"] = [0.2] * 2000

    async with stage.client() as client, AsyncExitStack() as stack:
        guards = [
            await stack.enter_async_context(client.locks.with_lock(f"k{number}", ttl=5))
            for number in range(60)
        ]
        await stage.clock.advance(20)
        assert not any(guard.lost for guard in guards)


async def test_a_lock_that_ends_while_it_queues_is_not_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(shares=False)
    monkeypatch.setattr("volcano_sdk.async_renewal._ANSWERED_SOON", 1)
    stage.wire.script["renew"] = [HANG]

    async with stage.client() as client, client.locks.with_lock("first", ttl=30):
        async with client.locks.with_lock("second", ttl=60):
            pass
        async with client.locks.with_lock("third", ttl=30):
            await stage.clock.advance(10.5)
        await stage.clock.advance(5)

    assert {sent.key for sent in stage.wire.of("renew")} == {"first"}


async def test_a_lock_that_is_lost_before_its_task_runs_sends_nothing(stage: Stage) -> None:
    async with stage.client() as client:
        with pytest.raises(LockLostError):
            async with client.locks.with_lock("k", ttl=5):
                await settle()
                [held] = client._renewals.kept
                stage.clock.jump(1.7)
                assert client._renewals._agenda.pass_by(stage.clock.now()) == []
                assert client._tasks is not None
                client._renewals._start_due(stage.clock.now(), client._tasks)
                stage.clock.jump(10)
                await settle()
                await anyio.sleep_forever()

    assert held.holding.loss is not None
    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_lock_that_ended_is_not_remembered_until_its_renewal(stage: Stage) -> None:
    async with stage.client() as client:
        async with client.locks.with_lock("k", ttl=7_776_000):
            pass
        assert client._renewals._agenda.next_moment == math.inf


async def test_an_idle_scheduler_asks_nothing_of_the_clock(stage: Stage) -> None:
    async with stage.client() as client:
        async with client.locks.with_lock("k", ttl=5):
            pass
        await stage.clock.advance(10)

        assert stage.clock.pending == []


async def test_a_later_lock_does_not_wake_the_scheduler_early(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=5):
        await settle()
        [sleep] = stage.clock.pending
        async with client.locks.with_lock("l", ttl=50):
            await settle()
            assert stage.clock.pending == [sleep]


async def test_of_two_with_locks_that_share_a_token_the_first_end_is_the_others_loss(
    stage: Stage,
) -> None:
    """Its release frees the key: from then on somebody else may have it."""
    token = "0d9c2f0e-6f9b-4b7a-9f0e-2a7f3c1b5d11"

    async with stage.client() as client:
        with pytest.raises(LockLostError, match="another with_lock"):
            async with client.locks.with_lock("k", ttl=30, token=token) as outer:
                async with client.locks.with_lock("k", ttl=30, token=token):
                    assert len(client._renewals.holders("k", token)) == 2
                    assert not outer.lost
                await anyio.sleep_forever()
        assert client._renewals.holders("k", token) == []


# --- the guard ------------------------------------------------------------------------------------


async def test_wait_lost_sees_the_loss_from_another_task(stage: Stage) -> None:
    stage.wire.script["renew"] = [CONFLICT]
    seen: list[bool] = []

    async with stage.client() as client, anyio.create_task_group() as tasks:
        with pytest.raises(LockLostError):
            async with client.locks.with_lock("k", ttl=30) as guard:

                async def watch() -> None:
                    seen.append(await guard.wait_lost())

                tasks.start_soon(watch)
                await stage.clock.advance(12)
                await anyio.sleep_forever()

    assert seen == [True]
    assert await guard.wait_lost()


async def test_wait_lost_ends_with_its_timeout_or_with_the_body(stage: Stage) -> None:
    seen: list[bool] = []

    async with stage.client() as client, anyio.create_task_group() as tasks:
        async with client.locks.with_lock("k", ttl=30) as guard:

            async def watch(seconds: float | None) -> None:
                seen.append(await guard.wait_lost(seconds))

            tasks.start_soon(watch, 3.0)
            tasks.start_soon(watch, 0.0)
            tasks.start_soon(watch, None)
            await settle()
            assert seen == [False]
            await stage.clock.advance(3)
            assert seen == [False, False]
    assert seen == [False, False, False]


async def test_wait_lost_refuses_what_is_no_time(stage: Stage) -> None:
    async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
        with pytest.raises(ValueError, match="nan"):
            await guard.wait_lost(float("nan"))


async def test_callbacks_hear_of_the_loss_once_and_their_errors_are_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.wire.script["renew"] = [CONFLICT]
    heard: list[LockLostError] = []

    with pytest.raises(LockLostError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30) as guard:
            guard.on_lost(lambda _: 1 / 0)
            guard.on_lost(heard.append)
            await stage.clock.advance(12)
            await anyio.sleep_forever()
    guard.on_lost(heard.append)

    assert heard == [caught.value, caught.value]
    assert "an on_lost callback failed" in caplog.text


async def test_a_callback_that_looks_again_hears_of_it_once(stage: Stage) -> None:
    heard: list[bool] = []

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
            guard.on_lost(lambda _: heard.append(guard.lost))
            stage.clock.jump(9)
            assert guard.lost

    assert heard == [True]


async def test_a_worker_thread_sees_the_loss_and_the_loop_announces_it(stage: Stage) -> None:
    heard: list[LockLostError] = []

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
            guard.on_lost(heard.append)
            await settle()
            stage.clock.jump(9)
            assert await to_thread.run_sync(lambda: guard.lost)
            assert heard == []
            assert guard.lost

    assert len(heard) == 1


async def test_a_loss_that_a_thread_saw_first_still_cancels_the_body(stage: Stage) -> None:
    heard: list[LockLostError] = []

    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
            guard.on_lost(heard.append)
            stage.wire.script["renew"] = [HANG] * 100
            await stage.clock.advance(3.9)
            stage.clock.jump(0.1)
            assert await to_thread.run_sync(lambda: guard.lost)
            assert heard == []
            await stage.clock.advance(0)
            assert len(heard) == 1
            await anyio.sleep_forever()


async def test_a_fork_owns_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage.client() as client:
        with pytest.raises(LockLostError, match="forked"):
            async with client.locks.with_lock("k", ttl=30) as guard:
                pid = os.getpid() + 1
                monkeypatch.setattr("volcano_sdk.async_renewal.os.getpid", lambda: pid)
                assert guard.lost

    assert stage.wire.operations() == ["acquire"]


async def test_a_guard_says_in_its_repr_whether_it_is_held(stage: Stage) -> None:
    with pytest.raises(LockLostError):
        async with stage.client() as client, client.locks.with_lock("k", ttl=5) as guard:
            held = repr(guard)
            stage.clock.jump(9)
            assert guard.lost

    assert held.endswith("held>")
    assert repr(guard).endswith("lost>")


# --- closing --------------------------------------------------------------------------------------


async def test_closing_gives_up_every_lock_and_reports_one_failure(stage: Stage) -> None:
    stage.wire.script["release"] = [answer(204), answer(500), answer(204)]
    events: list[str] = []

    async def hold(key: str) -> None:
        try:
            async with client.locks.with_lock(key, ttl=30) as guard:
                guard.on_lost(lambda _: events.append(f"lost, {len(stage.wire.of('release'))}"))
                await anyio.sleep_forever()
        except LockLostError as error:
            events.append(str(error))

    client = stage.client()
    async with anyio.create_task_group() as tasks:
        with pytest.raises(Exception, match="release was answered 500") as caught:
            async with client:
                for key in ("a", "b", "c"):
                    tasks.start_soon(hold, key)
                    await settle()

    assert not isinstance(caught.value, ExceptionGroup)
    assert events[:3] == ["lost, 0"] * 3
    assert sum("its client was closed" in event for event in events[3:]) == 3
    assert sorted(sent.key for sent in stage.wire.of("release")) == ["a", "b", "c"]
    assert stage.wire.is_closed


async def test_a_failure_to_release_travels_beside_the_users_error(stage: Stage) -> None:
    stage.wire.script["release"] = [reset()]

    async def hold() -> None:
        with pytest.raises(LockLostError):
            async with client.locks.with_lock("k", ttl=30):
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        with pytest.raises(KeyError) as caught:
            async with stage.client() as client:
                tasks.start_soon(hold)
                await settle()
                raise KeyError("mine")

    assert [type(error) for error in chain(caught.value)] == [KeyError, TransportError]


async def test_closing_inside_the_body_loses_the_lock(stage: Stage) -> None:
    with pytest.raises(LockLostError, match="its client was closed"):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            await client.aclose()
            await anyio.sleep_forever()

    assert stage.wire.operations() == ["acquire", "release"]


async def test_closing_while_cancelled_still_releases(stage: Stage) -> None:
    stage.wire.takes["release"] = [1.0]
    client = stage.client()

    async def use() -> None:
        async with client:
            await anyio.sleep_forever()

    async def hold() -> None:
        with pytest.raises(LockLostError):
            async with client.locks.with_lock("k", ttl=30):
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks, anyio.create_task_group() as users:
        users.start_soon(use)
        await settle()
        tasks.start_soon(hold)
        await settle()
        users.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await stage.clock.advance(1)

    assert stage.wire.operations() == ["acquire", "release"]
    assert stage.wire.is_closed


async def test_a_client_closed_during_an_acquire_gives_it_back(stage: Stage) -> None:
    stage.wire.takes["acquire"] = [1.0]

    async def hold() -> None:
        with pytest.raises(LockLostError, match="its client was closed"):
            async with client.locks.with_lock("k", ttl=30):
                pytest.fail("the body ran")

    async with anyio.create_task_group() as tasks:
        async with stage.client() as client:
            tasks.start_soon(hold)
            await settle()
        await stage.clock.advance(1)

    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_closed_client_refuses_calls(stage: Stage) -> None:
    async with stage.client() as client:
        pass

    with pytest.raises(RuntimeError, match="closed"):
        await client.locks.get("k")
    with pytest.raises(RuntimeError, match="entered client"):
        client.locks.with_lock("k", ttl=30)
    with pytest.raises(RuntimeError, match="entered before"):
        await client.__aenter__()
    assert stage.wire.sent == []


async def test_a_client_that_was_only_closed_cannot_be_entered(stage: Stage) -> None:
    client = stage.client()
    await client.aclose()

    with pytest.raises(RuntimeError, match="closed"):
        await client.__aenter__()


async def test_an_error_in_the_clients_body_comes_out_bare(stage: Stage) -> None:
    with pytest.raises(KeyError):
        async with stage.client():
            raise KeyError("mine")


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_ctrl_c_in_a_task_of_ours_comes_out_bare(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trio raises KeyboardInterrupt in whichever task is running."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            monkeypatch.setattr(client._renewals, "_start_due", interrupt)
            await stage.clock.advance(12)
            await anyio.sleep_forever()

    assert stage.wire.operations() == ["acquire", "release"]


async def test_a_fault_of_ours_is_loud(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=30):
            monkeypatch.setattr(client._renewals, "_start_due", fail)
            await stage.clock.advance(12)
            await anyio.sleep_forever()

    assert caught.group_contains(ZeroDivisionError)
    assert stage.wire.operations() == ["acquire", "release"]


async def test_transport_errors_are_transport_errors(stage: Stage) -> None:
    stage.wire.script["renew"] = [reset()] * 99

    with pytest.raises(LockLostError) as caught:
        async with stage.client() as client, client.locks.with_lock("k", ttl=5):
            await stage.clock.advance(5)
            await anyio.sleep_forever()

    assert isinstance(caught.value.__cause__, TransportError)


# --- several locks of one client


async def hold(client: Any, stack: AsyncExitStack, keys: str, ttl: int = 30) -> list[Any]:
    return [await stack.enter_async_context(client.locks.with_lock(key, ttl=ttl)) for key in keys]


async def test_a_herd_of_locks_is_one_timer_and_one_request_at_a_time(stage: Stage) -> None:
    async with stage.client() as client, AsyncExitStack() as stack:
        guards = [
            await stack.enter_async_context(client.locks.with_lock(f"k{number}", ttl=30))
            for number in range(1000)
        ]
        await settle()
        assert len(stage.clock.pending) == 1
        await stage.clock.advance(95)
        assert not any(guard.lost for guard in guards)
        assert len(stage.clock.pending) == 1

    assert len(stage.wire.of("renew_many")) == 9 * 2  # of 500
    assert stage.wire.of("renew") == []


async def test_a_lease_that_is_due_alone_uses_the_single_route(stage: Stage) -> None:
    async with stage.client() as client, AsyncExitStack() as stack:
        await hold(client, stack, "a")
        await stage.clock.advance(0.6)
        await hold(client, stack, "b")
        await stage.clock.advance(0.4)
        await hold(client, stack, "c")
        await stage.clock.advance(20)

    sent = [(round(one.at - 100, 6), one.keys) for one in stage.wire.sent[3:-3]]
    assert sent == [(10, ["a"]), (10.6, ["b", "c"]), (20, ["a"]), (20.6, ["b", "c"])]


def held_by_another(client: Any, tasks: TaskGroup, key: str) -> Call:
    """A task that holds the lock until it is cancelled."""

    async def body() -> None:
        async with client.locks.with_lock(key, ttl=30):
            await anyio.sleep_forever()

    return Call(tasks, body)


async def test_a_lease_that_is_refused_among_others_is_lost_alone(stage: Stage) -> None:
    stage.wire.script["renew_many"] = [Items(b=LOST)]

    async with (
        stage.client() as client,
        anyio.create_task_group() as tasks,
        client.locks.with_lock("a", ttl=30) as guard,
    ):
        other, third = (held_by_another(client, tasks, key) for key in "bc")
        await stage.clock.advance(10.1)
        assert not guard.lost
        assert isinstance(other.error, LockLostError)
        assert not third.ended.is_set()
        await stage.clock.advance(10)
        tasks.cancel_scope.cancel()

    renewed = [sorted(one.keys) for one in stage.wire.of("renew_many")]
    assert renewed == [["a", "b", "c"], ["a", "c"]]


async def test_requests_for_several_that_fail_in_transit_are_tried_again(stage: Stage) -> None:
    stage.wire.script["renew_many"] = [reset(), HANG, answer(503)]

    async with stage.client() as client, AsyncExitStack() as stack:
        guards = await hold(client, stack, "abc")
        await stage.clock.advance(28)
        assert not any(guard.lost for guard in guards)


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_without_the_route_is_asked_once(stage: Stage, status: int) -> None:
    stage.wire.script["renew_many"] = [answer(status)]

    async with stage.client() as client, AsyncExitStack() as stack:
        await hold(client, stack, "abc")
        await stage.clock.advance(25)

    assert len(stage.wire.of("renew_many")) == 1
    assert sorted(one.keys for one in stage.wire.of("renew")[:3]) == [["a"], ["b"], ["c"]]
    assert [one.at - 100 for one in stage.wire.of("renew")] == [10] * 3 + [20] * 3


@pytest.mark.parametrize("status", [400, 413])
async def test_what_the_server_finds_wrong_as_a_whole_is_sent_singly_this_time(
    stage: Stage, status: int
) -> None:
    stage.wire.script["renew_many"] = [answer(status)]

    async with stage.client() as client, AsyncExitStack() as stack:
        await hold(client, stack, "abc")
        await stage.clock.advance(25)

    assert sorted(one.keys for one in stage.wire.of("renew")) == [["a"], ["b"], ["c"]]
    assert [one.at - 100 for one in stage.wire.of("renew_many")] == [10, 20]


async def test_a_renewal_that_is_due_before_the_body_waits_also_through_a_fallback(
    stage: Stage,
) -> None:
    """The answer to the second acquire took long: two renewals are due before its body runs."""
    stage.wire.script["renew_many"] = [answer(404)]
    stage.wire.script["renew"] = [reset(), reset()]
    began_at: list[float] = []

    def late(sent_at: float) -> Outcome:
        stage.clock.jump(11)
        return Answer(sent_at, 201, {}, json.dumps(GOOD_ITEM).encode())

    async def body() -> None:
        async with client.locks.with_lock("b", ttl=30):
            began_at.append(stage.clock.now())

    async with (
        stage.client() as client,
        anyio.create_task_group() as tasks,
        client.locks.with_lock("a", ttl=30),
    ):
        stage.wire.script["acquire"] = [late]
        call = Call(tasks, body)
        await settle()
        await stage.clock.advance(0)
        assert stage.wire.operations()[2:] == ["renew_many", "renew", "renew"]
        assert not call.ended.is_set()
        await stage.clock.advance(0.2)
        assert call.error is None
        assert began_at == [pytest.approx(111.1)]


async def test_a_request_is_cut_off_when_nobody_waits_for_it_any_more(stage: Stage) -> None:
    stage.wire.script["renew_many"] = [HANG]

    async with stage.client() as client:
        async with client.locks.with_lock("a", ttl=30):
            async with client.locks.with_lock("b", ttl=30):
                await stage.clock.advance(10.1)
                assert stage.wire.in_flight == 1
            assert stage.wire.in_flight == 1
        await settle()
        assert stage.wire.in_flight == 0

    assert stage.wire.operations()[2:] == ["renew_many", "release", "release"]


async def test_the_answer_to_a_lease_that_has_ended_is_ignored(stage: Stage) -> None:
    stage.wire.script["renew_many"] = [Items(b=LOST)]
    stage.wire.takes["renew_many"] = [0.5]

    async with stage.client() as client, client.locks.with_lock("a", ttl=30) as guard:
        async with client.locks.with_lock("b", ttl=30) as other:
            await stage.clock.advance(10.1)
        await stage.clock.advance(0.5)
        assert not guard.lost
        assert not other.lost
        await stage.clock.advance(10)

    assert stage.wire.operations()[2:] == ["renew_many", "release", "renew", "release"]
