"""Waiting of the async flavour: tasks on a clock that the test moves."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from async_stage import HANG, Call, Stage, Stream, answer, granted, refused, reset, settle

from volcano_sdk.async_client import AsyncVolcanoClient
from volcano_sdk.errors import (
    AuthenticationError,
    ConflictError,
    RateLimitedError,
    ServerError,
    TransportError,
)
from volcano_sdk.operations import Outcome

pytestmark = pytest.mark.anyio
HELD = refused(409, "lock_held")
FREE = answer(200, '{"held": false}')


def is_held(expires_at: str) -> Any:
    return answer(200, f'{{"held": true, "expires_at": "{expires_at}", "fencing_token": 7}}')


class Waiting:
    """A client that was entered, and calls of it."""

    def __init__(self, stage: Stage, client: AsyncVolcanoClient, tasks: TaskGroup) -> None:
        self.client = client
        self.locks = client.locks
        self.wire = stage.wire
        self.clock = stage.clock
        self._tasks = tasks

    async def acquire(self, key: str = "k", wait: float = 60, **options: Any) -> Call:
        return await self.call(lambda: self.locks.acquire(key, ttl=30, wait=wait, **options))

    async def hold(self, wait: float = 60, **options: Any) -> Call:
        async def body() -> int:
            async with self.locks.with_lock("k", ttl=30, wait=wait, **options) as guard:
                return guard.lease.fencing_token

        return await self.call(body)

    async def call(self, work: Any) -> Call:
        call = Call(self._tasks, work)
        await settle()
        return call

    @property
    def stream(self) -> Stream:
        assert self.wire.streams is not None
        return self.wire.streams[-1]

    def sleeps(self) -> list[float]:
        return sorted(round(one.at - self.clock.time, 6) for one in self.clock.pending)


@asynccontextmanager
async def waiting(**script: list[Any]) -> AsyncIterator[Waiting]:
    """At its end nobody waits, and no stream is open."""
    stage = Stage()
    stage.wire.streams = []
    stage.wire.script = {operation: list(steps) for operation, steps in script.items()}
    async with anyio.create_task_group() as tasks:
        async with stage.client() as client:
            yield Waiting(stage, client, tasks)
            await settle()
    assert stage.clock.pending == []
    assert not any(stream.is_open() for stream in stage.wire.streams)


# --- the way to a lock ----------------------------------------------------------------------------


async def test_without_wait_nothing_but_the_one_request_is_done() -> None:
    stage = Stage()
    stage.wire.script["acquire"] = [HELD, HELD]
    for wait in (0, 0.0):
        with pytest.raises(ConflictError):
            await stage.client().locks.acquire("k", ttl=30, wait=wait)

    assert stage.wire.summary() == "acquire acquire"


async def test_only_an_entered_client_can_wait() -> None:
    stage = Stage()

    with pytest.raises(RuntimeError, match="async with"):
        await stage.client().locks.acquire("k", ttl=30, wait=1)

    assert stage.wire.sent == []


async def test_a_free_lock_is_got_without_waiting() -> None:
    async with waiting() as room:
        assert (await room.hold()).value == 7
        assert room.wire.summary() == "acquire release"


@pytest.mark.parametrize("is_direct", [True, False])
async def test_a_lock_that_is_released_is_got_at_once(is_direct: bool) -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await (room.acquire() if is_direct else room.hold())
        stream = room.stream
        assert stream.path == "/lock-events?key=k"
        assert room.wire.summary() == "acquire watch acquire"
        assert not call.ended.is_set()

        await stream.tell("released")

        assert call.error is None
        tries = room.wire.of("acquire")
        assert len(tries) == 3
        assert len({one.token for one in tries}) == 1
        assert len({one.request_id for one in tries}) == 3
        assert not stream.is_open()
        if is_direct:
            assert call.value.token == tries[0].token


async def test_the_first_request_id_is_the_callers() -> None:
    async with waiting(acquire=[HELD]) as room:
        chosen = str(uuid.uuid4())
        await room.acquire(request_id=chosen)

        first, second = room.wire.of("acquire")
        assert first.request_id == chosen
        assert second.request_id != chosen


async def test_the_leases_time_starts_with_the_try_that_got_it() -> None:
    async with waiting(acquire=[HELD, HELD]) as room:

        async def body() -> None:
            async with room.locks.with_lock("k", ttl=30, wait=60):
                await anyio.sleep_forever()

        call = await room.call(body)
        await room.clock.advance(29)
        await room.stream.tell("released")
        await room.clock.advance(9.9)
        assert room.wire.of("renew") == []
        await room.clock.advance(0.1)
        assert len(room.wire.of("renew")) == 1
        call.scope.cancel()


async def test_when_the_time_is_over_it_is_contention() -> None:
    async with waiting(acquire=[HELD, refused(409, "lock_ownership_lost")]) as room:
        call = await room.acquire(wait=2.5)
        stream = room.stream
        assert room.sleeps() == [2.5, 40.0]
        await room.clock.advance(2.5)

        assert isinstance(call.error, ConflictError)
        assert call.error.code == "lock_ownership_lost"
        assert not stream.is_open()


async def test_it_may_wait_for_ever() -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await room.acquire(wait=float("inf"))
        assert room.sleeps() == [40.0]

        await room.stream.tell("lapsed")

        assert call.error is None


@pytest.mark.parametrize("wait", [-1, True, None, "5", float("nan")])
async def test_a_wrong_wait_is_refused_before_anything_is_sent(wait: Any) -> None:
    async with waiting() as room:
        with pytest.raises(ValueError, match="wait"):
            await room.locks.acquire("k", ttl=30, wait=wait)
        with pytest.raises(ValueError, match="wait"):
            room.locks.with_lock("k", ttl=30, wait=wait)
        assert room.wire.sent == []


# --- trouble on the way ---------------------------------------------------------------------------


async def test_the_first_trys_errors_are_raised_as_without_wait() -> None:
    async with waiting(acquire=[refused(429, "x", retry_after="5")]) as room:
        assert isinstance((await room.acquire()).error, RateLimitedError)


async def test_an_unknown_outcome_is_given_back_and_the_next_try_has_a_new_token() -> None:
    async with waiting(acquire=[HELD, reset(), reset()]) as room:
        call = await room.acquire()
        await room.clock.advance(0.15)

        held, lost_one, again, got = room.wire.of("acquire")
        [release] = room.wire.of("release")
        assert held.token == lost_one.token == again.token == release.token
        assert lost_one.request_id == again.request_id
        assert got.token == call.value.token != held.token


async def test_that_somebody_else_has_what_is_given_back_is_no_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = [refused(409, "lock_ownership_lost")]
    async with waiting(acquire=[HELD, reset(), reset()], release=refusals) as room:
        await room.acquire()
        await room.clock.advance(0.15)

    assert caplog.text == ""


async def test_a_callers_own_token_that_was_given_back_is_not_used_again() -> None:
    async with waiting(acquire=[HELD, reset(), reset()]) as room:
        call = await room.hold(token=uuid.uuid4())

        assert isinstance(call.error, TransportError)
        assert len(room.wire.of("release")) == 1


async def test_a_callers_own_token_recovers_what_it_may_have_got() -> None:
    async with waiting(acquire=[HELD, HELD, reset(), reset()]) as room:
        own = uuid.uuid4()
        call = await room.acquire(token=own)
        await room.stream.tell("released")
        await room.clock.advance(0.15)

        assert call.value.token == str(own)
        assert room.wire.of("release") == []
        assert {one.token for one in room.wire.of("acquire")} == {str(own)}


async def test_a_refused_credential_is_the_end() -> None:
    async with waiting(acquire=[HELD, refused(401, "x")]) as room:
        assert isinstance((await room.acquire()).error, AuthenticationError)


async def test_a_wait_that_ends_in_trouble_raises_it() -> None:
    async with waiting(acquire=[HELD, refused(500, "x")]) as room:
        call = await room.acquire(wait=0.04)
        await room.clock.advance(0.04)

        assert isinstance(call.error, ServerError)


async def test_an_answer_that_comes_too_late_is_tried_again() -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await room.acquire()
        room.wire.script["acquire"] = [granted(201, x_volcano_expires_in="0.5")]
        await room.stream.tell("released")
        assert len(room.wire.of("release")) == 1
        await room.clock.advance(0.15)

        assert call.error is None


# --- without a stream -----------------------------------------------------------------------------


async def test_a_server_without_events_is_polled() -> None:
    async with waiting(acquire=[HELD, HELD], watch=[refused(404, "not_found")]) as room:
        room.wire.script["get"] = [is_held("2023-11-14T22:15:05.000Z"), FREE, FREE]
        call = await room.acquire()
        assert room.wire.summary() == "acquire watch"
        await room.clock.advance(5)
        assert room.wire.of("get")
        await room.clock.advance(10)

        assert call.error is None
        assert room.wire.summary().endswith("get acquire")


async def test_a_poll_has_two_seconds_and_no_more_than_is_left_of_the_wait() -> None:
    held = is_held("2027-01-01T00:00:00Z")
    async with waiting(acquire=[HELD], watch=[refused(404, "x")], get=[held] * 11) as room:
        call = await room.acquire(wait=10.5)
        await room.clock.advance(10.5)

        assert isinstance(call.error, ConflictError)
        polls = room.wire.of("get")
        assert [one.timeout for one in polls] == pytest.approx(
            [min(2.0, 110.5 - one.at) for one in polls]
        )


async def test_a_poll_that_fails_is_made_again() -> None:
    async with waiting(acquire=[HELD], watch=[refused(405, "x")]) as room:
        room.wire.script["get"] = [reset(), refused(503, "x"), FREE]
        call = await room.acquire()
        await room.clock.advance(15)

        assert call.error is None
        assert room.wire.summary() == "acquire watch get get get acquire"


async def test_a_lost_stream_is_opened_again() -> None:
    async with waiting(acquire=[HELD, HELD, HELD]) as room:
        call = await room.acquire()
        first = room.stream
        await first.tell("acquired", number=42)
        await first.say("")
        assert not first.is_open()
        await room.clock.advance(0.15)
        assert room.stream.last_id == "42"

        assert len(room.wire.of("acquire")) == 3
        await room.stream.tell("lapsed")
        assert call.error is None


async def test_a_stream_that_is_silent_for_too_long_is_lost() -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await room.acquire(wait=100)
        first = room.stream
        await room.clock.advance(30)
        await first.say(": still there\n")
        await room.clock.advance(39.9)
        assert first.is_open()
        await room.clock.advance(0.3)

        assert not first.is_open()
        assert call.error is None  # the next one is open, and with it a try was made


async def test_a_stream_that_makes_no_sense_is_lost() -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await room.acquire()
        first = room.stream
        await first.say("x" * (1 << 21))
        assert not first.is_open()
        await room.clock.advance(0.15)

        assert call.error is None


async def test_a_stream_that_breaks_in_an_unexpected_way_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def breaks(sent_at: float) -> Outcome:
        raise ZeroDivisionError

    async with waiting(acquire=[HELD], watch=[breaks]) as room:
        call = await room.acquire()
        assert "unexpected" in caplog.text
        await room.clock.advance(0.15)

        assert call.error is None


# --- several who wait -----------------------------------------------------------------------------


async def test_of_many_who_wait_for_one_key_one_tries() -> None:
    async with waiting(acquire=[HELD] * 100) as room:
        calls = [await room.hold() for _ in range(10)]
        stream = room.stream
        before = len(room.wire.of("acquire"))
        room.wire.script["acquire"] = []

        for number in range(10):
            await stream.tell("released", number=number)

        assert [call.error for call in calls] == [None] * 10
        assert len(room.wire.of("acquire")) - before == 10
        assert len(room.wire.of("watch")) == 1


async def test_another_key_gets_a_stream_of_both_and_the_old_one_goes_after_it() -> None:
    async with waiting(acquire=[HELD] * 4) as room:
        one = await room.acquire()
        narrow = room.stream
        room.wire.takes["watch"] = [1.0]
        other = await room.acquire("other")
        assert narrow.is_open()
        await room.clock.advance(1.0)
        wide = room.stream

        assert not narrow.is_open()
        assert wide.path == "/lock-events?key=k&key=other"
        await wide.tell("released", key="other")
        assert other.error is None
        assert not one.ended.is_set()
        await wide.tell("released")
        assert one.error is None


async def test_an_opening_that_nobody_needs_any_more_is_abandoned() -> None:
    async with waiting(acquire=[HELD], watch=[HANG]) as room:
        call = await room.acquire(wait=1)
        assert room.wire.in_flight == 1
        await room.clock.advance(1)

        assert isinstance(call.error, ConflictError)
        assert room.wire.in_flight == 0


# --- ends -----------------------------------------------------------------------------------------


async def test_closing_the_client_ends_the_waiting() -> None:
    async with waiting(acquire=[HELD] * 10) as room:
        calls = [await room.acquire(), await room.hold()]
        stream = room.stream
        await room.client.aclose()
        await settle()

        for call in calls:
            assert isinstance(call.error, RuntimeError)
            assert "closed" in str(call.error)
        assert not stream.is_open()


async def test_closing_the_client_ends_the_pause_before_a_stream() -> None:
    async with waiting(acquire=[HELD], watch=[reset()]) as room:
        call = await room.acquire()
        await room.client.aclose()
        await settle()

        assert isinstance(call.error, RuntimeError)
        assert room.sleeps() == []


async def _cancelled_in(room: Waiting, call: Call) -> None:
    call.scope.cancel()
    await settle()
    assert call.was_cancelled


@pytest.mark.parametrize("is_direct", [True, False])
async def test_a_cancelled_wait_leaves_nothing(is_direct: bool) -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await (room.acquire() if is_direct else room.hold())
        await _cancelled_in(room, call)

        assert not room.stream.is_open()
        assert room.sleeps() == []
        assert room.wire.summary() == "acquire watch acquire"


@pytest.mark.parametrize("is_direct", [True, False])
async def test_a_wait_that_is_cancelled_in_its_second_try_gives_it_back(is_direct: bool) -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        call = await (room.acquire() if is_direct else room.hold())
        room.wire.takes["acquire"] = [1]
        await room.stream.tell("released")
        call.scope.cancel()
        await room.clock.advance(1)

        assert call.was_cancelled
        assert room.wire.summary() == "acquire watch acquire acquire release"
        assert not room.stream.is_open()


async def test_a_wait_that_is_cancelled_while_its_stream_is_opened_leaves_nothing() -> None:
    async with waiting(acquire=[HELD], watch=[HANG]) as room:
        call = await room.acquire()
        await _cancelled_in(room, call)

        assert room.wire.in_flight == 0
        assert room.sleeps() == []


async def test_a_wait_that_is_cancelled_before_its_stream_is_opened_again_leaves_nothing() -> None:
    async with waiting(acquire=[HELD], watch=[reset()]) as room:
        call = await room.acquire()
        await _cancelled_in(room, call)

        assert room.sleeps() == []


async def test_a_wait_that_is_cancelled_in_its_read_leaves_nothing() -> None:
    async with waiting(acquire=[HELD], watch=[refused(404, "x")], get=[HANG]) as room:
        call = await room.acquire()
        while not room.wire.of("get"):
            await room.clock.advance(0.5)
        assert room.wire.in_flight == 1
        await _cancelled_in(room, call)

        assert room.wire.in_flight == 0
        assert room.sleeps() == []


async def test_of_two_who_wait_the_other_goes_on_when_one_is_cancelled() -> None:
    async with waiting(acquire=[HELD] * 4) as room:
        first, second = await room.acquire(), await room.acquire()
        stream = room.stream
        await _cancelled_in(room, first)
        assert stream.is_open()

        await stream.tell("released")

        assert second.error is None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    async with waiting(acquire=[HELD, HELD]) as room:
        task = asyncio.create_task(room.locks.acquire("k", ttl=30, wait=60))
        await settle()

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()

        assert not room.stream.is_open()
        assert room.sleeps() == []


def test_a_loop_that_ends_with_somebody_waiting_ends() -> None:
    """`asyncio.run` cancels what is left; the wait goes without a word."""
    stage = Stage()
    stage.wire.streams = []
    stage.wire.script["acquire"] = [HELD, HELD]

    async def main() -> None:
        async def wait() -> None:
            async with stage.client() as client:
                await client.locks.acquire("k", ttl=30, wait=60)

        task = asyncio.create_task(wait())
        await settle()
        assert not task.done()

    asyncio.run(main())

    assert not any(stream.is_open() for stream in stage.wire.streams)
    assert isinstance(stage.wire.streams[0], Stream)
