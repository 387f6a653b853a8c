"""One of several replicas of a service, of which one at a time runs the scheduled job.

    python replica.py NAME DATABASE

Whoever holds the lock is the leader and runs the job at each tick; the others skip the tick.  When
the leader dies its lease lapses, and at one of the next ticks another replica takes over.
"""

import sqlite3
import sys
from contextlib import closing

import anyio

from volcano_sdk import AsyncVolcanoClient, ConflictError, LockLostError, TransportError

TTL = 5  # seconds: a dead leader is replaced after at most TTL + 1, and one more tick
TICK_SECONDS = 0.5

SCHEMA = """
create table if not exists digest (runs integer, sent_by text, fencing_token integer not null);
insert into digest select 0, null, 0 where not exists (select 1 from digest);
"""
SEND = """
update digest set runs = runs + 1, sent_by = :name, fencing_token = :token
where fencing_token <= :token
"""


async def replica(name: str, database: str) -> None:
    async with AsyncVolcanoClient() as volcano:
        while True:
            try:
                async with volcano.locks.with_lock("job:digest", ttl=TTL) as guard:
                    print(f"{name} leads", flush=True)
                    # Cancelled where it waits when the lock is lost.
                    await run_schedule(name, database, fencing_token=guard.lease.fencing_token)
            except ConflictError:
                pass  # another replica leads: skip this tick
            except LockLostError:
                print(f"{name} no longer leads", flush=True)
            except TransportError as error:
                print(f"{name} cannot reach the lock server: {error}", flush=True)
            await anyio.sleep(TICK_SECONDS)


async def run_schedule(name: str, database: str, *, fencing_token: int) -> None:
    """The job at each tick, for as long as we may.  Returns when a later leader has been here."""
    stale = False
    while not stale:
        stale = not await anyio.to_thread.run_sync(send_digest, name, database, fencing_token)
        await anyio.sleep(TICK_SECONDS)


def send_digest(name: str, database: str, fencing_token: int) -> bool:
    """The job.  Its write refuses a leader that was asleep when its time was over."""
    with closing(sqlite3.connect(database)) as db, db:
        db.executescript(SCHEMA)
        return db.execute(SEND, {"name": name, "token": fencing_token}).rowcount == 1


if __name__ == "__main__":
    try:
        anyio.run(replica, sys.argv[1], sys.argv[2])
    except KeyboardInterrupt:
        sys.exit(130)
