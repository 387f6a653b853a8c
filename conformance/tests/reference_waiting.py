"""Waiting and watching of the reference SDK (docs/semantics.md#waiting).

Top to bottom: the event stream's parser and the rules, pure; the wire's stream; `Ears`, the one
stream of a client with those who wait for it; `watch`.

    Waiter -- enters --> Ears -- keeps open while somebody waits --> Stream
      ^                   |
      '---- is told ------'   try now (opened), try after a pause (an event), try when it reads free
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from math import inf, isinf
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode

if TYPE_CHECKING:
    from reference_driver import Sdk, VolcanoError

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class StreamEvent:
    """What the HTML standard makes of the lines between two blank ones."""

    type: str
    data: str
    id: str


class Parser:
    """Bytes in, events out, however they are cut."""

    def __init__(self) -> None:
        self.last_id = ""
        self._line = bytearray()
        self._after_cr = False
        self._is_first = True
        self._data: list[str] = []
        self._type, self._id = "", ""

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        events = []
        for byte in chunk:
            if byte in (10, 13):
                if byte == 13 or not self._after_cr:
                    events += self._end_of_line()
            else:
                self._line.append(byte)
            self._after_cr = byte == 13
        return events

    def _end_of_line(self) -> list[StreamEvent]:
        line, self._line = self._line.decode("utf-8", "replace"), bytearray()
        if self._is_first:
            line, self._is_first = line.removeprefix("\ufeff"), False
        if line == "":
            return self._end_of_event()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return []

    def _end_of_event(self) -> list[StreamEvent]:
        data, kind, self.last_id = self._data, self._type or "message", self._id
        self._data, self._type = [], ""
        return [StreamEvent(kind, "\n".join(data), self.last_id)] if data else []


KINDS = ("acquired", "released", "force_released", "lapsed")
FREEING = frozenset(KINDS[1:])


@dataclass(frozen=True)
class LockEvent:
    type: str
    key: str | None = None
    fencing_token: int | None = None
    at: str | None = None
    watchers: int | None = None


def lock_event(event: StreamEvent) -> LockEvent | None:
    """None for what this SDK does not know."""
    if event.type == "reset":
        return LockEvent("reset")
    try:
        data = json.loads(event.data)
    except ValueError:
        return None
    match data:
        case {"key": str() as key, "fencing_token": int() as number, "at": str() as at}:
            watchers = data.get("watchers")
            if event.type in KINDS and isinstance(watchers, int):
                return LockEvent(event.type, key, number, at, watchers)
    return None


# ---------------------------------------------------------------- the pure rules

MOST_FILTERS = 64


@dataclass(frozen=True)
class Filters:
    keys: frozenset[str]
    prefixes: frozenset[str]

    @classmethod
    def of(cls, keys: Iterable[str]) -> "Filters":
        distinct = frozenset(keys)
        if len(distinct) <= MOST_FILTERS:
            return cls(distinct, frozenset())
        shared = (frozenset(key[:length] for key in distinct) for length in range(128, 0, -1))
        prefixes = next(each for each in shared if len(each) <= MOST_FILTERS)
        return cls(frozenset(), prefixes)

    def cover(self, key: str) -> bool:
        return key in self.keys or any(key.startswith(prefix) for prefix in self.prefixes)

    def query(self) -> str:
        named = [("key", key) for key in sorted(self.keys)]
        return urlencode(named + [("prefix", prefix) for prefix in sorted(self.prefixes)])


def is_wait(wait: Any) -> bool:
    return isinstance(wait, int | float) and not isinstance(wait, bool) and wait >= 0


SOONEST = 0.1


class WaitingRules:
    """Small methods: the places where the broken drivers are broken."""

    silence: ClassVar[float] = 40.0

    def pause(self, watchers: int) -> float:
        return random.random() * min(max(watchers - 1, 0) * 0.002, 1.0)

    def backoff(self, failures: int) -> float:
        return float(min(0.1 * 2 ** (failures - 1), 5.0)) * random.uniform(0.5, 1.5)

    def poll_delay(self) -> float:
        return random.uniform(1.0, 5.0)

    def until_free(self, expires_at: str, now: float) -> float:
        """From `now` of the wall clock until the grace is over, and a little at least."""
        return max(datetime.fromisoformat(expires_at).timestamp() + 1.0 - now, SOONEST)


# ---------------------------------------------------------------- the wire


class Stream:
    """An answer whose body goes on and on.  `taken`: how many bytes of it were read."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        over: "Callable[[Stream], None]",
    ) -> None:
        self._reader, self._writer, self._over = reader, writer, over
        self.taken = 0

    async def read(self) -> bytes:
        """b"" when it has ended."""
        try:
            chunk = await self._reader.read(65_536)
        except OSError:
            chunk = b""
        self.taken += len(chunk)
        if not chunk:
            self.close()
        return chunk

    def close(self) -> None:
        self._writer.transport.abort()
        self._over(self)


# ---------------------------------------------------------------- those who wait


@dataclass(eq=False)
class Waiter:
    key: str
    due: float = inf  # when the next try is worth it
    poll_at: float | None = None
    error: "VolcanoError | None" = None  # it must not wait any longer
    trouble: "VolcanoError | None" = None  # nothing was heard of the key since
    overdue: str = ""  # the end of a lease that was found to be over, and was not
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, due: float) -> None:
        self.due = min(self.due, due)
        self.told.set()


class Ears:
    """What a client's one event stream tells, and to whom."""

    def __init__(self, sdk: "Sdk") -> None:
        self.sdk, self.rules = sdk, sdk.waiting_rules
        self.waiters: list[Waiter] = []
        self.open: Filters | None = None  # of the stream that is open now
        self.has_events = True
        self.is_closed = False
        self.last_id = ""
        self._keeper: asyncio.Task[None] | None = None
        self._uncovered = asyncio.Event()
        self._stream: Stream | None = None
        self._hearing: asyncio.Task[bool] | None = None

    def enter(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)
        if self.covers(waiter.key):
            waiter.tell(self.sdk.clock.now)
        elif self._keeper is None and self.has_events:
            self._keeper = self.sdk.spawn(self._keep_open())
        else:
            self._uncovered.set()

    def leave(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)
        if not self.waiters:
            self._stop()

    def _stop(self) -> None:
        if self._keeper:
            self._keeper.cancel()
        self._keeper = None
        self._forget_stream()
        self.last_id = ""

    def covers(self, key: str) -> bool:
        return self.open is not None and self.open.cover(key)

    def _forget_stream(self) -> None:
        self.open = None
        if self._hearing:
            self._hearing.cancel()
        if self._stream:
            self._stream.close()
        self._stream = self._hearing = None

    async def _keep_open(self) -> None:
        failures = 0
        while True:
            self._uncovered.clear()
            wanted = Filters.of(waiter.key for waiter in self.waiters)
            outcome = await self.sdk.open_stream(wanted, self._resume_from())
            if isinstance(outcome, Stream):
                self._switch_to(outcome, wanted)
                if await self._until_lost_or_uncovered():
                    continue
                assert self._hearing is not None
                failures = 0 if self._hearing.result() else failures
                self._forget_stream()
                wait = None
            else:
                if self._is_without_events(outcome):
                    self.has_events, self._keeper = False, None
                    self._tell_all(inf)
                    return
                wait = outcome.facts.get("retry_after")
            failures += 1
            pause = self.rules.backoff(failures) if wait is None else wait
            await self.sdk.clock.sleep(pause)

    def _resume_from(self) -> str:
        """Only a stream that was lost is resumed: one that is exchanged has told all."""
        return "" if self.open else self.last_id

    def _is_without_events(self, error: "VolcanoError") -> bool:
        return error.facts.get("status") in (404, 405)

    def _switch_to(self, stream: Stream, filters: Filters) -> None:
        covered, hearing, before = self.open, self._hearing, self._stream
        self.open, self._stream = filters, stream
        self._hearing = self.sdk.spawn(self._hear(stream))
        if hearing and before:
            hearing.cancel()
            before.close()
        for waiter in self.waiters:
            if covered is None or not covered.cover(waiter.key):
                self._opened(waiter)

    def _opened(self, waiter: Waiter) -> None:
        waiter.tell(self.sdk.clock.now)

    async def _until_lost_or_uncovered(self) -> bool:
        """True for the second."""
        assert self._hearing is not None
        uncovered = asyncio.ensure_future(self._uncovered.wait())
        try:
            await asyncio.wait({self._hearing, uncovered}, return_when=asyncio.FIRST_COMPLETED)
            return not self._hearing.done()
        finally:
            uncovered.cancel()

    async def _hear(self, stream: Stream) -> bool:
        """To its end; whether it told anything."""
        told = False
        async with aclosing(heard(self.sdk, stream)) as events:
            async for some, last_id in events:
                told, self.last_id = True, last_id or self.last_id
                for event in some:
                    self._tell(event)
        return told

    def _tell(self, event: LockEvent) -> None:
        if event.type == "reset":
            self._tell_all(self.sdk.clock.now)
        elif self._is_worth_a_try(event):
            for waiter in self.waiters:
                if self._concerns(event, waiter):
                    pause = self.rules.pause(event.watchers or 1)
                    waiter.tell(self.sdk.clock.now + pause)

    def _is_worth_a_try(self, event: LockEvent) -> bool:
        return event.type in FREEING

    def _concerns(self, event: LockEvent, waiter: Waiter) -> bool:
        return event.key == waiter.key

    def _tell_all(self, due: float) -> None:
        for waiter in self.waiters:
            waiter.tell(due)

    def close(self) -> None:
        """The client was closed: nobody waits any longer."""
        self.is_closed = True
        self._tell_all(inf)
        self._stop()

    # ------------------------------------------------------------ one waiter's side

    async def until_worth_a_try(self, waiter: Waiter, not_before: float, end: float) -> bool:
        """False when the time is over.  Polls as long as no stream tells."""
        clock = self.sdk.clock
        while True:
            waiter.told.clear()
            if self.is_closed or waiter.error or clock.now >= end:
                return False
            if clock.now >= max(waiter.due, not_before):
                waiter.due = inf
                return True
            self._plan_poll(waiter)
            if waiter.poll_at is not None and clock.now >= waiter.poll_at:
                await self._poll(waiter)
                continue
            due = max(waiter.due, not_before)
            moment = min(due, end, inf if waiter.poll_at is None else waiter.poll_at)
            await self._sleep_until_told(waiter, moment)

    def _plan_poll(self, waiter: Waiter) -> None:
        if self.covers(waiter.key):
            waiter.poll_at = None
        elif waiter.poll_at is None:
            waiter.poll_at = self.sdk.clock.now + self.rules.poll_delay()

    async def _poll(self, waiter: Waiter) -> None:
        delay = self.rules.poll_delay()
        try:
            state = await self.sdk.get(waiter.key)
        except Exception as error:
            pause = self.sdk.passing(error)
            if pause is None:
                raise
            self._not_read(waiter, error)
            delay = max(delay, pause)
        else:
            self._was_read(waiter)
            if not state["held"]:
                waiter.due = self.sdk.clock.now
                delay = inf
            elif self._is_reason_to_hurry(state["expires_at"], waiter):
                delay = min(delay, self.rules.until_free(state["expires_at"], self.sdk.clock.wall))
                waiter.overdue = state["expires_at"] if delay == SOONEST else ""
        waiter.poll_at = None if isinf(delay) else self.sdk.clock.now + delay

    def _not_read(self, waiter: Waiter, error: Any) -> None:
        waiter.trouble = error

    def _was_read(self, waiter: Waiter) -> None:
        waiter.trouble = None

    def _is_reason_to_hurry(self, expires_at: str, waiter: Waiter) -> bool:
        return expires_at != waiter.overdue

    async def _sleep_until_told(self, waiter: Waiter, moment: float) -> None:
        told = asyncio.ensure_future(waiter.told.wait())
        things: set[asyncio.Future[Any]] = {told}
        if not isinf(moment):
            things.add(asyncio.ensure_future(self.sdk.clock.sleep(moment - self.sdk.clock.now)))
        try:
            await asyncio.wait(things, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for thing in things:
                thing.cancel()


async def heard(sdk: "Sdk", stream: Stream) -> AsyncGenerator[tuple[list[LockEvent], str], None]:
    """What came, chunk by chunk, and the id after it: until the end, or too long a silence."""
    parser = Parser()
    try:
        while chunk := await _before(sdk, stream.read(), sdk.waiting_rules.silence):
            events = [lock_event(event) for event in parser.feed(chunk)]
            yield [event for event in events if event is not None], parser.last_id
    finally:
        stream.close()


async def _before(sdk: "Sdk", work: Awaitable[bytes], seconds: float) -> bytes:
    reading = asyncio.ensure_future(work)
    bell = asyncio.ensure_future(sdk.clock.sleep(seconds))
    try:
        await asyncio.wait({reading, bell}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else b""
    finally:
        bell.cancel()
        reading.cancel()


# ---------------------------------------------------------------- watching


async def watch(sdk: "Sdk", filters: Filters) -> AsyncGenerator[LockEvent, None]:
    """Over a stream of its own, opened again and again, until the client is closed."""
    last_id, failures, was_open = "", 0, False
    while outcome := await sdk.unless_closing(sdk.open_stream(filters, last_id)):
        wait = None
        if isinstance(outcome, Stream):
            if was_open and not last_id:
                yield LockEvent("reset")
            was_open = True
            async with aclosing(heard(sdk, outcome)) as pieces:
                while piece := await sdk.unless_closing(anext(pieces, None)):
                    events, seen = piece
                    failures, last_id = 0, seen or last_id
                    for event in events:
                        yield event
        else:
            if sdk.ends_a_watch(outcome):
                raise outcome
            wait = outcome.facts.get("retry_after")
        failures += 1
        pause = sdk.waiting_rules.backoff(failures) if wait is None else wait
        await sdk.unless_closing(sdk.clock.sleep(pause))


__all__ = ["Ears", "Filters", "LockEvent", "Parser", "Stream", "Waiter", "WaitingRules"]
