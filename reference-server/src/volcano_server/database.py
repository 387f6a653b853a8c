"""One PostgreSQL database: what its URL says, connections to it, its tables, what its errors mean.

Everything of ours is in the schema `volcano`.  Its tables are made by the numbered scripts in
stores/migrations/postgresql, each in a transaction of its own that begins by inserting the script's
number: a second server that starts at the same moment waits for that row and finds the work done.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from threading import Timer
from typing import Any

import psycopg
from psycopg import conninfo, errors

from volcano_server.stores.store import (
    NewerSchemaError,
    NotAStoreError,
    StoreBrokenError,
    StoreOpenError,
    StorePathError,
    StoreUnreachableError,
)

_DEFAULTS: Mapping[str, str] = {
    "application_name": "volcano-server",
    "target_session_attrs": "read-write",  # of several hosts the primary, whichever it is by now
    "connect_timeout": "2",  # seconds, for each host
    # A host that is gone is noticed within seconds, even in the middle of a commit.
    "keepalives_idle": "3",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
}
_MIGRATION_SECONDS = 60.0
_ANOTHER_WAS_QUICKER = (
    errors.UniqueViolation,
    errors.DuplicateSchema,
    errors.DuplicateTable,
    errors.DuplicateObject,
)


@dataclass(frozen=True, slots=True)
class Database:
    """Where it is.  `shown` is for people: without passwords and options."""

    conninfo: str = field(repr=False)
    shown: str

    @classmethod
    def parse(cls, url: str) -> "Database":
        """From a connection URL of libpq, several hosts included.  Raises ValueError.

        What the URL does not say comes from libpq's environment (PGPASSWORD, PGPASSFILE, …) and
        then from here.
        """
        try:
            given = conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            # Its text may quote the password.
            raise ValueError("this is no connection URL that libpq understands") from None
        hosts = str(given.get("host") or given.get("hostaddr") or "")
        shown = f"postgresql://{hosts}/{given.get('dbname') or ''}"
        return cls(conninfo.make_conninfo("", **{**_DEFAULTS, **given}), shown)

    def connect(self) -> "psycopg.Connection[Any]":
        """Blocks; raises psycopg.Error."""
        return psycopg.connect(self.conninfo, autocommit=True, prepare_threshold=None)

    async def connect_async(self) -> "psycopg.AsyncConnection[Any]":
        """Raises psycopg.Error."""
        return await psycopg.AsyncConnection.connect(
            self.conninfo, autocommit=True, prepare_threshold=None
        )


Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def cut(connection: Connection) -> None:
    """End a connection from outside: whoever waits on it hears of it at once.

    A server that is frozen, with a host that is not, answers nothing and refuses nothing; no
    timeout of the server itself can end that.
    """
    try:
        copy = socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM)
    except (psycopg.Error, OSError):
        return  # it is closed already
    with copy:
        try:
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was quicker


@contextmanager
def cut_after(connection: "psycopg.Connection[Any]", seconds: float) -> Iterator[None]:
    timer = Timer(seconds, cut, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reason(error: psycopg.Error) -> str:
    """For the operator, in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    state = f" ({error.sqlstate})" if error.sqlstate else ""
    return f"PostgreSQL: {words}{state}"


# ---------------------------------------------------------------- tables


def migrations() -> list[str]:
    """The scripts in their order.  The number of those applied is the schema's version."""
    folder = resources.files("volcano_server.stores") / "migrations" / "postgresql"
    scripts = (file for file in folder.iterdir() if file.name.endswith(".sql"))
    return [script.read_text() for script in sorted(scripts, key=lambda script: script.name)]


def migrate(database: Database) -> None:
    """Bring the tables up to date, or refuse them.  Blocks; raises StoreOpenError."""
    try:
        with database.connect() as connection, cut_after(connection, _MIGRATION_SECONDS):
            _migrate(connection, database.shown)
    except psycopg.Error as error:
        raise _open_error(database.shown, error) from error


def _migrate(connection: "psycopg.Connection[Any]", shown: str) -> None:
    scripts = migrations()
    lost_races = 0
    while (version := _version(connection)) != len(scripts):
        if version > len(scripts):
            raise NewerSchemaError(
                f"Cannot open {shown}: its schema is version {version}, written by a later"
                f" volcano-server; this one knows up to version {len(scripts)}."
            )
        try:
            _apply(connection, version + 1, scripts[version])
        except _ANOTHER_WAS_QUICKER as error:
            lost_races += 1
            if lost_races > 10 + len(scripts):
                raise NotAStoreError(
                    f"Cannot open {shown}: its schema `volcano` is not ours. {reason(error)}"
                ) from error


def _version(connection: "psycopg.Connection[Any]") -> int:
    found = connection.execute("SELECT to_regclass('volcano.migrations') IS NOT NULL").fetchone()
    if found is None or not found[0]:
        return 0
    row = connection.execute("SELECT coalesce(max(version), 0) FROM volcano.migrations").fetchone()
    assert row is not None
    return int(row[0])


def _apply(connection: "psycopg.Connection[Any]", version: int, script: str) -> None:
    with connection.transaction():
        if version == 1:
            connection.execute("CREATE SCHEMA IF NOT EXISTS volcano")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS volcano.migrations ("
                " version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
            )
        # The lock: the transaction of another server holds this row until its script is done.
        connection.execute("INSERT INTO volcano.migrations (version) VALUES (%s)", (version,))
        connection.execute(script.encode())


def _open_error(shown: str, error: psycopg.Error) -> StoreOpenError:
    sentence = f"Cannot open {shown}: {reason(error)}"
    match error.sqlstate:
        case None | "57P03" | "57P01" | "53300":  # starting, stopping, too many connections
            return StoreUnreachableError(sentence)
        case "42501" | "25006" | "28000" | "28P01" | "3D000":
            # No right to, read-only, not let in, no such database.
            return StorePathError(sentence)
        case _:
            return StoreBrokenError(sentence)
