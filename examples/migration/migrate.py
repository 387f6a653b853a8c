"""Brings a database up to date, once, although every instance of the service starts this.

    python migrate.py DATABASE

One instance holds the lock and migrates; the others wait for it, and find the schema done.  Each
step is a transaction that first raises the fence: an instance that slept through its lease cannot
apply a step that a later one has applied already.
"""

import math
import sqlite3
import sys
from contextlib import closing

from volcano_sdk import VolcanoClient

STEPS = (
    "create table customer (id integer primary key, name text not null)",
    "alter table customer add column email text",
    "insert into customer (name, email) values ('Ann', 'ann@example.test')",
)
FENCE = """
insert into fence values ('migration', :token)
on conflict (key) do update set token = excluded.token where fence.token <= excluded.token
"""


class StaleWriteError(Exception):
    """A later holder of the lock has been here."""


def migrate(database: sqlite3.Connection, volcano: VolcanoClient) -> int:
    """How many steps this instance applied.  Returns when the schema is up to date.

    Raises LockLostError or StaleWriteError when we may no longer go on: start again.
    """
    if version(database) == len(STEPS):
        return 0
    applied = 0
    # Another instance may be at it.  Ours goes on once that one is done, or dead, and looks again.
    with volcano.locks.with_lock("migration:shop", ttl=30, wait=math.inf) as guard:
        while (step := version(database)) < len(STEPS):
            guard.check()
            apply(database, step, fencing_token=guard.lease.fencing_token)
            applied += 1
    return applied


def version(database: sqlite3.Connection) -> int:
    """How many steps the database has seen."""
    return int(database.execute("pragma user_version").fetchone()[0])


def apply(database: sqlite3.Connection, step: int, *, fencing_token: int) -> None:
    database.execute("begin immediate")
    try:
        database.execute("create table if not exists fence (key text primary key, token integer)")
        raised = database.execute(FENCE, {"token": fencing_token})
        if raised.rowcount == 0 or version(database) != step:
            raise StaleWriteError(f"step {step + 1}: a later holder has been here")
        database.execute(STEPS[step])
        database.execute(f"pragma user_version = {step + 1}")
        database.execute("commit")
    except BaseException:
        database.execute("rollback")
        raise


def main(path: str) -> None:
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as database,
        VolcanoClient() as volcano,
    ):
        applied = migrate(database, volcano)
        print(f"{applied} steps applied, the schema is at {version(database)}")


if __name__ == "__main__":
    main(sys.argv[1])
