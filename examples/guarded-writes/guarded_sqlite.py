"""A guarded write in SQLite: one statement compares the fencing tokens and writes."""

import sqlite3

SCHEMA = """
create table if not exists ticket (
    id            integer primary key,
    answer        text,
    fencing_token integer not null default 0    -- 0: nobody has written it yet
) strict;
"""
WRITE = """
insert into ticket (id, answer, fencing_token) values (:id, :answer, :mine)
on conflict (id) do update set answer = excluded.answer, fencing_token = excluded.fencing_token
where ticket.fencing_token <= excluded.fencing_token
"""


def connect(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, timeout=10)
    database.execute(SCHEMA)
    return database


def write(database: sqlite3.Connection, ticket: int, answer: str, *, fencing_token: int) -> bool:
    """Whether it was written.  False: somebody has written under a later lease; stop."""
    values = {"id": ticket, "answer": answer, "mine": fencing_token}
    return database.execute(WRITE, values).rowcount == 1


def read(database: sqlite3.Connection, ticket: int) -> str | None:
    row = database.execute("select answer from ticket where id = ?", (ticket,)).fetchone()
    return None if row is None else str(row[0])
