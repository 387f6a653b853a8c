"""Projects and credentials beside the locks in PostgreSQL: the same for every replica."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from volcano_server.access import AccessError, AccessTables, Rows
from volcano_server.database import Database, cut_after, migrate, reason
from volcano_server.stores.store import StoreOpenError

_PATIENCE = 5.0  # seconds for one transaction


@dataclass(frozen=True, slots=True)
class Version:
    """A number that rises with each change."""

    number: int

    def is_settled(self) -> bool:
        return True


class AccessDatabase(AccessTables):
    """The tables in a database.  It is connected to as it is used, and the connection kept.

    Used from one thread at a time.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: psycopg.Connection[Any] | None = None

    def exists(self) -> bool:
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def state(self) -> Version:
        with self._opened() as database:
            return Version(_version(database))

    @contextmanager
    def _opened(
        self, *, write: bool = False, create: bool = False
    ) -> Iterator["_SharedTransaction"]:
        if create:
            self._make_tables()
        try:
            connection = self._connected()
            with cut_after(connection, _PATIENCE), connection.transaction():
                connection.execute("SET LOCAL search_path TO volcano")
                yield _SharedTransaction(connection)
                if write or create:
                    connection.execute("UPDATE access SET version = version + 1")
        except psycopg.errors.UndefinedTable:
            raise AccessError(
                f"{self._database.shown} has no tables of volcano-server;"
                " `volcano-server projects create NAME` makes them",
                66,  # EX_NOINPUT
            ) from None
        except psycopg.Error as error:
            self.close()
            raise AccessError(f"cannot use {self._database.shown}: {reason(error)}", 69) from error

    def _make_tables(self) -> None:
        try:
            migrate(self._database)
        except StoreOpenError as error:
            raise AccessError(str(error), error.exit_status) from error

    def _connected(self) -> "psycopg.Connection[Any]":
        if self._connection is None:
            self._connection = self._database.connect()
        return self._connection


@dataclass(frozen=True, slots=True)
class _SharedTransaction:
    """SQL as SQLite has it, for psycopg."""

    connection: "psycopg.Connection[Any]"

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Rows:
        return self.connection.execute(statement.replace("?", "%s").encode(), values)


def _version(database: _SharedTransaction) -> int:
    (number,) = database.execute("select version from access").fetchone()
    return int(number)
