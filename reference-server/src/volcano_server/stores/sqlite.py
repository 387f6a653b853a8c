"""Leases in one SQLite file that one server owns.

    event loop --jobs, in order--> writer thread --the only connection--> file.db, file.db-wal

The connection holds the file exclusively from open to close: a second server is refused at its
start, and nothing is ever "locked" later.  A batch is one transaction: BEGIN IMMEDIATE, read the
clock, load the slots of its keys, decide, write what changed and the clock, COMMIT (on disk with
synchronous=FULL).  After any failure it is rolled back and the next one starts afresh.
"""

import asyncio
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import resources
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from volcano_server import fencing
from volcano_server.clock import Anchor, HostClock, LeaseClock
from volcano_server.lease import (
    DAY,
    GRACE,
    NEVER_HELD,
    Answer,
    Held,
    Lease,
    Read,
    Slot,
    SlotKey,
    Write,
    decide,
    decide_all,
)
from volcano_server.stores.store import (
    HeldKeys,
    NewerSchemaError,
    NotAStoreError,
    StoreBrokenError,
    StoreInUseError,
    StoreOpenError,
    StorePathError,
    StoreUnavailableError,
)

T = TypeVar("T")

APPLICATION_ID = 0x566F4C6B  # "VoLk": marks the file as ours

# Each step of a statement lets go of the interpreter and waits to get it back from a busy loop. So
# all slots are loaded in one row, and many are saved by one statement.
_LOAD = """
SELECT json_group_array(json_array(
    slots.project, slots.key, fencing_token, changed_at, token, expires_at, hard_deadline
))
FROM json_each(?) AS wanted CROSS JOIN slots
    ON slots.project = wanted.value ->> 0 AND slots.key = wanted.value ->> 1
"""
_SAVE = """
INSERT INTO slots (project, key, fencing_token, changed_at, token, expires_at, hard_deadline)
VALUES {rows}
ON CONFLICT (project, key) DO UPDATE SET
    fencing_token = excluded.fencing_token, changed_at = excluded.changed_at,
    token = excluded.token, expires_at = excluded.expires_at, hard_deadline = excluded.hard_deadline
"""
_ROW = "(?, ?, ?, ?, ?, ?, ?)"
_MOST_ROWS = 64  # to save by one statement, which is kept compiled for each number of them
_SAVE_ANCHOR = "UPDATE store SET boot_id = ?, elapsed = ?, now = ?"
_MOVE_LIVE_LEASES = """
UPDATE slots SET expires_at = expires_at + :jump, hard_deadline = hard_deadline + :jump
WHERE token IS NOT NULL AND expires_at + :grace > :latest_now
"""
_LOOK_AT = """
SELECT project, key, CASE WHEN token IS NULL THEN changed_at ELSE expires_at + ? END AS free_at
FROM slots WHERE (project, key) > (?, ?) ORDER BY project, key LIMIT ?
"""
_HELD = """
SELECT key, fencing_token, expires_at, token IS NOT NULL AND expires_at + ? > ?
FROM slots WHERE project = ? AND key > ? AND key >= ? AND key < ? ORDER BY key LIMIT ?
"""
_SWEEP = """
DELETE FROM slots
WHERE (project, key) > (:after_project, :after_key)
    AND (project, key) <= (:to_project, :to_key)
    AND CASE WHEN token IS NULL THEN changed_at ELSE expires_at + :grace END <= :free_before
RETURNING fencing_token
"""
_SAVE_HIGHEST_SWEPT = "UPDATE store SET highest_swept = ?"


class _Thread:
    """Does what a loop asks, one after the other.

    An executor of one thread makes two futures for a job and takes a dozen locks.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_stopped = False
        # A daemon: a stop in a hurry does not wait for a job, and whoever waits for it is gone.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def run(self, job: Callable[[], T]) -> "asyncio.Future[T]":
        """What the job returns or raises.  Once it has begun, it is finished."""
        if self._is_stopped:
            raise StoreUnavailableError("The store is closed.")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(partial(_do, job, loop, answer))
        return answer

    def stop(self) -> None:
        """After what was asked before."""
        self._is_stopped = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (do := self._jobs.get()) is not None:
            do()
            del do  # what it holds must not live until the next one comes


def _do(job: Callable[[], T], loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[T]") -> None:
    if answer.cancelled():
        return
    settle: Callable[[], None]
    try:
        settle = partial(answer.set_result, job())
    except BaseException as error:  # noqa: BLE001 - whatever it was, somebody waits for it
        settle = partial(answer.set_exception, error)
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_unless_cancelled, answer, settle)


def _unless_cancelled(answer: "asyncio.Future[T]", settle: Callable[[], None]) -> None:
    if not answer.cancelled():
        settle()


class SqliteStore:
    """The store of one server.  `path`: created if it is not there; its directory has to be."""

    def __init__(self, path: Path, host: HostClock) -> None:
        self._path = path
        self._host = host
        self._thread = _Thread("sqlite-store")
        self._connection: sqlite3.Connection
        self._clock: LeaseClock
        self._opened_at = 0
        self._highest_swept = 0
        self._swept_to = ("", "")  # the sweeper's place in the key order: ("shop", "nightly")

    # What the loop calls: each method is one job of the thread.

    async def open(self) -> None:
        """Raises StoreOpenError; then nothing is left open."""
        try:
            await self._run(self._open)
        except StoreOpenError:
            self._thread.stop()
            raise

    async def close(self) -> None:
        await self._run(self._close)
        self._thread.stop()

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        return await self._run(lambda: self._apply(commands, may_commit))

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        return await self._run(lambda: self._read(commands))

    async def held(self, project: str, prefix: str, after: str, limit: int) -> HeldKeys:
        return await self._run(lambda: self._held(project, prefix, after, limit))

    async def sweep(self, limit: int) -> int:
        return await self._run(lambda: self._sweep(limit))

    async def copy_to(self, path: Path) -> None:
        """Write a whole, consistent copy to `path`, which must not exist yet; other jobs wait.

        Raises StoreUnavailableError; then there is nothing at `path`.
        """
        await self._run(lambda: self._copy_to(path))

    async def _run(self, job: Callable[[], T]) -> T:
        return await self._thread.run(job)

    # What the thread does.

    def _open(self) -> None:
        try:
            self._connection = _connect(self._path)
        except sqlite3.Error as error:
            raise _open_error(self._path, error) from error
        try:
            _migrate(self._connection, self._path)
            self._start_clock()
        except sqlite3.Error as error:
            self._connection.close()
            raise _open_error(self._path, error) from error
        except StoreOpenError:
            self._connection.close()
            raise

    def _start_clock(self) -> None:
        """Go on from the clock of the last commit: docs/semantics.md#the-clock-on-sqlite."""
        with self._transaction() as connection:
            boot_id, elapsed, now, self._highest_swept = connection.execute(
                "SELECT boot_id, elapsed, now, highest_swept FROM store"
            ).fetchone()
            latest = None if boot_id is None else Anchor(boot_id, elapsed, now)
            self._clock = LeaseClock(self._host, latest)
            anchor = self._clock.anchor()
            if latest is not None and self._clock.jump:
                connection.execute(
                    _MOVE_LIVE_LEASES,
                    {"jump": self._clock.jump, "grace": GRACE, "latest_now": latest.now},
                )
            # In the same transaction, so that a crash right here cannot move the leases twice.
            connection.execute(_SAVE_ANCHOR, (anchor.boot_id, anchor.elapsed, anchor.now))
        self._opened_at = anchor.now

    def _close(self) -> None:
        self._connection.close()

    def _apply(self, commands: Sequence[Write], may_commit: Callable[[], bool]) -> list[Answer]:
        with _unavailable_on_error(), self._transaction() as connection:
            anchor = self._clock.anchor()
            floor = fencing.floor(
                highest_swept=self._highest_swept,
                wall=self._host.wall(),
                opened_at=self._opened_at,
            )
            slots = self._load({command.slot_key: None for command in commands})
            answers, changed = decide_all(slots, commands, anchor.now, floor)
            if changed:
                self._save(changed)
                connection.execute(_SAVE_ANCHOR, (anchor.boot_id, anchor.elapsed, anchor.now))
            if not may_commit():
                raise StoreUnavailableError("The batch came too late.")
        return answers

    def _read(self, commands: Sequence[Read]) -> list[Answer]:
        with _unavailable_on_error():
            self._settled()
            slots = self._load({command.slot_key: None for command in commands})
        now = self._clock.now()
        return [
            decide(slots.get(command.slot_key, NEVER_HELD), command, now, 0)[1]
            for command in commands
        ]

    def _held(self, project: str, prefix: str, after: str, limit: int) -> HeldKeys:
        now = self._clock.now()
        wanted = (project, after, prefix, prefix + "\x7f")  # behind all that keys are made of
        with _unavailable_on_error():
            rows = self._settled().execute(_HELD, (GRACE, now, *wanted, limit)).fetchall()
        return HeldKeys(
            [
                (key, Held(expires_at, fencing_token, expires_at - now))
                for key, fencing_token, expires_at, is_held in rows
                if is_held
            ],
            rows[-1][0] if len(rows) == limit else None,
        )

    def _load(self, keys: Iterable[SlotKey]) -> dict[SlotKey, Slot]:
        wanted = json.dumps(list(keys))
        (found,) = self._connection.execute(_LOAD, (wanted,)).fetchone()
        return {
            SlotKey(project, key): Slot(
                fencing_token,
                None if token is None else Lease(token, expires_at, hard_deadline),
                changed_at,
            )
            for project, key, fencing_token, changed_at, token, expires_at, hard_deadline in (
                json.loads(found)
            )
        }

    def _save(self, changed: dict[SlotKey, Slot]) -> None:
        rows = [_row(key, slot) for key, slot in changed.items()]
        for first in range(0, len(rows), _MOST_ROWS):
            some = rows[first : first + _MOST_ROWS]
            self._connection.execute(_save_statement(len(some)), [*chain.from_iterable(some)])

    def _sweep(self, limit: int) -> int:
        after = self._swept_to
        with _unavailable_on_error():
            seen = self._settled().execute(_LOOK_AT, (GRACE, *after, limit)).fetchall()
            free_before = self._clock.now() - DAY
            deleted = 0
            if any(free_at <= free_before for _, _, free_at in seen):
                deleted = self._delete_free(after, seen[-1][:2], free_before)
        # Only now: a failed sweep looks at the same slots again.
        self._swept_to = seen[-1][:2] if len(seen) == limit else ("", "")
        return deleted

    def _delete_free(self, after: tuple[str, str], to: tuple[str, str], free_before: int) -> int:
        with self._transaction() as connection:
            tokens = connection.execute(
                _SWEEP,
                {
                    "after_project": after[0],
                    "after_key": after[1],
                    "to_project": to[0],
                    "to_key": to[1],
                    "grace": GRACE,
                    "free_before": free_before,
                },
            ).fetchall()
            highest_swept = max([self._highest_swept, *(token for (token,) in tokens)])
            connection.execute(_SAVE_HIGHEST_SWEPT, (highest_swept,))
        self._highest_swept = highest_swept
        return len(tokens)

    def _copy_to(self, path: Path) -> None:
        partial = path.with_name(path.name + ".partial")
        if path.exists():
            raise StoreUnavailableError(f"Cannot copy to {path}: it exists already.")
        try:
            with _unavailable_on_error():
                partial.unlink(missing_ok=True)
                _create_private(partial)
                self._settled().execute("VACUUM INTO ?", (str(partial),))
            _sync(partial)
            partial.rename(path)
            _sync(path.parent)
        except OSError as error:
            raise StoreUnavailableError(f"Cannot copy to {path}: {error.strerror}.") from error
        finally:
            partial.unlink(missing_ok=True)

    def _settled(self) -> sqlite3.Connection:
        """The connection, outside of any transaction."""
        if self._connection.in_transaction:  # its rollback failed, on a failing disk
            self._connection.execute("ROLLBACK")
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._settled()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite has rolled back by itself after some errors
                connection.execute("ROLLBACK")
            raise


def _connect(path: Path) -> sqlite3.Connection:
    if not path.parent.is_dir():
        raise StorePathError(f"Cannot open {path}: there is no directory {path.parent}.")
    if str(path) == ":memory:" or (path.exists() and not path.is_file()):
        raise StorePathError(f"Cannot open {path}: it is not a file.")
    _create_private(path)
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        # Exclusive before WAL: the file is locked from the first access on, and the WAL's index is
        # in memory instead of in a shared file.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StorePathError(
                f"Cannot open {path}: this file system cannot hold a WAL database."
            )
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _create_private(path: Path) -> None:
    """A new file for its owner alone, because lock tokens are secrets.  Its WAL is made alike."""
    with suppress(OSError):  # it is there already, or SQLite is about to say what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


def _migrations() -> list[str]:
    """The scripts in their order; the number of those applied is the file's `user_version`."""
    folder = resources.files("volcano_server.stores") / "migrations"
    scripts = (file for file in folder.iterdir() if file.name.endswith(".sql"))
    return [script.read_text() for script in sorted(scripts, key=lambda script: script.name)]


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the tables up to date, all in one transaction, or refuse the file."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    migrations = _migrations()
    if application_id != APPLICATION_ID and (tables or application_id or version):
        raise NotAStoreError(f"Cannot open {path}: it is a database of another program.")
    if version > len(migrations):
        raise NewerSchemaError(
            f"Cannot open {path}: its schema is version {version}, written by a later"
            f" volcano-server; this one knows up to version {len(migrations)}."
        )
    if version == len(migrations):
        return
    # executescript() would commit before it starts; a transaction inside the script is left alone.
    connection.executescript(
        "\n".join(
            [
                "BEGIN IMMEDIATE;",
                *migrations[version:],
                f"PRAGMA application_id = {APPLICATION_ID};",
                f"PRAGMA user_version = {len(migrations)};",
                "COMMIT;",
            ]
        )
    )


def _open_error(path: Path, error: sqlite3.Error) -> StoreOpenError:
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF:  # the primary code
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreInUseError(
                f"Cannot open {path}: another server is using it; "
                "stop that one or give this one another file with --store."
            )
        case sqlite3.SQLITE_NOTADB:
            return NotAStoreError(f"Cannot open {path}: it is not a database.")
        case sqlite3.SQLITE_CORRUPT:
            return NotAStoreError(f"Cannot open {path}: the database is damaged.")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return StorePathError(f"Cannot open {path}: it is not writable.")
        case _:
            return StoreBrokenError(f"Cannot open {path}: {error}.")


@contextmanager
def _unavailable_on_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        raise StoreUnavailableError(f"SQLite: {error} ({name}).") from error


@cache
def _save_statement(rows: int) -> str:
    return _SAVE.format(rows=", ".join([_ROW] * rows))


def _row(key: SlotKey, slot: Slot) -> tuple[str, str, int, int, str | None, int | None, int | None]:
    lease = slot.lease
    if lease is None:
        return key.project, key.key, slot.fencing_token, slot.changed_at, None, None, None
    return (
        key.project,
        key.key,
        slot.fencing_token,
        slot.changed_at,
        lease.token,
        lease.expires_at,
        lease.hard_deadline,
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
