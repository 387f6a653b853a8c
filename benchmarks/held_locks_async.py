"""Many locks held at once by one async client against a real, durable server: is one lost?

    python benchmarks/held_locks_async.py [--locks 2000] [--ttl 30] [--seconds 120] [--backend trio]

Prints one line of JSON and exits 1 when a lock was lost, was renewed less often than it must have
been, or was not released.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import anyio

from volcano_sdk import AsyncLockGuard, AsyncVolcanoClient, LockLostError


@contextlib.contextmanager
def running_server() -> Iterator[dict[str, Any]]:
    """`volcano-server dev` on a file of its own; yields its ready line."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "volcano_server", "dev", "--json", "--port", "0"]
        command += ["--quota", "0", "--store", f"sqlite:///{directory}/locks.db"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()
            server.wait(20)


AT_ONCE = 50
"""Acquires under way at a time: the client grants a place within its timeout to 100 of them."""


async def hold(locks: int, ttl: int, seconds: float) -> dict[str, Any]:
    """Take them, hold them all for that long, release them."""
    lost: list[str] = []
    guards: list[AsyncLockGuard] = []
    all_held, over = anyio.Event(), anyio.Event()
    places = anyio.Semaphore(AT_ONCE)
    with running_server() as server:
        async with AsyncVolcanoClient(
            api_url=server["url"], service_key=server["service_key"]
        ) as client:

            async def hold_one(key: str) -> None:
                try:
                    async with client.locks.with_lock(key, ttl=ttl) as guard:
                        guards.append(guard)
                        places.release()
                        if len(guards) == locks:
                            all_held.set()
                        await over.wait()
                except LockLostError as error:
                    lost.append(f"{key}: {error}: {error.__cause__}")

            async def watch() -> dict[str, int]:
                """How often the expiry of each moved."""
                seen = {guard.lease.key: guard.lease.expires_at for guard in guards}
                renewals = dict.fromkeys(seen, 0)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    await anyio.sleep(ttl / 10)  # must not miss a renewal, nor cost much
                    for guard in guards:
                        lease = guard.lease
                        renewals[lease.key] += lease.expires_at != seen[lease.key]
                        seen[lease.key] = lease.expires_at
                return renewals

            began = time.monotonic()
            async with anyio.create_task_group() as tasks:
                for number in range(locks):
                    await places.acquire()
                    tasks.start_soon(hold_one, f"lock-{number}")
                await all_held.wait()
                taken = time.monotonic()
                busy = time.process_time()
                renewals = await watch()
                busy = time.process_time() - busy
                released = time.monotonic()
                over.set()
            ended = time.monotonic()
            still_held = 0
            for number in range(locks):
                still_held += (await client.locks.get(f"lock-{number}")).held
    return {
        "locks": locks,
        "ttl": ttl,
        "held_for_s": seconds,
        "lost": len(lost),
        "first_losses": lost[:3],
        "renewals": sum(renewals.values()),
        "fewest_renewals_of_a_lock": min(renewals.values()),
        "not_released": still_held,
        "acquired_in_s": round(taken - began, 2),
        "released_in_s": round(ended - released, 2),
        "cpu_of_the_client": round(busy / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locks", type=int, default=2000)
    parser.add_argument("--ttl", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    chosen = parser.parse_args()
    result = anyio.run(hold, chosen.locks, chosen.ttl, chosen.seconds, backend=chosen.backend)
    print(json.dumps(result, indent=2))
    fewest = int(chosen.seconds / (chosen.ttl * 0.4)) - 1
    is_good = not result["lost"] and not result["not_released"]
    sys.exit(0 if is_good and result["fewest_renewals_of_a_lock"] >= fewest else 1)


if __name__ == "__main__":
    main()
