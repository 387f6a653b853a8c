"""What the Python SDK adds to HTTP: the CPU of an acquire and a release, over bare httpx that sends
the same two requests and reads their answers.  Side by side in one process, A B C A B C; medians.

    python benchmarks/cost_per_call_python.py [--rounds 60] [--pairs 50]

The server is a process of its own that gives constant answers.  Prints one line of JSON; exits 1
when acquire and release cost more than 1.25 times the bare requests.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from volcano_sdk import AsyncVolcanoClient, VolcanoClient

BAR = 1.25
GRANT = b'{"expires_at":"2026-11-29T12:00:00.000Z","fencing_token":1795953600000000}'
GRANTED = (
    b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\nx-volcano-expires-in: 30.000\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(GRANT), GRANT)
)
RELEASED = b"HTTP/1.1 204 No Content\r\n\r\n"
HEADERS = {
    "Authorization": "Bearer sk-bench",
    "Content-Type": "application/json",
    "X-Volcano-Lock-Token": "0b0f3f7e-8c1c-4e9c-9c53-0d4c2f6b3a11",
    "X-Volcano-Request-Id": "7c1de0a6-54f3-4f5e-9c3e-0d8b0f6f9d01",
}
BODY = b'{"ttl_seconds":30}'


async def serve() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST"):
                    await reader.readexactly(len(BODY))
                writer.write(GRANTED if head.startswith(b"POST") else RELEASED)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def sync_ways(url: str) -> dict[str, Callable[[], object]]:
    bare = httpx.Client(trust_env=False)
    locks = VolcanoClient(api_url=url, service_key="sk-bench", trust_env=False).locks

    def by_hand() -> None:
        answer = bare.post(f"{url}/locks/key/lease", headers=HEADERS, content=BODY)
        json.loads(answer.content)
        bare.delete(f"{url}/locks/key/lease", headers=HEADERS)

    def acquire_release() -> None:
        locks.release("key", locks.acquire("key", ttl=30))

    def with_lock() -> None:
        with locks.with_lock("key", ttl=30):
            pass

    return {"bare": by_hand, "acquire_release": acquire_release, "with_lock": with_lock}


async def async_ways(url: str) -> dict[str, Callable[[], Awaitable[object]]]:
    bare = httpx.AsyncClient(trust_env=False)
    client = AsyncVolcanoClient(api_url=url, service_key="sk-bench", trust_env=False)
    locks = (await client.__aenter__()).locks

    async def by_hand() -> None:
        answer = await bare.post(f"{url}/locks/key/lease", headers=HEADERS, content=BODY)
        json.loads(answer.content)
        await bare.delete(f"{url}/locks/key/lease", headers=HEADERS)

    async def acquire_release() -> None:
        await locks.release("key", await locks.acquire("key", ttl=30))

    async def with_lock() -> None:
        async with locks.with_lock("key", ttl=30):
            pass

    return {"bare": by_hand, "acquire_release": acquire_release, "with_lock": with_lock}


def measure_sync(url: str, rounds: int, pairs: int) -> dict[str, float]:
    ways = sync_ways(url)
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            for _ in range(pairs):
                way()
            costs[name].append(time.process_time() - began)
    return microseconds(costs, pairs)


async def measure_async(url: str, rounds: int, pairs: int) -> dict[str, float]:
    ways = await async_ways(url)
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            for _ in range(pairs):
                await way()
            costs[name].append(time.process_time() - began)
    return microseconds(costs, pairs)


def microseconds(costs: dict[str, list[float]], pairs: int) -> dict[str, float]:
    """A pair's median cost, the first rounds left out, and how it compares."""
    medians = {name: statistics.median(all_[2:]) / pairs * 1e6 for name, all_ in costs.items()}
    over = {f"{name}_over_bare": medians[name] / medians["bare"] for name in medians}
    del over["bare_over_bare"]
    return {name: round(value, 3) for name, value in {**medians, **over}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        asyncio.run(serve())
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        result: dict[str, Any] = {
            "sync": measure_sync(url, chosen.rounds, chosen.pairs),
            "async": asyncio.run(measure_async(url, chosen.rounds, chosen.pairs)),
        }
    finally:
        server.terminate()
        server.wait(10)
    print(json.dumps(result))
    sys.exit(any(each["acquire_release_over_bare"] > BAR for each in result.values()))


if __name__ == "__main__":
    main()
