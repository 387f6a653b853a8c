"""Waiting for a lock that somebody else holds: by events, by asking again and again, beside etcd.

A raw client is measures/streams.py: the least that anybody has to do.  It follows docs/semantics.md
#waiting as the SDKs do: one try once the stream is open, one after each event that frees the key,
put off by random() × min((watchers − 1) × 2 ms, 1 s), and given up when somebody was faster.
"""

import asyncio
import contextlib
import json
import random
import socket
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from measures import streams
from measures.peers import BOTH, etcd_server
from measures.rig import (
    Bar,
    Figure,
    MissingError,
    Plan,
    Process,
    Result,
    lock_server,
    ratios,
    wrk,
)
from measures.streams import Connection, Event, EventReader

FREEING = ("released", "force_released", "lapsed")
CROWD = 1_000
IDLE = 500


# ---------------------------------------------------------------- one waiter


def hand_over(plan: Plan) -> Result:
    """From a release to the grant of the one who waits: events, polling every second, etcd."""
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        locks = stack.enter_context(lock_server())
        ways: dict[str, Callable[[int], list[float]]] = {
            "events, Python SDK": lambda n: _by_sdk(locks, f"sdk-{n}", plan.seconds),
            "events, a raw client": lambda n: _by_events(locks, f"raw-{n}", plan.seconds),
            "polling every second": lambda n: _by_polling(locks, f"poll-{n}", plan.seconds),
        }
        try:
            peer = stack.enter_context(etcd_server())
        except MissingError as missing:
            notes.append(f"There is no {missing}")
        else:
            ways["etcd's watch"] = lambda n: _by_watch(peer, f"etcd-{n}", plan.seconds)
        found = plan.alternate(ways)
    figures = [
        Figure(f"{name}, p50", [median(each) for each in took], "ms")
        for name, took in found.items()
    ]
    figures += [
        Figure(f"{name}, p99", [_p99([each for part in took for each in part])], "ms")
        for name, took in found.items()
    ]
    bar = Bar("release to the next grant, p50, Python SDK, ms", figures[0], 20, is_ceiling=True)
    return Result(figures, [bar], notes)


def _p99(took: list[float]) -> float:
    return quantiles(took, n=100, method="inclusive")[98] if len(took) > 1 else took[0]


def _by_events(server: Process, key: str, seconds: float) -> list[float]:
    """Milliseconds of each hand-over."""

    async def measured() -> list[float]:
        holder, waiter = Connection(server), Connection(server)
        async with streams.event_stream(server, key) as events:

            async def wait(token: str) -> None:
                while await _acquired(waiter, key, token) is None:
                    while (await anext(events)).kind not in FREEING:
                        pass

            return await _handed_over(key, seconds, holder, waiter, wait)

    return asyncio.run(measured())


def _by_polling(server: Process, key: str, seconds: float) -> list[float]:
    """Sixteen keys at once, since each takes half a second to be handed over."""

    async def measured(key: str) -> list[float]:
        holder, waiter = Connection(server), Connection(server)

        async def wait(token: str) -> None:
            while await _acquired(waiter, key, token) is None:  # noqa: ASYNC110 - it is the measure
                await asyncio.sleep(1)

        return await _handed_over(key, seconds, holder, waiter, wait, hold=(1, 2))

    async def all_measured() -> list[float]:
        each = await asyncio.gather(*(measured(f"{key}-{n}") for n in range(16)))
        return [took for all_ in each for took in all_]

    return asyncio.run(all_measured())


async def _handed_over(
    key: str,
    seconds: float,
    holder: Connection,
    waiter: Connection,
    wait: Callable[[str], Coroutine[Any, Any, None]],
    *,
    hold: tuple[float, float] = (0.01, 0.02),
) -> list[float]:
    """Two callers and a lock server.  `hold`: after how many seconds it is given back."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not took:
        mine, theirs = str(uuid.uuid4()), str(uuid.uuid4())
        if await _acquired(holder, key, mine) is None:
            raise RuntimeError("a key that nobody has was not granted")
        waiting = asyncio.create_task(wait(theirs))
        await asyncio.sleep(random.uniform(*hold))
        began = time.perf_counter()
        await _release(holder, key, mine)
        await waiting
        took.append((time.perf_counter() - began) * 1e3)
        await _release(waiter, key, theirs)
    return took


async def _acquired(connection: Connection, key: str, token: str) -> int | None:
    """The fencing token, or None: somebody else has it."""
    status, answer = await connection.lease("POST", key, token)
    if status not in (201, 409):
        raise RuntimeError(f"an acquire was answered {status}: {answer}")
    return int(answer["fencing_token"]) if status == 201 else None


async def _release(connection: Connection, key: str, token: str) -> None:
    status, answer = await connection.lease("DELETE", key, token)
    if status != 204:
        raise RuntimeError(f"a release was answered {status}: {answer}")


def _by_sdk(server: Process, key: str, seconds: float) -> list[float]:
    """Two clients of the Python SDK in two threads; the waiting one opens its stream each time."""
    from volcano_sdk import VolcanoClient

    took: list[float] = []
    until = time.perf_counter() + seconds
    settings: dict[str, Any] = {"api_url": server.url, "service_key": server.service_key}
    with (
        VolcanoClient(**settings) as holder,
        VolcanoClient(**settings) as waiter,
        ThreadPoolExecutor(1) as thread,
    ):

        def wait() -> float:
            lease = waiter.locks.acquire(key, ttl=60, wait=60)
            granted = time.perf_counter()
            waiter.locks.release(key, lease)
            return granted

        while time.perf_counter() < until or not took:
            lease = holder.locks.acquire(key, ttl=60)
            waiting = thread.submit(wait)
            time.sleep(random.uniform(0.05, 0.1))
            began = time.perf_counter()
            holder.locks.release(key, lease)
            took.append((waiting.result() - began) * 1e3)
    return took


def _by_watch(server: Process, key: str, seconds: float) -> list[float]:
    """By etcd's HTTP gateway: put if absent, deleted; a watch tells of the deletion."""
    name = b64encode(key.encode()).decode()
    put = {
        "compare": [{"target": "CREATE", "key": name, "create_revision": "0"}],
        "success": [{"request_put": {"key": name, "value": "dA=="}}],
    }
    watch = json.dumps({"create_request": {"key": name, "filters": ["NOPUT"]}}).encode()

    async def post(connection: Connection, path: str, body: Any) -> Any:
        status, answer = await connection.request("POST", path, json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"etcd answered {status}: {answer}")
        return answer

    async def put_if_absent(connection: Connection) -> bool:
        return "succeeded" in await post(connection, "/v3/kv/txn", put)

    async def measured() -> list[float]:
        holder, waiter = Connection(server), Connection(server)
        took: list[float] = []
        until = time.perf_counter() + seconds
        async with streams.streamed(server, "POST", "/v3/watch", watch) as chunks:
            await anext(chunks)  # it is there
            while time.perf_counter() < until or not took:
                if not await put_if_absent(holder):
                    raise RuntimeError("a key that nobody has was not put")

                async def wait() -> None:
                    while not await put_if_absent(waiter):
                        await anext(chunks)

                waiting = asyncio.create_task(wait())
                await asyncio.sleep(random.uniform(0.01, 0.02))
                began = time.perf_counter()
                await post(holder, "/v3/kv/deleterange", {"key": name})
                await waiting
                took.append((time.perf_counter() - began) * 1e3)
                await post(waiter, "/v3/kv/deleterange", {"key": name})
        return took

    return asyncio.run(measured())


# ---------------------------------------------------------------- a thousand waiters


def crowd(plan: Plan) -> Result:
    """A thousand clients wait for one key; each holds it once, for no time, and leaves."""
    many = CROWD // 20 if plan.quick else CROWD
    with lock_server() as locks:
        return asyncio.run(_Crowd(locks, many).run())


class _Crowd:
    """All waiters in this process, each with a stream and a connection of its own."""

    KEY = "crowded"

    def __init__(self, server: Process, many: int) -> None:
        self.server = server
        self.waiting = {_Waiter(self, number) for number in range(many)}
        self.history = array("q")
        """The fencing token of each lease, in the order of the grants."""
        self.took: list[float] = []  # milliseconds from each release to the next grant
        self.released_at = 0.0
        self.memory: list[float] = []
        self.over = asyncio.Event()

    async def run(self) -> Result:
        many = len(self.waiting)
        waiters = list(self.waiting)
        holder, token = Connection(self.server), str(uuid.uuid4())
        first = await _acquired(holder, self.KEY, token)
        assert first is not None
        for each in waiters:
            await each.join()
        self.memory.append(self.server.memory())
        self.history.append(first)
        began = self.released_at = time.perf_counter()
        await _release(holder, self.KEY, token)
        async with asyncio.timeout(600):
            await self.over.wait()
        seconds = time.perf_counter() - began
        events = sum(each.check(self.history) for each in waiters)
        requests = sum(each.connection.requests for each in waiters)
        if len(self.history) != many + 1 or any(each.failure for each in waiters):
            failures = [each.failure for each in waiters if each.failure]
            raise RuntimeError(f"{len(self.history) - 1} of {many} were granted; {failures[:3]}")
        return Result(
            [
                Figure("release to the next grant, p50", [median(self.took)], "ms"),
                Figure("release to the next grant, p99", [_p99(self.took)], "ms"),
                Figure("release to the next grant, longest", [max(self.took)], "ms"),
                Figure("all hand-overs", [seconds], "s"),
                Figure("requests per hand-over, the release among them", [requests / many]),
                Figure("events delivered", [events]),
                Figure("memory, all waiting", [self.memory[0]], "MB"),
                Figure("memory, most", [max(self.memory)], "MB"),
            ],
            [
                Bar("grants after each release", Figure("", [len(self.took) / many]), 1),
                Bar(
                    f"server's memory through {many:,} hand-overs",
                    Figure("", [max(self.memory) / self.memory[0]]),
                    1.2,
                    is_ceiling=True,
                ),
            ],
            [f"{many:,} waiters, as many streams", "no event was missing on any stream"],
        )

    def granted(self, fencing_token: int) -> None:
        self.took.append((time.perf_counter() - self.released_at) * 1e3)
        self.history.append(fencing_token)
        if len(self.history) % 50 == 0:
            self.memory.append(self.server.memory())

    def left(self, waiter: "_Waiter") -> None:
        self.waiting.discard(waiter)
        if not self.waiting:
            self.over.set()


class _Waiter:
    def __init__(self, crowd: _Crowd, number: int) -> None:
        self.connection = Connection(crowd.server)
        self.failure: str | None = None
        self._crowd = crowd
        self._token = str(uuid.UUID(int=number))
        self._stream: EventReader | None = None
        self._seen = array("q")
        """Of each event the fencing token, negative where the key became free."""
        self._try: asyncio.Handle | None = None
        self._trying: asyncio.Task[None] | None = None
        self._again = False

    async def join(self) -> None:
        crowd = self._crowd
        self._stream = await EventReader.of(crowd.server, crowd.KEY, self._on_event, self._on_lost)
        if await _acquired(self.connection, self._crowd.KEY, self._token) is not None:
            raise RuntimeError("a lock that is held was granted")

    def check(self, history: "array[int]") -> int:
        """How many events there were.  Raises where one is missing among them."""
        expected = array("q", [-history[0]])
        for token in history[1:]:
            expected.extend((token, -token))
        if self._seen != expected[: len(self._seen)]:
            raise RuntimeError("a stream has not told all that happened, and has not said so")
        return len(self._seen)

    def _on_event(self, event: Event) -> None:
        if event.kind == "reset":
            self._end("a stream was reset")
            return
        is_free = event.kind in FREEING
        self._seen.append(-event.fencing_token if is_free else event.fencing_token)
        if self._try is not None:
            self._try.cancel()  # somebody was faster; or it is to be put off anew
        if is_free:
            spread = random.uniform(0, min((event.watchers - 1) * 0.002, 1))
            self._try = asyncio.get_running_loop().call_later(spread, self._begin)

    def _on_lost(self) -> None:
        self._end("a stream ended")

    def _begin(self) -> None:
        if self._trying is not None:
            self._again = True
        else:
            self._trying = asyncio.create_task(self._attempt())

    async def _attempt(self) -> None:
        try:
            crowd = self._crowd
            fencing_token = await _acquired(self.connection, crowd.KEY, self._token)
            if fencing_token is not None:
                crowd.granted(fencing_token)
                self._leave()
                crowd.released_at = time.perf_counter()
                await _release(self.connection, crowd.KEY, self._token)
                self._end(None)
            elif self._again:
                self._again = False
                self._try = asyncio.get_running_loop().call_soon(self._begin)
        except (OSError, RuntimeError, EOFError) as error:
            self._end(repr(error))
        finally:
            self._trying = None

    def _leave(self) -> None:
        if self._try is not None:
            self._try.cancel()
        if self._stream is not None:
            self._stream.close()

    def _end(self, failure: str | None) -> None:
        self.failure = failure
        self._leave()
        self.connection.close()
        self._crowd.left(self)


# ---------------------------------------------------------------- streams that nobody needs


def idle_streams(plan: Plan) -> Result:
    """Acquire and release, 64 connections, beside no stream and beside 500 that tell nothing."""
    with lock_server() as locks:

        def beside(many: int) -> Callable[[int], float]:
            def measured(number: int) -> float:
                with _idle(locks, many):
                    return wrk(locks, BOTH, f"{number}{many}", seconds=plan.seconds).per_second

            return measured

        found = plan.alternate({"without": beside(0), "with": beside(IDLE)})
    ratio = Figure("with / without", ratios(found["with"], found["without"]))
    return Result(
        [
            Figure("without streams", found["without"], "requests/s"),
            Figure(f"with {IDLE} idle streams", found["with"], "requests/s"),
        ],
        [Bar(f"acquire+release with {IDLE} idle streams over none", ratio, 0.95)],
    )


@contextlib.contextmanager
def _idle(server: Process, many: int) -> Iterator[None]:
    """Event streams of keys that nobody takes."""
    address = urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        for number in range(many):
            link = socket.create_connection((address.hostname, address.port), 10)
            stack.enter_context(link)
            link.sendall(streams.head(server, "GET", f"/lock-events?key=idle-{number}"))
            said = b""
            while b"\r\n:" not in said:  # the first comment
                part = link.recv(4096)
                if not part:
                    raise RuntimeError(f"a stream was answered {said!r}")
                said += part
        yield
