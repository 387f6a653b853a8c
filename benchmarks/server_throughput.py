"""How much of a bare Starlette route's throughput the lock server keeps.

    python benchmarks/server_throughput.py [--rounds 5] [--seconds 4] [--bar 0.6]

Acquire and release of distinct keys over 64 connections, durable on SQLite (synchronous=FULL),
against a route that only parses the same JSON and returns the same JSON, under the same uvicorn.
Both servers run side by side and take turns, so that what else the machine does meets both; medians
are compared.
Needs wrk.  Exits 1 when the ratio is under the bar, or a request was refused.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
CONNECTIONS = 64
SERVER = [sys.executable, "-m", "volcano_server"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--bar", type=float, default=0.6)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        print("this benchmark needs wrk (apt-get install wrk)", file=sys.stderr)
        return 69
    with tempfile.TemporaryDirectory(prefix="volcano-bench-") as directory:
        results = measure(Path(directory), rounds=options.rounds, seconds=options.seconds)
    return report(results, bar=options.bar)


def measure(directory: Path, *, rounds: int, seconds: int) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {"bare": [], "locks": []}
    with bare_server(directory) as bare, lock_server(directory) as (locks, service_key):
        for name, url in (("bare", bare), ("locks", locks)):
            wrk(url, service_key, seconds=1, run=len(name))  # warm
        for number in range(rounds):
            for name, url in (("bare", bare), ("locks", locks)):
                run = 100 + number
                results[name].append(wrk(url, service_key, seconds=seconds, run=run))
    return results


def wrk(url: str, service_key: str, *, seconds: int, run: int) -> dict[str, Any]:
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", "acquire_release.lua", url]
    done = subprocess.run(
        [*command, "--", service_key, str(run)],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds + 30,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["per_second"] = found["requests"] / found["seconds"]
    return found


@contextmanager
def bare_server(directory: Path) -> Iterator[str]:
    address = directory / "bare.url"
    with process([sys.executable, str(HERE / "bare_starlette.py"), str(address)]):
        yield wait_for(lambda: address.read_text() if address.exists() else "")


@contextmanager
def lock_server(directory: Path) -> Iterator[tuple[str, str]]:
    store = f"sqlite:///{directory / 'locks.db'}"
    admin = [*SERVER, "projects", "create", "bench", "--quota", "0", "--store", store]
    subprocess.run(admin, check=True, capture_output=True)
    create_key = [*SERVER, "keys", "create", "--project", "bench", "--store", store]
    service_key = subprocess.run(
        create_key, check=True, capture_output=True, text=True
    ).stdout.strip()
    log = directory / "locks.log"
    with log.open("w") as stderr:
        command = [*SERVER, "serve", "--port", "0", "--store", store]
        with process(command, stderr=stderr):

            def url() -> str:
                lines = log.read_text().splitlines()
                return str(json.loads(lines[0])["url"]) if lines else ""

            yield wait_for(url), service_key


@contextmanager
def process(command: list[str], **options: Any) -> Iterator[None]:
    started = subprocess.Popen(command, **options)
    try:
        yield
    finally:
        started.terminate()
        started.wait(20)


def wait_for(find: Any) -> str:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        found = find()
        if found:
            return str(found)
        time.sleep(0.05)
    raise TimeoutError("a server did not start within 15 s")


def report(results: dict[str, list[dict[str, Any]]], *, bar: float) -> int:
    for name, rounds in results.items():
        speeds = ", ".join(f"{each['per_second']:.0f}" for each in rounds)
        p50, p99 = (median(each[key] for each in rounds) for key in ("p50_ms", "p99_ms"))
        print(f"{name:6} {speeds} requests/s   p50 {p50:.2f} ms   p99 {p99:.2f} ms")
    ratio = middle(results["locks"]) / middle(results["bare"])
    wrong = sum(each["refused"] + each["broken"] for rounds in results.values() for each in rounds)
    print(f"ratio  {ratio:.3f} (bar {bar})   refused or broken: {wrong}")
    return 0 if ratio >= bar and not wrong else 1


def middle(rounds: list[dict[str, Any]]) -> float:
    return float(median(each["per_second"] for each in rounds))


if __name__ == "__main__":
    sys.exit(main())
