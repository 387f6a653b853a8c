"""Who may do what: credentials -> Caller.

    Authorization: Bearer sk-…  --sha256-->  digest  --dict-->  Caller(project, permissions, quota)

Projects and credentials live in two tables, which the command line changes while servers run; each
server reads them again within a second.  For a store on SQLite they are in a file of their own
beside the locks' file, because the server owns that one alone; so it has a rollback journal and is
opened for each use.  For a store on PostgreSQL they are in its database: access_database.py.

    AccessTables            what is asked of the two tables, in SQL that both databases understand
    ├── AccessFile          SQLite
    └── AccessDatabase      PostgreSQL

A key is 256 random bits, so a plain SHA-256 of it is enough: there is nothing to guess.  The key
itself is shown once, by the command that makes it, and kept nowhere.
"""

import hashlib
import os
import secrets
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from volcano_server.problems import (
    AUTHENTICATION_REQUIRED,
    INVALID_CREDENTIALS,
    Problem,
)

DEFAULT_QUOTA = 600
"""Requests a project may make in each minute of the clock; 0 is no limit."""

MANAGE_LOCKS = "locks.manage"
EVERYTHING = "*"

Kind = Literal["service", "anon"]
PREFIXES: Mapping[Kind, str] = {"service": "sk-", "anon": "ak-"}

_APPLICATION_ID = 0x566F4163  # "VoAc": marks the file as ours
_SCHEMA_VERSION = 1
_SCHEMA = f"""
create table project (
    name text primary key,
    quota integer not null check (quota >= 0),
    created_at integer not null                        -- seconds since 1970
) strict;
create table credential (
    id text primary key,                               -- short and not secret, for people
    project text not null references project (name),
    kind text not null check (kind in ('service', 'anon')),
    permissions text not null,                         -- separated by spaces
    digest blob not null unique,                       -- SHA-256 of the key
    created_at integer not null,
    revoked_at integer
) strict;
pragma application_id = {_APPLICATION_ID};
pragma user_version = {_SCHEMA_VERSION};
"""
_BUSY_SECONDS = 5.0
_YOUNG_SECONDS = 2.0


class AccessError(Exception):
    """The credentials cannot be used.  The text is one sentence for the operator.

    `exit_status`: of sysexits.h.
    """

    def __init__(self, sentence: str, exit_status: int) -> None:
        super().__init__(sentence)
        self.exit_status = exit_status


_DATA_ERROR, _NO_INPUT, _NO_USER, _CANNOT_CREATE, _IO_ERROR = 65, 66, 67, 73, 74


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request.  `quota` is in requests a minute, 0 being no limit."""

    project: str
    credential_id: str
    kind: Kind = "service"
    permissions: frozenset[str] = frozenset({MANAGE_LOCKS})
    quota: int = DEFAULT_QUOTA

    def may_manage_locks(self) -> bool:
        return self.kind == "service" and not self.permissions.isdisjoint(
            (MANAGE_LOCKS, EVERYTHING)
        )


@dataclass(frozen=True, slots=True)
class Project:
    name: str
    quota: int


@dataclass(frozen=True, slots=True)
class Credential:
    """What is known of a key once it has been shown."""

    id: str
    project: str
    kind: Kind
    permissions: tuple[str, ...]
    created_at: int
    revoked_at: int | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What a refresh found: ids of credentials.  `changed`: their permissions or quota."""

    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Access:
    """The credentials that count now: some fixed ones, and those of the tables if there are any."""

    def __init__(
        self, fixed: Mapping[str, Caller] | None = None, *, tables: "AccessTables | None" = None
    ) -> None:
        self._fixed = {digest(key.encode()): caller for key, caller in (fixed or {}).items()}
        self._tables = tables
        self._seen: State | None = None
        # {b"\x9f…": Caller(project="shop", credential_id="k3f9…", ...)}; replaced, never changed
        self._callers: Mapping[bytes, Caller] = dict(self._fixed)

    def authenticate(self, authorization: bytes | None) -> Caller | Problem:
        """The caller behind an Authorization header: docs/semantics.md#credentials."""
        if authorization is None:
            return AUTHENTICATION_REQUIRED
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            return AUTHENTICATION_REQUIRED
        return self._callers.get(digest(key)) or INVALID_CREDENTIALS

    def refresh(self) -> Changes:
        """Read the tables again if they may have changed.  Blocks; raises AccessError."""
        if self._tables is None:
            return Changes()
        state = self._tables.state()
        if state == self._seen and state.is_settled():
            return Changes()
        before = set(self._callers.values())
        self._callers = {**self._tables.callers(), **self._fixed}
        self._seen = state
        after = set(self._callers.values())
        new = frozenset(caller.credential_id for caller in after - before)
        gone = frozenset(caller.credential_id for caller in before - after)
        return Changes(added=new - gone, removed=gone - new, changed=new & gone)

    def close(self) -> None:
        """Let go of the tables, after the last refresh."""
        if self._tables is not None:
            self._tables.close()


class State(Protocol):
    """Two equal states, of which the later is settled: nothing was changed in between."""

    def is_settled(self) -> bool: ...


class Rows(Protocol):
    """What a statement found or did."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> Sequence[Any]: ...


class Transaction(Protocol):
    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        """Run one statement.  A `?` in it stands for the next of the values."""


class AccessTables(ABC):
    """Projects and credentials, kept.  Every method blocks and may raise AccessError."""

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def close(self) -> None:
        """Let go of what is kept open between two uses."""

    @abstractmethod
    def exists(self) -> bool:
        """False before the first project was created."""

    @abstractmethod
    def _opened(
        self, *, write: bool = False, create: bool = False
    ) -> AbstractContextManager[Transaction]: ...

    def callers(self) -> dict[bytes, Caller]:
        """Every credential that is not revoked, by the digest of its key."""
        if not self.exists():
            return {}
        with self._opened() as database:
            rows = database.execute(
                "select digest, credential.id, project, kind, permissions, quota"
                " from credential join project on project = name where revoked_at is null"
            ).fetchall()
        return {
            hashed: Caller(project, id_, kind, frozenset(permissions.split()), quota)
            for hashed, id_, project, kind, permissions, quota in rows
        }

    def create_project(self, name: str, *, quota: int = DEFAULT_QUOTA) -> None:
        with self._opened(create=True) as database:
            created = database.execute(
                "insert into project (name, quota, created_at) values (?, ?, ?)"
                " on conflict do nothing",
                (name, quota, int(time.time())),
            )
            if created.rowcount == 0:
                raise AccessError(f"the project {name!r} exists already", _CANNOT_CREATE)

    def projects(self) -> list[Project]:
        if not self.exists():
            return []
        with self._opened() as database:
            rows = database.execute("select name, quota from project order by name").fetchall()
            return [Project(*row) for row in rows]

    def set_quota(self, project: str, quota: int) -> None:
        with self._opened(write=True) as database:
            changed = database.execute(
                "update project set quota = ? where name = ?", (quota, project)
            )
            if changed.rowcount == 0:
                raise _unknown_project(project)

    def create_key(
        self, project: str, *, kind: Kind, permissions: tuple[str, ...] = (MANAGE_LOCKS,)
    ) -> tuple[str, str]:
        """A new credential: (the key, which nobody can ask for again; its id)."""
        key = PREFIXES[kind] + secrets.token_urlsafe(32)
        id_ = f"key_{secrets.token_hex(4)}"
        granted = " ".join(permissions) if kind == "service" else ""
        with self._opened(write=True) as database:
            _check_project(database, project)
            database.execute(
                "insert into credential (id, project, kind, permissions, digest, created_at)"
                " values (?, ?, ?, ?, ?, ?)",
                (id_, project, kind, granted, digest(key.encode()), int(time.time())),
            )
        return key, id_

    def set_permissions(self, id_: str, permissions: tuple[str, ...]) -> None:
        """Of a service key; an anon key has none."""
        with self._opened(write=True) as database:
            changed = database.execute(
                "update credential set permissions = ? where id = ? and kind = 'service'",
                (" ".join(permissions), id_),
            )
            if changed.rowcount == 0:
                raise AccessError(
                    f"no service key has the id {id_!r}; `volcano-server keys list` shows the ids",
                    _NO_USER,
                )

    def keys(self, project: str | None = None) -> list[Credential]:
        with self._opened() as database:
            if project is not None:
                _check_project(database, project)
            rows = database.execute(
                "select id, project, kind, permissions, created_at, revoked_at from credential"
                " where project = coalesce(?, project) order by created_at, id",
                (project,),
            ).fetchall()
            return [
                Credential(id_, owner, kind, tuple(permissions.split()), created_at, revoked_at)
                for id_, owner, kind, permissions, created_at, revoked_at in rows
            ]

    def revoke_key(self, id_: str) -> None:
        """Revoking twice is the same as revoking once."""
        with self._opened(write=True) as database:
            changed = database.execute(
                "update credential set revoked_at = coalesce(revoked_at, ?) where id = ?",
                (int(time.time()), id_),
            )
            if changed.rowcount == 0:
                raise AccessError(
                    f"no key has the id {id_!r}; `volcano-server keys list` shows the ids", _NO_USER
                )


@dataclass(frozen=True, slots=True)
class FileState:
    """What of a file changes with its contents.  All zero for a file that is not there."""

    inode: int
    size: int
    changed_at: int  # nanoseconds

    def is_settled(self) -> bool:
        """A file that changed a moment ago may change again within one tick of its timestamps.

        By the wall clock; a clock set back counts as just now.
        """
        return (time.time_ns() - self.changed_at) / 1e9 > _YOUNG_SECONDS


class AccessFile(AccessTables):
    """The tables in an SQLite file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, store: Path) -> "AccessFile":
        """The file that belongs to the locks' file `store`: locks.db -> locks.access.db."""
        return cls(store.with_name(f"{store.stem}.access{store.suffix or '.db'}"))

    def state(self) -> FileState:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return FileState(0, 0, 0)
        except OSError as error:
            raise AccessError(f"cannot read {self.path}: {error.strerror}", _IO_ERROR) from error
        return FileState(found.st_ino, found.st_size, found.st_mtime_ns)

    def close(self) -> None:
        """It is opened for each use."""

    def exists(self) -> bool:
        return self.path.exists()

    @contextmanager
    def _opened(self, *, write: bool = False, create: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction on a connection of its own."""
        if create and not self.path.exists():
            _create_private(self.path)
        elif not self.path.exists():
            raise AccessError(
                f"there is no file {self.path}; `volcano-server projects create NAME` makes it",
                _NO_INPUT,
            )
        try:
            database = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
        except sqlite3.Error as error:
            raise AccessError(f"cannot open {self.path}: {error}", _IO_ERROR) from error
        try:
            database.execute("pragma foreign_keys = on")
            database.execute("begin immediate" if write or create else "begin")
            self._check_schema(database, create=create)
            yield database
            database.execute("commit")
        except sqlite3.Error as error:
            raise _access_error(self.path, error) from error
        finally:
            database.close()

    def _check_schema(self, database: sqlite3.Connection, *, create: bool) -> None:
        (application_id,) = database.execute("pragma application_id").fetchone()
        (version,) = database.execute("pragma user_version").fetchone()
        (tables,) = database.execute("select count(*) from sqlite_schema").fetchone()
        if application_id != _APPLICATION_ID:
            if tables or version or not create:
                raise _not_ours(self.path)
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
        elif version > _SCHEMA_VERSION:
            raise AccessError(
                f"{self.path} has schema {version}, written by a newer volcano-server; "
                f"this one knows schema {_SCHEMA_VERSION}",
                _DATA_ERROR,
            )


def _create_private(path: Path) -> None:
    """An empty file that only its owner reads.  SQLite takes an empty file as a new database."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise AccessError(f"cannot write {path}: {error.strerror}", _CANNOT_CREATE) from error


def _access_error(path: Path, error: sqlite3.Error) -> AccessError:
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF:  # the primary code
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
            return _not_ours(path)
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return AccessError(f"cannot write {path}", _CANNOT_CREATE)
        case _:
            return AccessError(f"cannot use {path}: {error}", _IO_ERROR)


def _not_ours(path: Path) -> AccessError:
    return AccessError(f"{path} is not a file of volcano-server credentials", _DATA_ERROR)


def _check_project(database: Transaction, name: str) -> None:
    if database.execute("select 1 from project where name = ?", (name,)).fetchone() is None:
        raise _unknown_project(name)


def _unknown_project(name: str) -> AccessError:
    return AccessError(
        f"there is no project {name!r}; `volcano-server projects list` shows them", _NO_USER
    )
