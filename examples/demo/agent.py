"""One agent: takes the next ticket that it can get, answers it, goes on until none is open.

    python agent.py NAME DESK ROLE      DESK: the URL of desk.py; ROLE: steady, crashing, stalling

Tells what it does as one JSON object a line on stdout; begins when its stdin ends.  A crashing or
stalling agent waits in the middle of its first ticket for what the demo does to it; when it goes on
after a stall, it writes without looking at its guard, as code does that was paused between its look
and its write.  agent.mjs and agent.rb are the same on the other SDKs.
"""

import json
import queue
import random
import sys
import threading
import time
from typing import cast

import httpx

from volcano_sdk import (
    ConflictError,
    LockGuard,
    LockLostError,
    LockWatch,
    RateLimitedError,
    VolcanoClient,
)

TTL = 5
WORK_SECONDS = (0.3, 1.2)
LOOK_AGAIN_SECONDS = 10.0  # an event is a hint, and may be missed


class Agent:
    def __init__(self, name: str, role: str, desk: httpx.Client, volcano: VolcanoClient) -> None:
        self._name = name
        self._role = role
        self._desk = desk
        self._volcano = volcano
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Until no ticket is open."""
        with self._volcano.locks.watch(prefix="ticket:") as events:
            threading.Thread(target=self._listen, args=(events,), daemon=True).start()
            ticket = None
            while tickets := self._open_tickets():
                if ticket is None:
                    for each in random.sample(tickets, len(tickets)):
                        self._free.put(each)
                elif ticket in tickets:
                    self._take(ticket)
                ticket = self._next()

    def _listen(self, events: LockWatch) -> None:
        """While all tickets are held nobody asks: whoever lets go of one is heard by all."""
        for event in events:
            if event.type == "reset":
                self._free.put(None)
            elif event.type != "acquired":
                self._free.put(int(str(event.key).removeprefix("ticket:")))

    def _next(self) -> int | None:
        """A ticket that was free a moment ago.  None: look at all of them."""
        try:
            return self._free.get(timeout=LOOK_AGAIN_SECONDS)
        except queue.Empty:
            return None

    def _take(self, ticket: int) -> None:
        try:
            with self._volcano.locks.with_lock(f"ticket:{ticket}", ttl=TTL) as guard:
                self._tell("granted", ticket, guard)
                self._answer(ticket, guard)
                self._tell("released", ticket, guard)
        except ConflictError:
            pass  # somebody else has it: on to the next
        except RateLimitedError as error:
            time.sleep(error.retry_after or 1)
            self._free.put(ticket)
        except LockLostError:
            print(json.dumps({"event": "lost", "agent": self._name, "ticket": ticket}), flush=True)

    def _answer(self, ticket: int, guard: LockGuard) -> None:
        if ticket not in self._open_tickets():
            return  # answered between our look at the desk and our grant
        self._write(ticket, guard)
        self._tell("working", ticket, guard)
        role, self._role = self._role, "steady"
        if role == "steady":
            # Stands for the model call that writes the answer; stops early when the lock is lost.
            guard.wait_lost(timeout=random.uniform(*WORK_SECONDS))
            guard.check()
        else:
            time.sleep(TTL * 0.6)
        written = self._write(ticket, guard, answer="Try it off and on.")
        self._tell("answered" if written else "refused", ticket, guard)

    def _open_tickets(self) -> list[int]:
        return cast("list[int]", self._desk.get("/tickets").raise_for_status().json())

    def _write(self, ticket: int, guard: LockGuard, *, answer: str | None = None) -> bool:
        """Under our fencing token: without an answer it only keeps older holders from writing."""
        note = {"fencing_token": guard.lease.fencing_token, "agent": self._name, "answer": answer}
        answered = self._desk.post(f"/tickets/{ticket}", json=note)
        if answered.status_code == httpx.codes.CONFLICT:
            return False
        answered.raise_for_status()
        return True

    def _tell(self, event: str, ticket: int, guard: LockGuard) -> None:
        report = {
            "event": event,
            "agent": self._name,
            "ticket": ticket,
            "fencing_token": guard.lease.fencing_token,
            "at": now(),
            "expires_at": now() + guard.lease.expires_at.timestamp() - time.time(),
        }
        print(json.dumps(report), flush=True)


def now() -> float:
    """Seconds of the clock that all processes of this machine share, in every language."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def main(name: str, desk: str, role: str) -> None:
    with VolcanoClient() as volcano, httpx.Client(base_url=desk, trust_env=False) as client:
        print(json.dumps({"event": "ready", "agent": name}), flush=True)
        sys.stdin.read()
        Agent(name, role, client, volcano).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
