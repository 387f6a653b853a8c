"""A guarded write in PostgreSQL: the statement is SQLite's, the token a bigint.

Under READ COMMITTED, the default, a statement that waited for another's row lock compares again
with what that one committed.  Under REPEATABLE READ and SERIALIZABLE it fails with SQLSTATE 40001:
run the transaction again.
"""

from typing import Any

import psycopg

SCHEMA = """
create table if not exists ticket (
    id            bigint primary key,
    answer        text,
    fencing_token bigint not null default 0
)
"""
WRITE = """
insert into ticket (id, answer, fencing_token) values (%(id)s, %(answer)s, %(mine)s)
on conflict (id) do update set answer = excluded.answer, fencing_token = excluded.fencing_token
where ticket.fencing_token <= excluded.fencing_token
"""

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(url: str) -> Connection:
    database = psycopg.connect(url, autocommit=True)
    database.execute("select pg_advisory_lock(1)")  # `if not exists` does not bear company
    database.execute(SCHEMA)
    database.execute("select pg_advisory_unlock(1)")
    return database


def write(database: Connection, ticket: int, answer: str, *, fencing_token: int) -> bool:
    """Whether it was written.  False: somebody has written under a later lease; stop."""
    values = {"id": ticket, "answer": answer, "mine": fencing_token}
    return database.execute(WRITE, values).rowcount == 1


def read(database: Connection, ticket: int) -> str | None:
    row = database.execute("select answer from ticket where id = %s", (ticket,)).fetchone()
    return None if row is None else str(row[0])
