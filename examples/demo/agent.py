"""One agent: takes the next ticket that it can get, answers it, goes on until none is open.

    python agent.py NAME BACKLOG --role steady|crashing|stalling

Tells what it does as one JSON object a line on stdout.  A crashing or stalling agent waits in the
middle of its first ticket for what the demo does to it; when it goes on after a stall, it writes
without looking at its guard, as code does that was paused between its look and its write.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

from backlog import Backlog

from volcano_sdk import ConflictError, LockGuard, LockLostError, RateLimitedError, VolcanoClient

TTL = 5
POLL_SECONDS = 1.0
WORK_SECONDS = (0.3, 1.2)


class Agent:
    def __init__(self, name: str, role: str, backlog: Backlog, client: VolcanoClient) -> None:
        self._name = name
        self._role = role
        self._backlog = backlog
        self._client = client

    def run(self) -> None:
        """Until no ticket is open."""
        while tickets := self._backlog.open_tickets():
            random.shuffle(tickets)
            if not any(self._take(ticket) for ticket in tickets[:3]):
                # All of those are held: leave the others some of the project's quota.
                time.sleep(POLL_SECONDS * random.uniform(0.6, 0.9))

    def _take(self, ticket: int) -> bool:
        """Whether the ticket was ours for a while."""
        try:
            with self._client.locks.with_lock(f"ticket:{ticket}", ttl=TTL) as guard:
                self._tell("granted", ticket, guard)
                self._answer(ticket, guard)
                self._tell("released", ticket, guard)
        except ConflictError:
            return False  # somebody else has it: on to the next
        except RateLimitedError as error:
            time.sleep(error.retry_after or POLL_SECONDS)
            return False
        except LockLostError:
            print(json.dumps({"event": "lost", "agent": self._name, "ticket": ticket}), flush=True)
        return True

    def _answer(self, ticket: int, guard: LockGuard) -> None:
        token = guard.lease.fencing_token
        if ticket not in self._backlog.open_tickets():
            return  # answered between our look at the backlog and our grant
        self._backlog.mark(ticket, fencing_token=token)
        looks = self._role == "steady"
        self._work(random.uniform(*WORK_SECONDS) if looks else TTL * 0.6, guard if looks else None)
        written = self._backlog.answer(ticket, fencing_token=token, agent=self._name)
        self._tell("answered" if written else "refused", ticket, guard)
        self._role = "steady"

    def _work(self, seconds: float, guard: LockGuard | None) -> None:
        """Stands for the model call that writes the answer; stops early when the lock is lost."""
        if guard is None:
            time.sleep(seconds)
        elif guard.wait_lost(timeout=seconds):
            guard.check()

    def _tell(self, event: str, ticket: int, guard: LockGuard) -> None:
        now = time.monotonic()
        expires_at = now + guard.lease.expires_at.timestamp() - time.time()
        report = {
            "event": event,
            "agent": self._name,
            "ticket": ticket,
            "fencing_token": guard.lease.fencing_token,
            "at": now,
            "expires_at": expires_at,
        }
        print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="One agent of the demo.")
    parser.add_argument("name")
    parser.add_argument("backlog", type=Path)
    parser.add_argument("--role", choices=["steady", "crashing", "stalling"], default="steady")
    options = parser.parse_args()
    with VolcanoClient() as client:  # VOLCANO_API_URL and VOLCANO_SERVICE_KEY
        Agent(options.name, options.role, Backlog(options.backlog), client).run()


if __name__ == "__main__":
    sys.exit(main())
