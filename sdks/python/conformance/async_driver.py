# ruff: noqa: INP001  a program, not a package
"""The async flavour behind stdin and stdout: conformance/protocol.md says what each line means.

One asyncio loop; a thread only reads stdin.  With the virtual clock nothing in the SDK waits for
real time, so the loop is quiet when it has nothing ready.
"""

import asyncio
import json
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

import anyio
import driver
from driver import BodyError, UnsupportedError

from volcano_sdk import async_client, async_transport, errors
from volcano_sdk.async_client import AsyncVolcanoClient
from volcano_sdk.async_guard import AsyncLockGuard
from volcano_sdk.async_transport import AsyncEventStream
from volcano_sdk.lease import LockLease
from volcano_sdk.operations import Answer, Failure, Outcome, Try

CAPABILITIES = [
    "with_lock",
    "direct_calls",
    "virtual_clock",
    "pushed_loss",
    "cancel",
    "close",
    "renew_many",
    "wait",
    "events",
]


# --- time and wire -------------------------------------------------------------------------------


class Sleep(AbstractContextManager[anyio.CancelScope, bool]):
    """A scope in which the SDK waits, at most until `at`."""

    def __init__(self, pending: list["Sleep"], at: float, length: float) -> None:
        self.at = at
        self.length = length
        self.scope = anyio.CancelScope()
        self._pending = pending

    def __enter__(self) -> anyio.CancelScope:
        self._pending.append(self)
        return self.scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self in self._pending:
            self._pending.remove(self)
        return bool(self.scope.__exit__(exc_type, exc, traceback))


ROUNDING = 1e-9
"""Seconds: sums of fractions do not come out even."""


class VirtualClock:
    """An AsyncClock that stands still until told."""

    def __init__(self, wall: str) -> None:
        self._now = 1000.0
        self._wall = datetime.fromisoformat(wall).timestamp() - self._now
        self.pending: list[Sleep] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall + self._now

    def move_on_at(self, at: float) -> "Sleep":
        return Sleep(self.pending, at, at - self._now)

    async def wait(self, event: anyio.Event, until: float) -> None:
        with self.move_on_at(until):
            await event.wait()

    def lengths(self) -> list[float]:
        return [sleep.length for sleep in self.pending if math.isfinite(sleep.at)]

    def jump(self, seconds: float) -> None:
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        end = round(self._now + seconds, 9)  # many small steps end where one large one does
        await quiet()
        while due := [sleep for sleep in self.pending if sleep.at <= end + ROUNDING]:
            first = min(due, key=lambda sleep: sleep.at)
            self._now = max(self._now, first.at)
            self.pending.remove(first)
            first.scope.cancel()
            await quiet()
        self._now = max(self._now, end)


async def quiet() -> None:
    """Until the loop has polled its sockets several times and found nothing to run."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # noqa: SLF001
    idle = 0
    while idle < 5:
        await asyncio.sleep(0)
        idle = 0 if ready else idle + 1


class CountedLanes(async_transport.Lanes):
    """The SDK's own lanes, counted; `is_cut` after a second hello: nothing more is sent."""

    in_flight = 0
    streams: ClassVar[set["CountedStream"]] = set()
    is_cut = False

    async def exchange(self, attempt: Try, *, sent_at: float) -> Outcome:
        if CountedLanes.is_cut:
            return Failure(sent_at, errors.TransportError("dropped"), reached=False)
        CountedLanes.in_flight += 1
        try:
            return await super().exchange(attempt, sent_at=sent_at)
        finally:
            CountedLanes.in_flight -= 1

    async def stream(self, attempt: Try, *, sent_at: float) -> AsyncEventStream | Outcome:
        if CountedLanes.is_cut:
            return Failure(sent_at, errors.TransportError("dropped"), reached=False)
        CountedLanes.in_flight += 1
        try:
            opened = await super().stream(attempt, sent_at=sent_at)
        finally:
            CountedLanes.in_flight -= 1
        return opened if isinstance(opened, Answer | Failure) else CountedStream(opened)


class CountedStream:
    """An open stream of events; `taken`: how many bytes of it have come."""

    def __init__(self, stream: AsyncEventStream) -> None:
        self._stream = stream
        self.taken = 0
        CountedLanes.streams.add(self)

    async def read(self, until: float) -> bytes:
        chunk = await self._stream.read(until)
        self.taken += len(chunk)
        if not chunk:
            CountedLanes.streams.discard(self)
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
        CountedLanes.streams.discard(self)


# --- the session ---------------------------------------------------------------------------------


class Session:
    """From one hello to the next: a client, and the calls that run on it."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.clock = VirtualClock(hello["now"]) if hello["clock"] == "virtual" else None
        self.client = AsyncVolcanoClient(
            api_url=hello["base_url"],
            service_key=hello["service_key"],
            timeout=hello.get("timeout"),
            trust_env=False,
            _clock=self.clock,
        )
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.guards: dict[str, AsyncLockGuard] = {}
        self.finishes: dict[str, asyncio.Future[Callable[[], Any]]] = {}
        self.leases: dict[str, LockLease] = {}

    async def drop(self) -> None:
        """End it without a request."""
        CountedLanes.is_cut = True
        for call, task in self.tasks.items():
            self.finishes[call].cancel()
            task.cancel()
        with suppress(errors.VolcanoError):
            await self.client.aclose()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        CountedLanes.is_cut = False

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        cmd, call = command["cmd"], command.get("call", "")
        match cmd:
            case "finish":
                self.finishes[call].set_result(ending(command))
            case "look":
                await quiet()
                guard = self.guards[call]
                return {"lost": guard.lost, **driver.described(guard.lease)}
            case "cancel":
                self.tasks[call].cancel()
            case "sleeping":
                await quiet()
                return {
                    "seconds": self.virtual.lengths(),
                    "in_flight": CountedLanes.in_flight,
                    "streaming": [stream.taken for stream in CountedLanes.streams],
                }
            case "advance" if command.get("blocked"):
                await quiet()
                self.virtual.jump(command["seconds"])
            case "advance":
                await self.virtual.advance(command["seconds"])
            case _:
                self.finishes[call] = asyncio.get_running_loop().create_future()
                works = {"with_lock": self.with_lock, "watch": self.watch}
                work = works.get(cmd, self.direct)
                self.tasks[call] = asyncio.create_task(self.tell(call, work(command)))
        return {}

    @property
    def virtual(self) -> VirtualClock:
        if self.clock is None:
            raise UnsupportedError("the clock is real")
        return self.clock

    async def tell(self, call: str, work: Awaitable[object]) -> None:
        try:
            value = await work
        except BaseException as error:  # noqa: BLE001  whatever it is, it is told
            if not CountedLanes.is_cut:
                driver.raised("raised", call, error, asyncio.CancelledError)
        else:
            driver.returned(call, value)

    async def with_lock(self, command: dict[str, Any]) -> object:
        call = command["call"]
        context = self.client.locks.with_lock(command["key"], **driver.options(command))
        async with context as guard:
            self.guards[call] = guard
            guard.on_lost(partial(driver.raised, "lost", call, cancelled=asyncio.CancelledError))
            driver.emit(event="entered", call=call, **driver.described(guard.lease))
            return await self.hold_out(self.finishes[call])
        raise AssertionError("with_lock swallowed an error")

    @staticmethod
    async def hold_out(finish: "asyncio.Future[Callable[[], Any]]") -> object:
        """A body ends on `finish` alone; a cancellation that came before then goes on."""
        cancelled: BaseException | None = None
        while not finish.done():
            try:
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.wait([finish])
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
        value = finish.result()()
        if cancelled is not None:
            raise cancelled
        return value

    async def watch(self, command: dict[str, Any]) -> None:
        with suppress(asyncio.CancelledError):  # that is how it is ended
            async with self.client.locks.watch(**driver.filters(command)) as events:
                async for event in events:
                    driver.watched(command["call"], event)

    async def direct(self, command: dict[str, Any]) -> object:
        locks, cmd = self.client.locks, command["cmd"]
        options = driver.options(command)
        match cmd:
            case "acquire":
                lease = await locks.acquire(command["key"], **options)
                self.leases[command["call"]] = lease
                return lease
            case "renew":
                lease = await locks.renew(command["key"], self.lease(command["lease"]), **options)
                self.leases[command["call"]] = lease
                return lease
            case "release":
                await locks.release(command["key"], self.lease(command["lease"]), **options)
            case "get":
                return await locks.get(command["key"], **options)
            case "force_release":
                await locks.force_release(command["key"], **options)
            case "close":
                await self.client.aclose()
            case _:
                raise UnsupportedError(f"no such command: {cmd}")
        return None

    def lease(self, named: Any) -> Any:
        if isinstance(named, str):
            return self.leases[named]
        return driver.lease_from(named)


def ending(command: dict[str, Any]) -> Callable[[], Any]:
    def end() -> Any:
        if "raise" in command:
            raise BodyError(command["raise"])
        return command["return"]

    return end


# --- the loop ------------------------------------------------------------------------------------


async def serve(commands: "asyncio.Queue[dict[str, Any]]") -> None:
    command = await commands.get()
    while True:
        session = Session(command)
        async with session.client:
            driver.reply(command["id"], driver.hello("python-async", CAPABILITIES))
            command = await answer_until_hello(session, commands)
            await session.drop()


async def answer_until_hello(
    session: Session, commands: "asyncio.Queue[dict[str, Any]]"
) -> dict[str, Any]:
    while True:
        command = await commands.get()
        if command["cmd"] == "hello":
            return command
        try:
            driver.reply(command["id"], await session.do(command))
        except UnsupportedError as error:
            driver.emit(id=command["id"], unsupported=str(error))
        except Exception as error:  # noqa: BLE001  the driver itself is at fault
            driver.emit(id=command["id"], error=f"{type(error).__name__}: {error}")


def main() -> None:
    vars(async_client)["Lanes"] = CountedLanes

    async def run() -> None:
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
            os._exit(0)  # EOF ends the driver, whatever its SDK is doing

        threading.Thread(target=read, daemon=True).start()
        await serve(commands)

    asyncio.run(run())
