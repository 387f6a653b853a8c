"""Leases in a PostgreSQL database that any number of servers share.

    batch queue --apply--> lane --one connection--> primary        two round trips a batch:
                --read---> lane --one connection--> primary
    sweeper     ---------> lane --one connection--> primary        1. BEGIN, lock and load the rows,
    quota       ---------> lane --one connection--> primary           read the clock
    feed        ---------> lane --one connection--> primary        2. write what changed, COMMIT

Each transaction stands for itself, under READ COMMITTED: no session state, no prepared statements,
so a transaction-mode pooler may lie between.  Three rules make replicas safe beside each other:

- The rows of a batch are locked in key order, so that two batches never wait for each other.
- A key without a row is inserted plainly.  Where another replica has done so since, that fails, and
  the batch is decided again with the row that is there now.
- `now` is the database's wall clock, read by a statement after the one that took the locks, and for
  no row earlier than its last change: docs/semantics.md#the-clock-on-postgresql.

Nothing waits long: a job has `_JOB` seconds, whatever the database does.  A replica that freezes
with rows locked is thrown out after `_IDLE`; who waits for these rows has the longer `_LOCK`.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from volcano_server import fencing, news
from volcano_server.clock import HostClock
from volcano_server.database import Database, cut, migrate, reason
from volcano_server.lease import (
    DAY,
    GRACE,
    SECOND,
    Answer,
    Held,
    Lease,
    Read,
    Slot,
    SlotKey,
    Write,
    decide_all,
)
from volcano_server.stores.store import HeldKeys, News, StoreUnavailableError

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]
Cursor = psycopg.AsyncRawCursor[Any]

# Seconds.  A request waits for the rest of one job at most and then for its own: 5 in all.
_JOB = 2.25
_STATEMENT = 2.0
_LOCK = 1.75
_IDLE = 1.25
_CANCEL = 0.25  # for a server to heed a cancellation, before the connection is cut
_TRIES = 10
_CLOCK_STEP = SECOND // 2

_AGAIN = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
_OTHER_SERVER = (
    errors.ReadOnlySqlTransaction,  # it was the primary once
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
)

_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED"
_BEGIN_READ_ONLY = b"BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
_SET = (
    f"SELECT set_config('statement_timeout', '{round(_STATEMENT * 1000)}', true),"
    f" set_config('lock_timeout', '{round(_LOCK * 1000)}', true),"
    f" set_config('idle_in_transaction_session_timeout', '{round(_IDLE * 1000)}', true),"
    # A commit is on disk, whatever the default of the role or database; a stronger one is kept.
    " set_config('synchronous_commit', coalesce("
    "nullif(current_setting('synchronous_commit'), 'off'), 'on'), true)"
).encode()
_NOT_DURABLE = b"SET LOCAL synchronous_commit = off"
_COMMIT = b"COMMIT"
_ROLLBACK = b"ROLLBACK"
_CLOCK = b"""
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, highest_swept,
    watched_until > pg_catalog.clock_timestamp()
FROM volcano.store
"""
# LATERAL: a look into the index for each key in the order in which they are given, and never a scan
# of the table, whatever the planner thinks of its size.
_LOAD = """
SELECT slot.* FROM unnest($1::text[], $2::text[]) AS wanted (project, key)
CROSS JOIN LATERAL (
    SELECT project, key, fencing_token, changed_at, token, expires_at, hard_deadline
    FROM volcano.slots
    WHERE slots.project = wanted.project AND slots.key = wanted.key {lock}
) AS slot
"""
_LOAD_LOCKED = _LOAD.format(lock="FOR UPDATE").encode()
_LOAD_UNLOCKED = _LOAD.format(lock="").encode()
_INSERT = b"""
INSERT INTO volcano.slots
    (project, key, fencing_token, changed_at, token, expires_at, hard_deadline)
SELECT * FROM unnest(
    $1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[]
)
"""
# Of rows that are there and locked; an UPDATE that joins with unnest() might scan the table.
_UPDATE = (
    _INSERT
    + b"""
ON CONFLICT (project, key) DO UPDATE SET
    fencing_token = excluded.fencing_token, changed_at = excluded.changed_at,
    token = excluded.token, expires_at = excluded.expires_at, hard_deadline = excluded.hard_deadline
"""
)
_LOAD_BEGINNING_SO = b"""
SELECT project, key, fencing_token, changed_at, token, expires_at, hard_deadline FROM volcano.slots
WHERE project = $1 AND key > $2 AND key >= $3 AND key < $4 ORDER BY key LIMIT $5
"""
_LOOK_AT = b"""
SELECT project, key, CASE WHEN token IS NULL THEN changed_at ELSE expires_at + $4 END
FROM volcano.slots WHERE (project, key) > ($1, $2) ORDER BY project, key LIMIT $3
"""
# A row that somebody takes meanwhile is waited for and looked at again: then it is not free.
_SWEEP = b"""
WITH gone AS (
    DELETE FROM volcano.slots
    WHERE (project, key) > ($1, $2) AND (project, key) <= ($3, $4)
        AND CASE WHEN token IS NULL THEN changed_at ELSE expires_at + $6 END <= $5
    RETURNING fencing_token
)
UPDATE volcano.store SET highest_swept =
    greatest(highest_swept, (SELECT max(fencing_token) FROM gone))
RETURNING (SELECT count(*) FROM gone)
"""
_ADD = b"""
INSERT INTO volcano.windows AS old (project, number, used)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS new (project, number, used)
ORDER BY number, project
ON CONFLICT (number, project) DO UPDATE SET used = old.used + excluded.used
RETURNING project, number, used
"""
_FORGET = b"DELETE FROM volcano.windows WHERE number < $1"
# The watch, and its news: feed.py.
_LEAVE_WORD = b"INSERT INTO volcano.news (events) VALUES ($1)"
_WATCH = b"""
UPDATE volcano.store SET watched_until = pg_catalog.clock_timestamp() + interval '60 s'
"""
_FORGET_NEWS = b"""
DELETE FROM volcano.news WHERE at < pg_catalog.clock_timestamp() - interval '60 s'
"""
_OWN_NUMBER = b"INSERT INTO volcano.news (events) VALUES ('[]') RETURNING number"
_NUMBERS = b"SELECT number FROM volcano.news"
_NEWS = b"""
SELECT number, events FROM volcano.news WHERE number > $1 OR number = ANY ($2::bigint[])
ORDER BY number LIMIT $3
"""
_WATCHED = b"""
SELECT extract(epoch FROM watched_until - pg_catalog.clock_timestamp())::float8 FROM volcano.store
"""
_NEWS_AT_ONCE = 1_000
_WATCH_LEFT = 40.0  # seconds, below which the watch is moved on


class UnknownOutcomeError(StoreUnavailableError):
    """The commit was sent and its answer is missing: it was done, or it was not."""


class PostgresqlStore:
    """The store of one replica.

    `on_clock_step` hears of each step of the database's clock, in seconds, for the operator.
    """

    def __init__(
        self,
        database: Database,
        host: HostClock,
        *,
        on_clock_step: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._host = host
        self._on_clock_step = on_clock_step
        self._offset: Offset | None = None
        self._swept_to = ("", "")  # the sweeper's place in the key order: ("shop", "nightly")
        self._news_link: Connection | None = None  # on which the watch began
        self._lanes = tuple(Lane(database) for _ in range(5))
        self._writing, self._reading, self._sweeping, self._counting, self._listening = self._lanes

    async def open(self) -> None:
        await asyncio.to_thread(migrate, self._database)

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        claim = _Claim(may_commit)
        return await self._writing.run(lambda link: self._apply(link, commands, claim))

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        return await self._reading.run(lambda link: self._read(link, commands))

    async def held(self, project: str, prefix: str, after: str, limit: int) -> HeldKeys:
        return await self._sweeping.run(
            lambda link: self._held(link, project, prefix, after, limit)
        )

    async def sweep(self, limit: int) -> int:
        return await self._sweeping.run(lambda link: self._sweep(link, limit))

    async def add(self, counts: Mapping[tuple[str, int], int]) -> Mapping[tuple[str, int], int]:
        return await self._counting.run(lambda link: self._add(link, counts))

    async def begin_news(self) -> tuple[int, Sequence[int], int]:
        return await self._listening.run(self._begin_news)

    async def read_news(self, top: int, missing: Sequence[int]) -> News | None:
        return await self._listening.run(lambda link: self._read_news(link, top, missing))

    # One attempt each.

    async def _apply(
        self, link: Connection, commands: Sequence[Write], claim: "_Claim"
    ) -> list[Answer]:
        keys = sorted({(command.slot_key.project, command.slot_key.key) for command in commands})
        async with link.pipeline():
            await _execute(link, _BEGIN)
            await _execute(link, _SET)
            rows = await _execute(link, _LOAD_LOCKED, *_columns(keys, 2))
            clock = await self._ask_clock(link)
        slots = _slots(await rows.fetchall())
        now, highest_swept, watched = await self._clock(clock)
        known = frozenset(slots)
        expiries: dict[SlotKey, int] = {}
        if watched:  # the slots change below
            expiries = {key: slot.lease.expires_at for key, slot in slots.items() if slot.lease}
        floor = fencing.floor(highest_swept=highest_swept, wall=now, opened_at=0)
        answers, changed = decide_all(slots, commands, now, floor)
        if not claim.take():
            await link.execute(_ROLLBACK)
            raise StoreUnavailableError("The batch came too late.")
        if changed:
            word = news.text_of(commands, answers, expiries) if watched else None
            await _write(link, changed, known, word)
        else:
            with suppress(psycopg.Error):  # the answers hold, whatever becomes of the connection
                await link.execute(_ROLLBACK)
        return answers

    async def _read(self, link: Connection, commands: Sequence[Read]) -> list[Answer]:
        keys = sorted({(command.slot_key.project, command.slot_key.key) for command in commands})
        async with link.pipeline():
            await _execute(link, _BEGIN_READ_ONLY)
            await _execute(link, _SET)
            rows = await _execute(link, _LOAD_UNLOCKED, *_columns(keys, 2))
            clock = await self._ask_clock(link)
            await _execute(link, _COMMIT)
        now, *_ = await self._clock(clock)
        return decide_all(_slots(await rows.fetchall()), commands, now, 0)[0]

    async def _held(
        self, link: Connection, project: str, prefix: str, after: str, limit: int
    ) -> HeldKeys:
        wanted = (project, after, prefix, prefix + "\x7f")  # behind all that keys are made of
        async with link.pipeline():
            await _execute(link, _BEGIN_READ_ONLY)
            await _execute(link, _SET)
            rows = await _execute(link, _LOAD_BEGINNING_SO, *wanted, limit)
            clock = await self._ask_clock(link)
            await _execute(link, _COMMIT)
        now, *_ = await self._clock(clock)
        slots = _slots(await rows.fetchall())
        keys = list(slots)
        answers, _ = decide_all(slots, [Read(each) for each in keys], now, 0)
        return HeldKeys(
            [
                (each.key, answer)
                for each, answer in zip(keys, answers, strict=True)
                if isinstance(answer, Held)
            ],
            keys[-1].key if len(keys) == limit else None,
        )

    async def _sweep(self, link: Connection, limit: int) -> int:
        after = self._swept_to
        async with link.pipeline():
            await _execute(link, _BEGIN_READ_ONLY)
            await _execute(link, _SET)
            rows = await _execute(link, _LOOK_AT, *after, limit, GRACE)
            clock = await self._ask_clock(link)
            await _execute(link, _COMMIT)
        seen = await rows.fetchall()
        now, *_ = await self._clock(clock)
        deleted = 0
        if any(free_at <= now - DAY for _, _, free_at in seen):
            async with link.pipeline():
                await _execute(link, _BEGIN)
                await _execute(link, _SET)
                count = await _execute(link, _SWEEP, *after, *seen[-1][:2], now - DAY, GRACE)
                await _execute(link, _COMMIT)
            ((deleted,),) = await count.fetchall()
        # Only now: a failed sweep looks at the same slots again.
        self._swept_to = seen[-1][:2] if len(seen) == limit else ("", "")
        return int(deleted)

    async def _add(
        self, link: Connection, counts: Mapping[tuple[str, int], int]
    ) -> Mapping[tuple[str, int], int]:
        rows = [(project, number, count) for (project, number), count in counts.items()]
        oldest = min((number for _, number in counts), default=0)
        async with link.pipeline():
            await _execute(link, _BEGIN)
            await _execute(link, _SET)
            await _execute(link, _NOT_DURABLE)  # the counts of a minute may be lost in a crash
            sums = await _execute(link, _ADD, *_columns(rows, 3))
            await _execute(link, _FORGET, oldest - 10)  # the clocks of replicas differ
            await _execute(link, _COMMIT)
        return {(project, number): used for project, number, used in await sums.fetchall()}

    async def _begin_news(self, link: Connection) -> tuple[int, Sequence[int], int]:
        async with link.pipeline():
            await _execute(link, _BEGIN)
            await _execute(link, _SET)
            # The row first: who may not write one must not make the others try.
            own = await _execute(link, _OWN_NUMBER)
            numbers = await _execute(link, _NUMBERS)
            await _execute(link, _WATCH)
            clock = await self._ask_clock(link)
            await _execute(link, _COMMIT)
        now, *_ = await self._clock(clock)
        ((number,),) = await own.fetchall()
        self._news_link = link
        return number, [each for (each,) in await numbers.fetchall() if each < number], now

    async def _read_news(self, link: Connection, top: int, missing: Sequence[int]) -> News | None:
        if link is not self._news_link:
            return None  # it may be another primary, where other numbers were given out
        gaps = _columns([(each,) for each in missing], 1)
        async with link.pipeline():
            await _execute(link, _BEGIN_READ_ONLY)
            await _execute(link, _SET)
            found = await _execute(link, _NEWS, top, *gaps, _NEWS_AT_ONCE)
            watched = await _execute(link, _WATCHED)
            clock = await self._ask_clock(link)
            await _execute(link, _COMMIT)
        now, *_ = await self._clock(clock)
        ((left,),) = await watched.fetchall()
        if left <= 0:
            return None
        if left < _WATCH_LEFT:
            async with link.pipeline():
                await _execute(link, _BEGIN)
                await _execute(link, _SET)
                await _execute(link, _FORGET_NEWS)
                await _execute(link, _WATCH)
                await _execute(link, _COMMIT)
        rows = await found.fetchall()
        return News(rows, now, is_all=len(rows) < _NEWS_AT_ONCE)

    # The clock.

    async def _ask_clock(self, link: Connection) -> "tuple[int, Cursor]":
        return self._host.elapsed(), await _execute(link, _CLOCK)

    async def _clock(self, asked: "tuple[int, Cursor]") -> tuple[int, int, bool]:
        """The database's wall clock in µs since 1970, the highest swept token, the watch."""
        asked_at, cursor = asked
        ((now, highest_swept, watched),) = await cursor.fetchall()
        offset = Offset(now - self._host.elapsed(), now - asked_at)
        step = 0 if self._offset is None else offset.step_from(self._offset)
        self._offset = offset
        if abs(step) > _CLOCK_STEP:
            self._on_clock_step(step / SECOND)
        return now, highest_swept, watched


@dataclass(frozen=True, slots=True)
class Offset:
    """Between what the database's clock is ahead of the host's time since boot: µs.

    The clock was read at some moment between question and answer, so that is all there is to know.
    """

    least: int
    most: int

    def step_from(self, earlier: "Offset") -> int:
        """How far the database's clock was set at the least; 0 if it need not have been."""
        if self.least > earlier.most:
            return self.least - earlier.most
        if self.most < earlier.least:
            return self.most - earlier.least
        return 0


class _Claim:
    """On a batch that may take several attempts: asked once, and ours from then on."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._taken = False

    def take(self) -> bool:
        self._taken = self._taken or self._ask()
        return self._taken


class Lane:
    """One connection for one job at a time, made when it is needed and again after it broke."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._link: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0  # the time of the loop from which on a connection is tried again

    async def run(self, attempt: Callable[[Connection], Awaitable[T]]) -> T:
        """Attempt a job, again where that is safe and may help.  Raises StoreUnavailableError."""
        async with self._turn:
            return await self._run(attempt)

    async def _run(self, attempt: Callable[[Connection], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + _JOB
        trouble: psycopg.Error | None = None
        for number in range(_TRIES):
            link = await self._connected(until)
            try:
                async with _bounded(link, until):
                    return await attempt(link)
            except psycopg.Error as error:
                trouble = error
                gone = link.closed or isinstance(error, _OTHER_SERVER)
                if gone:
                    await link.close()
            finally:
                await self._tidy(link, until)
            pause = random.uniform(0, min(0.002 * 2**number, 0.1))  # noqa: S311
            if not (gone or isinstance(trouble, _AGAIN)) or loop.time() + pause >= until:
                break
            await asyncio.sleep(pause)
        assert trouble is not None
        raise StoreUnavailableError(reason(trouble)) from trouble

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            (made,) = await asyncio.gather(self._connecting, return_exceptions=True)
            if isinstance(made, psycopg.AsyncConnection):
                await made.close()
        if self._link is not None:
            await self._link.close()

    async def _connected(self, until: float) -> Connection:
        if self._link is not None:
            return self._link
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            self._not_before = loop.time() + random.uniform(0.05, 0.15)  # noqa: S311
            self._connecting = loop.create_task(self._database.connect_async())
        # It goes on after this job has given up: with many hosts it may take longer than a job.
        done, _ = await asyncio.wait([self._connecting], timeout=max(0.0, until - loop.time()))
        if not done:
            raise StoreUnavailableError("PostgreSQL: no connection yet.")
        made, self._connecting = self._connecting, None
        try:
            self._link = made.result()
        except psycopg.Error as error:
            raise StoreUnavailableError(reason(error)) from error
        return self._link

    async def _tidy(self, link: Connection, until: float) -> None:
        """Keep a connection only for the next job that is out of any transaction."""
        if link.info.transaction_status is TransactionStatus.INERROR:
            with suppress(psycopg.Error):
                async with _bounded(link, until):
                    await link.execute(_ROLLBACK)
        if link.info.transaction_status is not TransactionStatus.IDLE:
            self._link = None
            await link.close()


@asynccontextmanager
async def _bounded(link: Connection, until: float) -> AsyncIterator[None]:
    """Ask the server to stop at `until`, and stop listening to it soon after."""
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []
    timers = [
        loop.call_at(until, lambda: stopping.append(loop.create_task(_cancel(link)))),
        loop.call_at(until + _CANCEL, cut, link),
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        if stopping:
            # A cancellation that is still on its way must not meet the next job.
            stopping[0].cancel()
            await asyncio.gather(*stopping, return_exceptions=True)
            await link.close()


async def _cancel(link: Connection) -> None:
    with suppress(psycopg.Error):
        await link.cancel_safe(timeout=_CANCEL)


async def _execute(link: Connection, statement: bytes, *values: object) -> Cursor:
    return await Cursor(link).execute(statement, values or None)


async def _write(
    link: Connection,
    changed: Mapping[SlotKey, Slot],
    known: frozenset[SlotKey],
    word: str | None,
) -> None:
    """Write and commit in one round trip.  Raises psycopg.Error where nothing was committed."""
    rows = sorted(_row(key, slot) for key, slot in changed.items() if key in known)
    new_rows = sorted(_row(key, slot) for key, slot in changed.items() if key not in known)
    warnings: list[str] = []

    def listen(notice: errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING":
            warnings.append(str(notice.message_primary))

    link.add_notice_handler(listen)
    try:
        async with link.pipeline():
            if new_rows:
                await _execute(link, _INSERT, *_columns(new_rows, 7))
            if rows:
                await _execute(link, _UPDATE, *_columns(rows, 7))
            if word is not None:  # behind the slots: then the locks are there
                await _execute(link, _LEAVE_WORD, word)
            await _execute(link, _COMMIT)
    except (*_AGAIN, errors.ReadOnlySqlTransaction):
        raise
    except psycopg.Error as error:
        raise UnknownOutcomeError(reason(error)) from error
    finally:
        link.remove_notice_handler(listen)
    if warnings:
        # The commit waited for a standby until its timeout or our cancellation: "canceling wait for
        # synchronous replication".  It succeeds all the same, here and maybe nowhere else.
        raise UnknownOutcomeError(f"PostgreSQL: {' '.join(warnings)}")


def _columns(rows: Sequence[Sequence[object]], width: int) -> list[str]:
    """The array literals of a table's columns.

    Without control characters, which keys, projects and tokens have not, a JSON array differs from
    an array literal by its brackets alone.
    """
    columns = zip(*rows, strict=True) if rows else [()] * width
    return [f"{{{json.dumps(column, ensure_ascii=False)[1:-1]}}}" for column in columns]


def _slots(rows: Iterable[tuple[Any, ...]]) -> dict[SlotKey, Slot]:
    return {
        SlotKey(project, key): Slot(
            fencing_token,
            None if token is None else Lease(token, expires_at, hard_deadline),
            changed_at,
        )
        for project, key, fencing_token, changed_at, token, expires_at, hard_deadline in rows
    }


def _row(key: SlotKey, slot: Slot) -> tuple[str, str, int, int, str | None, int | None, int | None]:
    lease = slot.lease
    held = (None,) * 3 if lease is None else (lease.token, lease.expires_at, lease.hard_deadline)
    return key.project, key.key, slot.fencing_token, slot.changed_at, *held
