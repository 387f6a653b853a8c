"""Writes a ticket under its own lock.

    python author.py BACKLOG_URL TICKET

Nobody can take a ticket that is half written, and when the lock is released, whoever watches hears
that there is a new one.
"""

import sys

import httpx

from volcano_sdk import VolcanoClient


def main(backlog: str, ticket: str) -> None:
    with VolcanoClient() as volcano, volcano.locks.with_lock(f"ticket:{ticket}", ttl=5):
        httpx.put(f"{backlog}/tickets/{ticket}", trust_env=False).raise_for_status()
        print(f"ticket {ticket} is there", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
