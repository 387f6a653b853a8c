"""What the measures stand on: servers as processes of their own, wrk, and counters of the kernel.

Everything is on loopback, and the machine is shared: by the server, the load and whatever else
runs.  So what is compared takes turns (A B A B), medians are compared, and the load average is kept
with each result.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

LOAD = Path(__file__).parent.parent / "load"
SERVER = (sys.executable, "-m", "volcano_server")
_START = 30.0
_LONG_ENOUGH = 3.0
"""Seconds after which a server that answered nothing is at fault, not the disk."""


class MissingError(Exception):
    """Something that is measured against, or with, is not on this machine.  The text names it."""


@dataclass
class Figure:
    """One number with its spread: the median, the least and the most of the rounds."""

    label: str
    rounds: Sequence[float]
    unit: str = ""

    def row(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "unit": self.unit,
            "median": median(self.rounds),
            "least": min(self.rounds),
            "most": max(self.rounds),
            "rounds": len(self.rounds),
        }


@dataclass
class Bar:
    """What a figure has to reach.  `is_ceiling`: at most that, else at least."""

    measure: str
    figure: Figure
    bar: float
    is_ceiling: bool = False

    def row(self) -> dict[str, Any]:
        return {
            **self.figure.row(),
            "label": self.measure,
            "bar": self.bar,
            "is_ceiling": self.is_ceiling,
        }


@dataclass
class Result:
    figures: list[Figure] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How long and how often.  Quick is enough to see that a measure works, and gross faults."""

    quick: bool = False

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 5

    @property
    def warm_ups(self) -> int:
        """Rounds before those that count."""
        return 0 if self.quick else 1

    @property
    def seconds(self) -> float:
        return 0.3 if self.quick else 3

    def alternate(self, runs: Mapping[str, Callable[[int], Any]]) -> dict[str, list[Any]]:
        """Each run in turn, again and again."""
        results: dict[str, list[Any]] = {name: [] for name in runs}
        for number in range(self.warm_ups + self.rounds):
            for name, run in runs.items():
                results[name].append(run(number))
        return {name: found[self.warm_ups :] for name, found in results.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round, so that what else the machine does meets both."""
    return [a / b for a, b in zip(over, under, strict=True)]


# ---------------------------------------------------------------- processes


def program(name: str, package: str | None = None) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingError(f"{name} (apt-get install {package or name})")
    return found


@dataclass
class Process:
    """A server under measurement."""

    url: str
    pid: int
    service_key: str = ""

    def cpu(self) -> float:
        """Seconds of CPU so far, of all its threads."""
        total = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                total += int((thread / "schedstat").read_text().split()[0])
        return total / 1e9

    def memory(self) -> float:
        """Resident MB, shared pages included."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def process(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(command, text=True, **options)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """On the disk that TMPDIR names, else /tmp: the flushes are those of that disk."""
    with tempfile.TemporaryDirectory(prefix="volcano-bench-") as name:
        yield Path(name)


@contextlib.contextmanager
def lock_server(store: Path | None = None) -> Iterator[Process]:
    """`volcano-server serve` on a durable SQLite file, without quota."""
    with contextlib.ExitStack() as stack:
        path = store or stack.enter_context(directory()) / "locks.db"
        access, service_key = _access()
        path.with_name(f"{path.stem}.access{path.suffix}").write_bytes(access)
        log = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        command = (*SERVER, "serve", "--port", "0", "--store", f"sqlite:///{path}")
        started = stack.enter_context(process(*command, stderr=log))
        line = wait_for(lambda: Path(log.name).read_text().partition("\n")[0])
        yield Process(json.loads(line)["url"], started.pid, service_key)


@cache
def _access() -> tuple[bytes, str]:
    """What is beside the locks' file for project `bench`, and the project's service key."""
    with directory() as place:
        url = f"sqlite:///{place / 'locks.db'}"
        run(*SERVER, "projects", "create", "bench", "--quota", "0", "--store", url)
        service_key = run(*SERVER, "keys", "create", "--project", "bench", "--store", url)
        return (place / "locks.access.db").read_bytes(), service_key.strip()


@contextlib.contextmanager
def bare_server() -> Iterator[Process]:
    """The yardstick: load/bare_starlette.py."""
    with directory() as place:
        address = place / "url"
        with process(sys.executable, str(LOAD / "bare_starlette.py"), str(address)) as started:
            url = wait_for(lambda: address.read_text() if address.exists() else "")
            yield Process(url, started.pid)


def run(*command: str, timeout: float = 120, **options: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=timeout, **options
    )
    return done.stdout


def wait_for(find: Callable[[], str]) -> str:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        found = find()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"a server did not start within {_START:.0f} s")


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# ---------------------------------------------------------------- load


@dataclass(frozen=True)
class Load:
    """One run of wrk.  `cpu`: µs of the server's CPU per request."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu: float
    requests: int


def wrk(
    server: Process, script: str, *arguments: str, connections: int = 64, seconds: float = 3
) -> Load:
    """`script` is in load/.  An answer that is no success fails the run."""
    command = [program("wrk"), "-t1", f"-c{connections}", "-d1h", "-s", f"{script}.lua"]
    command += [server.url, "--", server.service_key, *arguments]
    before = server.cpu()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=LOAD
    ) as started:
        time.sleep(seconds)
        started.send_signal(signal.SIGINT)  # its own option takes whole seconds
        try:
            output, trouble = started.communicate(timeout=60)
        except BaseException:
            started.kill()
            raise
    cpu = server.cpu() - before
    if started.returncode:
        raise RuntimeError(f"wrk ended with {started.returncode}: {trouble}")
    found = json.loads(output.splitlines()[-1])
    if found["refused"] > found["requests"] * found["may_refuse"] or found["broken"]:
        raise RuntimeError(f"{script}: {found}")
    requests = found["requests"]
    if not requests and seconds < _LONG_ENOUGH:
        return wrk(server, script, *arguments, connections=connections, seconds=_LONG_ENOUGH)
    if not requests:
        raise RuntimeError(f"{script}: {server.url} answered nothing within {seconds:g} s")
    rate = requests / found["seconds"]
    return Load(rate, found["p50_ms"], found["p99_ms"], cpu / requests * 1e6, requests)


@contextlib.contextmanager
def counted_flushes(server: Process) -> Iterator[list[int]]:
    """How often the server flushes a file inside the block: the list's only item, afterwards."""
    counts: list[int] = []
    command = (program("perf", "linux-perf"), "stat", "-x,", "-e", _FLUSHES, "-p", str(server.pid))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as counting:
        time.sleep(0.3)  # until it is attached
        try:
            yield counts
        finally:
            counting.send_signal(signal.SIGINT)
            _, said = counting.communicate(timeout=20)
    lines = [line.split(",")[0] for line in said.splitlines() if "sys_enter_f" in line]
    if not lines or not all(line.isdigit() for line in lines):
        raise MissingError("perf with the system calls' tracepoints (as root)")
    counts.append(sum(map(int, lines)))


_FLUSHES = "syscalls:sys_enter_fdatasync,syscalls:sys_enter_fsync"
