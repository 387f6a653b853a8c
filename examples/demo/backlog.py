"""The data that the locks protect: a table of tickets, and writes that carry a fencing token.

A write goes through only if nobody with a higher fencing token has written before it:
docs/fencing.md.  The count of answers is what proves that no ticket was answered twice.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_SCHEMA = """
create table tickets (
    id            integer primary key,
    fencing_token integer not null default 0,
    answer        text,
    answered_by   text,
    answers       integer not null default 0
) strict;
"""


class Backlog:
    """The tickets in an SQLite file, which any thread or process may open."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, tickets: int) -> None:
        with self._open() as db:
            db.executescript(_SCHEMA)
            db.executemany(
                "insert into tickets (id) values (?)", [(n + 1,) for n in range(tickets)]
            )

    def add(self, ticket: int) -> None:
        """A new one; again, it changes nothing."""
        with self._open() as db:
            db.execute("insert or ignore into tickets (id) values (?)", (ticket,))

    def open_tickets(self) -> list[int]:
        """Those without an answer."""
        with self._open() as db:
            return [row[0] for row in db.execute("select id from tickets where answers = 0")]

    def mark(self, ticket: int, *, fencing_token: int) -> bool:
        """Leave our token beside the row, so that whoever held it before us can write no more."""
        return self._guarded(ticket, fencing_token, "fencing_token = :token")

    def answer(self, ticket: int, text: str, *, fencing_token: int, agent: str) -> bool:
        """The guarded write.  False: it changed nothing, somebody newer holds the ticket."""
        return self._guarded(
            ticket,
            fencing_token,
            "fencing_token = :token, answer = :text, answered_by = :agent, answers = answers + 1",
            text=text,
            agent=agent,
        )

    def answers(self) -> dict[int, int]:
        """How often each ticket was answered."""
        with self._open() as db:
            return dict(db.execute("select id, answers from tickets"))

    def _guarded(self, ticket: int, token: int, changes: str, **values: str) -> bool:
        with self._open() as db:
            written = db.execute(
                f"update tickets set {changes} where id = :id and fencing_token <= :token",
                {"id": ticket, "token": token, **values},
            )
            return written.rowcount == 1

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=10)) as db, db:
            yield db
