from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from async_stage import HANG, Call, Stage, Stream, refused, reset, settle

from volcano_sdk.async_client import AsyncVolcanoClient
from volcano_sdk.async_watch import AsyncLockWatch
from volcano_sdk.errors import (
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
    ValidationError,
)
from volcano_sdk.events import LockEvent

pytestmark = pytest.mark.anyio


class Watching:
    """A watch, and tasks that wait for its next event."""

    def __init__(self, stage: Stage, client: AsyncVolcanoClient, tasks: TaskGroup) -> None:
        self.client = client
        self.watch: AsyncLockWatch = client.locks.watch("k", prefix=["t:", "u:"])
        self.wire = stage.wire
        self.clock = stage.clock
        self._tasks = tasks

    async def following(self) -> Call:
        """A task that waits for the next event."""
        call = Call(self._tasks, lambda: anext(self.watch))
        await settle()
        return call

    @property
    def stream(self) -> Stream:
        assert self.wire.streams is not None
        return self.wire.streams[-1]

    async def begun(self) -> Stream:
        """What it reads, after a first event."""
        first = await self.following()
        await self.stream.tell("acquired", number=41)
        assert first.value.type == "acquired"
        return self.stream


@asynccontextmanager
async def watching(**script: list[Any]) -> AsyncIterator[Watching]:
    """At its end nothing waits, and no stream is open."""
    stage = Stage()
    stage.wire.streams = []
    stage.wire.script = {operation: list(steps) for operation, steps in script.items()}
    async with anyio.create_task_group() as tasks:
        room = Watching(stage, stage.client(), tasks)  # no task group of the client's is needed
        yield room
        await room.client.aclose()
        await settle()
        await room.watch.aclose()
    assert stage.clock.pending == []
    assert not any(stream.is_open() for stream in stage.wire.streams)


async def test_the_events_come_one_after_the_other() -> None:
    async with watching() as room:
        assert aiter(room.watch) is room.watch
        assert room.wire.sent == []
        call = await room.following()
        assert room.stream.path == "/lock-events?key=k&prefix=t%3A&prefix=u%3A"
        await room.stream.say(": a comment\n")
        assert not call.ended.is_set()

        await room.stream.tell("acquired", watchers=3)
        await room.stream.tell("released")

        assert (call.value.type, call.value.key, call.value.watchers) == ("acquired", "k", 3)
        assert (await anext(room.watch)).type == "released"


async def test_leaving_the_block_ends_the_connection() -> None:
    async with watching() as room:
        async with room.watch:
            stream = await room.begun()
            assert stream.is_open()

        assert not stream.is_open()
        assert [event async for event in room.watch] == []


async def test_one_that_was_never_read_has_nothing_to_end() -> None:
    async with watching() as room:
        async with room.watch:
            pass

        assert room.wire.sent == []


@pytest.mark.parametrize("script", [{}, {"watch": [HANG]}, {"watch": [reset()]}])
async def test_a_cancelled_iteration_leaves_nothing(script: dict[str, Any]) -> None:
    """While it reads, while it connects, and in its pause."""
    async with watching(**script) as room:
        call = await room.following()
        assert len(room.clock.pending) == 1
        call.scope.cancel()
        await settle()

        assert call.was_cancelled
        assert room.wire.in_flight == 0
        assert room.clock.pending == []
        assert [event async for event in room.watch] == []


async def test_a_lost_connection_goes_on_behind_the_last_event() -> None:
    async with watching() as room:
        first = await room.begun()
        call = await room.following()
        await first.say("")
        assert not first.is_open()
        await room.clock.advance(0.15)
        assert room.stream.last_id == "41"

        await room.stream.tell("released", number=42)

        assert call.value.type == "released"


async def test_what_may_be_missing_is_a_reset() -> None:
    async with watching() as room:
        call = await room.following()
        await room.stream.say("")
        await room.clock.advance(0.15)

        assert call.value == LockEvent("reset")


async def test_a_silent_connection_is_lost() -> None:
    async with watching() as room:
        first = await room.begun()
        await room.following()
        await room.clock.advance(39)
        assert first.is_open()
        await room.clock.advance(2)

        assert not first.is_open()
        assert room.stream.is_open()


async def test_a_stream_that_makes_no_sense_is_lost() -> None:
    async with watching() as room:
        first = await room.begun()
        call = await room.following()
        await first.say("x" * (1 << 21))
        assert not first.is_open()
        await room.clock.advance(0.15)
        await room.stream.tell("lapsed")

        assert call.value.type == "lapsed"


async def test_passing_trouble_is_waited_out(caplog: pytest.LogCaptureFixture) -> None:
    refusals = [reset(), refused(503, "x"), refused(429, "x", retry_after="7")]
    async with watching(watch=refusals) as room:
        call = await room.following()
        await room.clock.advance(0.5)
        assert len(room.wire.of("watch")) == 3
        await room.clock.advance(6)
        assert len(room.wire.of("watch")) == 3
        await room.clock.advance(1)
        await room.stream.tell("acquired")

        assert call.value.type == "acquired"
        assert "events are asked for again" in caplog.text


@pytest.mark.parametrize(
    ("status", "error"),
    [(404, NotFoundError), (403, PermissionDeniedError), (400, ValidationError)],
)
async def test_what_does_not_pass_is_raised_and_the_end(
    status: int, error: type[Exception]
) -> None:
    async with watching(watch=[refused(status, "x")]) as room:
        call = await room.following()

        assert isinstance(call.error, error)
        assert [event async for event in room.watch] == []
        assert room.wire.operations() == ["watch"]


@pytest.mark.parametrize("script", [{}, {"watch": [HANG]}, {"watch": [reset()]}])
async def test_closing_the_client_ends_it(script: dict[str, Any]) -> None:
    """While it reads, while it connects, and in its pause."""
    async with watching(**script) as room:
        call = await room.following()
        await room.client.aclose()
        await settle()

        assert isinstance(call.error, StopAsyncIteration)
        with pytest.raises(RuntimeError, match="closed"):
            room.client.locks.watch("k")


async def test_closing_the_client_between_two_events_ends_it_at_the_next_look() -> None:
    async with watching() as room:
        await room.begun()
        await room.client.aclose()

        assert isinstance((await room.following()).error, StopAsyncIteration)


async def test_a_closed_clients_watch_asks_for_nothing() -> None:
    async with watching() as room:
        await room.client.aclose()

        assert isinstance((await room.following()).error, StopAsyncIteration)
        assert room.wire.sent == []


async def test_it_names_what_it_watches() -> None:
    async with watching() as room:
        assert repr(room.watch) == "<AsyncLockWatch key=['k'] prefix=['t:', 'u:']>"


async def test_without_a_service_key_nothing_is_watched() -> None:
    with pytest.raises(AuthenticationError):
        Stage().client(service_key="").locks.watch("k")
