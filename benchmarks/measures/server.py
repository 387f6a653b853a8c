"""The server by itself, and beside a bare Starlette route."""

import contextlib
import http.client
import json
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlsplit

from measures.rig import (
    SERVER,
    Bar,
    Figure,
    Load,
    Plan,
    Process,
    Result,
    bare_server,
    counted_flushes,
    directory,
    lock_server,
    process,
    ratios,
    wrk,
)

BOTH = "acquire_release"


def throughput(plan: Plan) -> Result:
    """Acquire and release of distinct keys, 64 connections, beside a bare Starlette route."""
    with bare_server() as bare, lock_server() as locks:
        found = plan.alternate(
            {
                "bare": lambda n: wrk(bare, BOTH, str(n), seconds=plan.seconds),
                "locks": lambda n: wrk(locks, BOTH, str(n), seconds=plan.seconds),
            }
        )
    speeds = {name: [load.per_second for load in loads] for name, loads in found.items()}
    ratio = Figure("lock server / bare route", ratios(speeds["locks"], speeds["bare"]))
    return Result(
        [
            Figure("bare Starlette route", speeds["bare"], "requests/s"),
            Figure("lock server", speeds["locks"], "requests/s"),
            ratio,
            Figure("bare route, CPU", [load.cpu for load in found["bare"]], "µs/request"),
            Figure("lock server, CPU", [load.cpu for load in found["locks"]], "µs/request"),
        ],
        [Bar("acquire+release over a bare Starlette route, 64 connections", ratio, 0.9)],
    )


def tail(plan: Plan) -> Result:
    """p99 over p50, at 64 and at 256 connections."""
    result = Result()
    with lock_server() as locks:

        def with_connections(many: int) -> Callable[[int], Load]:
            return lambda n: wrk(locks, BOTH, f"{n}{many}", connections=many, seconds=plan.seconds)

        found = plan.alternate({str(many): with_connections(many) for many in (64, 256)})
    for many, bar in (("64", 2.0), ("256", 2.5)):
        p50, p99 = ([getattr(load, name) for load in found[many]] for name in ("p50_ms", "p99_ms"))
        ratio = Figure(f"p99 / p50 at {many} connections", ratios(p99, p50))
        result.figures += [
            Figure(f"p50 at {many} connections", p50, "ms"),
            Figure(f"p99 at {many} connections", p99, "ms"),
        ]
        result.bars.append(Bar(ratio.label, ratio, bar, is_ceiling=True))
    return result


def renewals(plan: Plan) -> Result:
    """Renewals alone, beside acquire and release, 64 connections."""
    with lock_server() as locks:
        found = plan.alternate(
            {
                "renew": lambda n: wrk(locks, "renew", str(1000 + n), "2000", seconds=plan.seconds),
                "both": lambda n: wrk(locks, BOTH, str(n), seconds=plan.seconds),
            }
        )
    speeds = {name: [load.per_second for load in loads] for name, loads in found.items()}
    ratio = Figure("renewals / acquire+release", ratios(speeds["renew"], speeds["both"]))
    return Result(
        [
            Figure("renewals", speeds["renew"], "operations/s"),
            Figure("acquire and release", speeds["both"], "operations/s"),
        ],
        [Bar("renewals over acquire+release operations, 64 connections", ratio, 0.9)],
    )


def renew_many(plan: Plan) -> Result:
    """CPU of a renewal, a hundred in a request, beside a request each; 16 connections."""
    run = ("1", "200" if plan.quick else "2000")
    with lock_server() as locks:

        def cpu(script: str, *more: str) -> float:
            return wrk(locks, script, *run, *more, connections=16, seconds=plan.seconds).cpu

        cpu("renew")  # acquires what the others renew
        found = plan.alternate(
            {
                "single": lambda _: cpu("renew", "held"),
                "many": lambda _: cpu("renew_many") / 100,
            }
        )
    ratio = Figure("a hundred in a request / single", ratios(found["many"], found["single"]))
    return Result(
        [
            Figure("single renewals, CPU of the server", found["single"], "µs/lease"),
            Figure("a hundred in a request, CPU of the server", found["many"], "µs/lease"),
        ],
        [
            Bar(
                "CPU per lease renewed in batches of 100, over a single renewal",
                ratio,
                0.15,
                is_ceiling=True,
            )
        ],
    )


def latency(plan: Plan) -> Result:
    """One connection, beside a durable SQLite commit and a bare round trip, each alone."""
    with bare_server() as bare, lock_server() as locks, _durable_table() as table:
        found = plan.alternate(
            {
                "commit": lambda _: _commit_p50(table, seconds=plan.seconds),
                "bare": lambda n: (
                    wrk(bare, BOTH, str(n), connections=1, seconds=plan.seconds).p50_ms
                ),
                "locks": lambda n: (
                    wrk(locks, BOTH, str(n), connections=1, seconds=plan.seconds).p50_ms
                ),
            }
        )
    floor = [a + b for a, b in zip(found["commit"], found["bare"], strict=True)]
    ratio = Figure("server / (commit + round trip)", ratios(found["locks"], floor))
    return Result(
        [
            Figure("durable SQLite commit of one row, p50", found["commit"], "ms"),
            Figure("bare Starlette round trip, p50", found["bare"], "ms"),
            Figure("lock server, p50", found["locks"], "ms"),
        ],
        [
            Bar(
                "one connection: p50 over a SQLite commit + a bare round trip",
                ratio,
                1.3,
                is_ceiling=True,
            )
        ],
    )


@contextlib.contextmanager
def _durable_table() -> Iterator[sqlite3.Connection]:
    """As the server's own: WAL, flushed at each commit, one owner."""
    with (
        directory() as place,
        contextlib.closing(sqlite3.connect(place / "one.db", isolation_level=None)) as table,
    ):
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            table.execute(f"PRAGMA {pragma}")
        table.execute("CREATE TABLE slot (key TEXT PRIMARY KEY, token TEXT, at INTEGER)")
        # Until its log is written over, as a server's is: to make a file longer costs more.
        table.execute("PRAGMA synchronous = OFF")
        _commit_p50(table, seconds=0.3)
        table.execute("PRAGMA synchronous = FULL")
        yield table


def _commit_p50(table: sqlite3.Connection, *, seconds: float) -> float:
    """Milliseconds."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        row = (f"key-{len(took) % 1000}", str(uuid.uuid4()), len(took))
        began = time.perf_counter()
        table.execute("BEGIN IMMEDIATE")
        table.execute("INSERT OR REPLACE INTO slot VALUES (?, ?, ?)", row)
        table.execute("COMMIT")
        took.append((time.perf_counter() - began) * 1e3)
    return median(took)


def flushes(plan: Plan) -> Result:
    """How many acknowledged operations share one flush to the disk; counted by the kernel."""
    per_flush: dict[int, list[float]] = {64: [], 1: []}
    with lock_server() as locks:
        wrk(locks, BOTH, "99", seconds=plan.seconds)
        for number in range(plan.rounds):
            for many, found in per_flush.items():
                with counted_flushes(locks) as counts:
                    load = wrk(
                        locks, BOTH, f"{number}{many}", connections=many, seconds=plan.seconds
                    )
                found.append(load.requests / counts[0])
    return Result(
        bars=[
            Bar(
                "acknowledged operations per flush, 64 connections",
                Figure("", per_flush[64]),
                10,
            ),
            Bar(
                "flushes per operation, one connection",
                Figure("", [1 / each for each in per_flush[1]]),
                1,
            ),
        ],
        notes=["Checkpoints flush too, so one connection may come to a little over one."],
    )


def stored(plan: Plan) -> Result:
    """A million live locks and a million dead ones in the file, beside an empty file."""
    many = 100_000 if plan.quick else 1_000_000
    with directory() as place:
        full = place / "full.db"
        with lock_server(full):
            pass  # makes the tables
        _fill(full, many)
        with lock_server(full) as crowded, lock_server(place / "empty.db") as empty:

            def cpu(server: Process, *keys: str) -> Callable[[int], float]:
                return lambda n: wrk(server, BOTH, str(n), *keys, seconds=plan.seconds).cpu

            among = ("stored", str(many))
            found = plan.alternate(
                {
                    "full, new keys": cpu(crowded),
                    "empty, new keys": cpu(empty),
                    "full, random keys": cpu(crowded, *among),
                    "empty, random keys": cpu(empty, *among),
                }
            )
            memory = crowded.memory()
    result = Result(
        [
            *(Figure(f"CPU, {name}", spent, "µs/request") for name, spent in found.items()),
            Figure(f"memory with {many:,} live and as many dead locks", [memory], "MB"),
        ]
    )
    for keys, bar in (("new keys", 1.1), ("random keys", 1.25)):
        ratio = ratios(found[f"full, {keys}"], found[f"empty, {keys}"])
        label = f"CPU with {many:,} live and dead locks over an empty file, {keys}"
        result.bars.append(Bar(label, Figure("", ratio), bar, is_ceiling=True))
    return result


def _fill(path: Path, many: int) -> None:
    """Live and dead locks, in tables of the server; names as in load/acquire_release.lua."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        (now,) = database.execute("SELECT now FROM store").fetchone()
        hour = 3_600_000_000
        database.executemany(
            "INSERT INTO slots (project, key, fencing_token, changed_at, token, expires_at,"
            " hard_deadline) VALUES ('bench', ?, ?, ?, ?, ?, ?)",
            (
                row
                for n in range(many)
                for row in (
                    (f"dead-{n}", n + 1, now, None, None, None),
                    (f"live-{n}", n + 1, now, str(uuid.UUID(int=n)), now + hour, now + 24 * hour),
                )
            ),
        )
        database.commit()


def reads(plan: Plan) -> Result:
    """The same slow stream of reads beside an idle server and beside saturating writers."""
    p99: dict[str, list[float]] = {"idle": [], "busy": []}
    seconds = plan.seconds
    with lock_server() as locks:
        wrk(locks, BOTH, "99", seconds=plan.seconds)
        for number in range(plan.rounds):
            p99["idle"].append(_read_p99(locks, seconds))
            writers = threading.Thread(
                target=wrk, args=(locks, BOTH, str(number)), kwargs={"seconds": seconds + 1}
            )
            writers.start()
            time.sleep(0.5)
            p99["busy"].append(_read_p99(locks, seconds))
            writers.join()
    return Result(
        [
            Figure("p99 of a read, idle server", p99["idle"], "ms"),
            Figure("p99 of a read, 64 writers", p99["busy"], "ms"),
            Figure("ratio", ratios(p99["busy"], p99["idle"])),
        ]
    )


def _read_p99(server: Process, seconds: float) -> float:
    """Milliseconds from when a read was due: ten connections, twenty reads a second each."""
    with ThreadPoolExecutor(10) as readers:
        futures = [readers.submit(_read, server, int(seconds * 20), 0.05) for _ in range(10)]
        took = [each for future in futures for each in future.result()]
    return quantiles(took, n=100)[98]


def _read(server: Process, many: int, pause: float) -> list[float]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    headers = {"Authorization": f"Bearer {server.service_key}"}
    took = []
    began = time.perf_counter()
    for number in range(many):
        due = began + number * pause
        time.sleep(max(0.0, due - time.perf_counter()))
        headers["X-Volcano-Request-Id"] = str(uuid.uuid4())
        connection.request("GET", f"/locks/read-{number}", headers=headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"a read was answered {answer.status}")
        took.append((time.perf_counter() - due) * 1e3)
    connection.close()
    return took


def start(plan: Plan) -> Result:
    """`volcano-server dev`, from its start to its first answer, and what it takes of memory."""
    took: list[float] = []
    memory: list[float] = []
    for _ in range(plan.warm_ups + plan.rounds):
        with directory() as place:
            began = time.perf_counter()
            command = (*SERVER, "dev", "--json", "--port", "0", "--store")
            with process(*command, f"sqlite:///{place / 'dev.db'}", stdout=-1, cwd=place) as server:
                assert server.stdout is not None
                ready = json.loads(server.stdout.readline())
                _read(Process(ready["url"], server.pid, ready["service_key"]), 1, 0)
                took.append(time.perf_counter() - began)
                memory.append(Process("", server.pid).memory())
                server.stdout.close()
    return Result(
        bars=[
            Bar(
                "start to first answer, s",
                Figure("", took[plan.warm_ups :], "s"),
                1.0,
                is_ceiling=True,
            ),
            Bar(
                "memory at start, MB",
                Figure("", memory[plan.warm_ups :], "MB"),
                60,
                is_ceiling=True,
            ),
        ],
        notes=[f"Python {sys.version.split()[0]}"],
    )
