"""A lock inside a durable step: a payout survives kill -9 and is booked once.

    python payouts.py ACCOUNTS STATE start ORDER     books 10 for the order
    python payouts.py ACCOUNTS STATE resume          goes on with what a dead process left

DBOS remembers in STATE which workflows are not finished and runs their unfinished steps again.
That is at least once, never exactly once: a step may be cut off anywhere, also after its effect,
and a process that only seemed dead may go on beside its replacement.  So

- the lock is taken inside the step that writes, by each run of it with a lock token of its own: a
  lease that a workflow carried along would outlive its holder, or be shared with a twin;
- a held lock is an error of the step, which DBOS tries again until the dead holder's lease is over;
- the transaction that books raises the fence first, which refuses the twin, and notes the order,
  which makes a second run harmless.
"""

import os
import sqlite3
import sys
import time
from contextlib import closing

from dbos import DBOS, DBOSConfig, SetWorkflowID

from volcano_sdk import ConflictError, VolcanoClient

TTL = 5
ACCOUNTS, STATE = sys.argv[1:3]
PAUSE = float(os.environ.get("PAUSE_SECONDS", "0"))  # makes the step long enough to be killed in

SCHEMA = """
create table if not exists account (id integer primary key, balance integer not null);
create table if not exists booked (order_id text primary key);
create table if not exists fence (key text primary key, token integer not null);
insert or ignore into account values (1, 0);
"""
FENCE = """
insert into fence values ('account:1', :token)
on conflict (key) do update set token = excluded.token where fence.token <= excluded.token
"""


class StaleWriteError(Exception):
    """A later holder has been here: this run of the step is the twin of a newer one."""


@DBOS.workflow()
def pay_out(order: str) -> str:
    return book(order)


@DBOS.step(
    retries_allowed=True,
    interval_seconds=0.5,
    backoff_rate=1.0,
    max_attempts=4 * TTL,
    should_retry=lambda error: isinstance(error, ConflictError),
)
def book(order: str) -> str:
    with VolcanoClient() as volcano, volcano.locks.with_lock("account:1", ttl=TTL) as guard:
        print(f"{os.getpid()} holds the account", flush=True)
        time.sleep(PAUSE)
        try:
            return write(order, fencing_token=guard.lease.fencing_token)
        except StaleWriteError as error:
            print(f"{os.getpid()} is refused: {error}", flush=True)
            raise  # DBOS finds that the workflow is finished, and takes over its result


def write(order: str, *, fencing_token: int) -> str:
    with closing(sqlite3.connect(ACCOUNTS, isolation_level=None, timeout=10)) as database:
        database.executescript(SCHEMA)
        database.execute("begin immediate")
        try:
            if database.execute(FENCE, {"token": fencing_token}).rowcount == 0:
                raise StaleWriteError(f"{order}: a later holder has written")
            noted = database.execute("insert or ignore into booked values (?)", (order,))
            if noted.rowcount == 1:
                database.execute("update account set balance = balance + 10 where id = 1")
            database.execute("commit")
        except BaseException:
            database.execute("rollback")
            raise
        return "booked" if noted.rowcount == 1 else "was booked before"


def main(command: str, order: str = "") -> None:
    config: DBOSConfig = {
        "name": "payouts",
        "system_database_url": f"sqlite:///{STATE}",
        "application_version": "1",
        "log_level": "CRITICAL",
    }
    DBOS(config=config)
    DBOS.launch()  # goes on with what is unfinished
    if command == "start":
        with SetWorkflowID(order):
            workflows = [DBOS.start_workflow(pay_out, order)]
    else:
        known = DBOS.list_workflows(name=pay_out.__qualname__)
        workflows = [DBOS.retrieve_workflow(each.workflow_id) for each in known]
    for workflow in workflows:
        print(f"{os.getpid()} {workflow.workflow_id}: {workflow.get_result()}", flush=True)
    DBOS.destroy()


if __name__ == "__main__":
    main(*sys.argv[3:])
