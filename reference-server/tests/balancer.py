"""Several `volcano-server serve` over one database, and a proxy that spreads connections."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httpx

ADMIN = [sys.executable, "-m", "volcano_server"]


class Listener(Protocol):
    @property
    def port(self) -> int: ...


@dataclass
class Replica:
    """One server process; `port` stays the same when it is started again."""

    store: str
    port: int = 0
    process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        self.process = subprocess.Popen(
            [*ADMIN, "serve", "--port", str(self.port), "--store", self.store],
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Until it accepts requests."""
        assert self.process is not None
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert '"server_started"' in line, line
        self.port = urlsplit(json.loads(line)["url"]).port or 0
        threading.Thread(target=self._drain, args=(self.process,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def read(self, http: httpx.Client, key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "X-Volcano-Request-Id": str(uuid.uuid4())}
        return http.get(f"{self.url}/locks/nightly", headers=headers)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(20)

    @staticmethod
    def _drain(process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for _ in lines:
                pass


@dataclass
class Service:
    """What callers see: one URL."""

    url: str
    service_key: str
    replicas: list[Replica]

    def where(self) -> tuple[str, str]:
        return self.url, self.service_key

    def seconds_until(self, key: str, status: int) -> float:
        """Until every replica answers a read with that key so."""
        started = time.monotonic()
        with httpx.Client(trust_env=False, timeout=10, verify=False) as http:
            while True:
                answers = [replica.read(http, key).status_code for replica in self.replicas]
                waited = time.monotonic() - started
                if set(answers) == {status}:
                    return waited
                assert waited < 15, answers
                time.sleep(0.05)


@contextmanager
def service(store: str, count: int = 3, *, quota: int = 0) -> Iterator[Service]:
    """Replicas of a new store behind a balancer, with a project and a service key."""
    admin("projects", "create", "shop", "--quota", str(quota), store=store)
    service_key = admin("keys", "create", "--project", "shop", store=store)
    replicas = [Replica(store) for _ in range(count)]
    try:
        for replica in replicas:
            replica.launch()
        for replica in replicas:
            replica.wait()
        with balanced(replicas) as url:
            yield Service(url, service_key, replicas)
    finally:
        for replica in replicas:
            if replica.process is not None:
                replica.stop(signal.SIGKILL)


def admin(*arguments: str, store: str) -> str:
    """What a command of the operator prints."""
    done = subprocess.run(
        [*ADMIN, *arguments],
        env={**os.environ, "VOLCANO_STORE": store},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def balanced(replicas: Sequence[Listener]) -> Iterator[str]:
    """The URL of a proxy in a thread: each connection goes to the next replica that takes it."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    balancer = _Balancer(replicas)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(balancer.start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(balancer.stop())
        loop.close()

    thread = threading.Thread(target=run, name="balancer")
    thread.start()
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{balancer.port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class _Balancer:
    def __init__(self, replicas: Sequence[Listener]) -> None:
        self._order = itertools.cycle(replicas)
        self._tries = len(replicas)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(near, back))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        writers = [back]
        try:
            for _ in range(self._tries):
                try:
                    far, forth = await asyncio.open_connection("127.0.0.1", next(self._order).port)
                    break
                except OSError:
                    continue
            else:
                return
            writers.append(forth)
            copies = [
                asyncio.create_task(_copy(near, forth)),
                asyncio.create_task(_copy(far, back)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        finally:
            for writer in writers:
                writer.close()
            await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
