"""Many locks held at once by one sync client against a real, durable server: is one lost?

    python benchmarks/held_locks_sync.py [--locks 1000] [--ttl 30] [--seconds 120]

Prints lines of JSON and exits 1 when a lock was lost, was renewed less often than it must have
been, or was not released, or when the process had over eight threads more than before.
"""

import argparse
import contextlib
import json
import sys
import threading
import time
from typing import Any

from held_locks_async import running_server

from volcano_sdk import LockGuard, LockLostError, VolcanoClient

MOST_THREADS_MORE = 8


def hold(locks: int, ttl: int, seconds: float) -> dict[str, Any]:
    """Take them in one thread, hold them all for that long, release them."""
    threads_before = threading.active_count()
    most_threads = threads_before
    renewals: dict[str, int] = {}  # {key: how often its expiry moved}
    with (
        running_server() as server,
        VolcanoClient(api_url=server["url"], service_key=server["service_key"]) as client,
    ):
        began = time.monotonic()
        with contextlib.ExitStack() as held:
            guards: list[LockGuard] = []
            for number in range(locks):
                lock = client.locks.with_lock(f"lock-{number}", ttl=ttl)
                guards.append(held.enter_context(lock))
            taken = time.monotonic()
            busy = time.process_time()
            seen = {guard.lease.key: guard.lease.expires_at for guard in guards}
            renewals = dict.fromkeys(seen, 0)
            while time.monotonic() - taken < seconds:
                time.sleep(min(1.0, ttl / 30))  # watching must not miss a renewal, nor cost much
                most_threads = max(most_threads, threading.active_count())
                for guard in guards:
                    lease = guard.lease
                    renewals[lease.key] += lease.expires_at != seen[lease.key]
                    seen[lease.key] = lease.expires_at
            busy = time.process_time() - busy
            lost = [why for guard in guards if (why := loss(guard)) is not None]
            released = time.monotonic()
            with contextlib.suppress(Exception):  # a lost lock says so: it is counted above
                held.close()
        ended = time.monotonic()
        not_released = sum(client.locks.get(f"lock-{number}").held for number in range(locks))
    until = time.monotonic() + 10
    while threading.active_count() > threads_before and time.monotonic() < until:
        time.sleep(0.1)
    return {
        "locks": locks,
        "ttl": ttl,
        "held_for_s": seconds,
        "lost": len(lost),
        "first_losses": lost[:3],
        "renewals": sum(renewals.values()),
        "fewest_renewals_of_a_lock": min(renewals.values()),
        "not_released": not_released,
        "most_threads_more": most_threads - threads_before,
        "threads_more_afterwards": threading.active_count() - threads_before,
        "acquired_in_s": round(taken - began, 2),
        "released_in_s": round(ended - released, 2),
        "cpu_of_the_client": round(busy / seconds, 3),
    }


def loss(guard: LockGuard) -> str | None:
    """Why the lock was lost, if it was."""
    try:
        guard.check()
    except LockLostError as error:
        return f"{error}: {error.__cause__}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locks", type=int, default=1000)
    parser.add_argument("--ttl", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=120)
    chosen = parser.parse_args()
    result = hold(chosen.locks, chosen.ttl, chosen.seconds)
    print(json.dumps(result, indent=2))
    fewest = int(chosen.seconds / (chosen.ttl * 0.4)) - 1
    is_good = (
        not result["lost"]
        and not result["not_released"]
        and result["fewest_renewals_of_a_lock"] >= fewest
        and result["most_threads_more"] <= MOST_THREADS_MORE
        and result["threads_more_afterwards"] == 0
    )
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
