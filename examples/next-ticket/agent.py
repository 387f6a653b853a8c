"""An agent that waits for the next ticket instead of asking for it.

    python agent.py NAME BACKLOG_URL

Whoever writes a ticket holds its lock meanwhile, and so does whoever answers it.  So a released or
lapsed `ticket:…` says that there may be something to do.  SIGTERM ends it between two tickets.
"""

import random
import signal
import sys
import threading
import time

import httpx

from volcano_sdk import ConflictError, LockLostError, LockWatch, VolcanoClient

LOOK_AGAIN_SECONDS = 30.0  # an event is a hint, and may be missed


class Agent:
    def __init__(self, name: str, backlog: httpx.Client, volcano: VolcanoClient) -> None:
        self._name = name
        self._backlog = backlog
        self._volcano = volcano
        self._something_new = threading.Event()
        self._stopping = False
        signal.signal(signal.SIGTERM, lambda *_: self.stop())

    def stop(self) -> None:
        self._stopping = True
        self._something_new.set()

    def run(self) -> None:
        with self._volcano.locks.watch(prefix="ticket:") as events:
            listener = threading.Thread(target=self._listen, args=(events,))
            listener.start()
            while not self._stopping:
                self._something_new.clear()  # before the look: what happens after it wakes us
                if not any(self._answer(ticket) for ticket in self._open_tickets()):
                    self._something_new.wait(LOOK_AGAIN_SECONDS)
        listener.join()

    def _listen(self, events: LockWatch) -> None:
        for event in events:
            if event.type != "acquired":  # reset, too: we may have missed one
                self._something_new.set()

    def _answer(self, ticket: int) -> bool:
        """Whether it was ours to answer."""
        try:
            with self._volcano.locks.with_lock(f"ticket:{ticket}", ttl=5) as guard:
                if ticket not in self._open_tickets():
                    return False  # answered between our look and our grant
                print(f"{self._name} takes ticket {ticket}", flush=True)
                time.sleep(random.uniform(0.2, 0.4))  # stands for a model
                guard.check()
                note = {"fencing_token": guard.lease.fencing_token, "agent": self._name}
                answer = self._backlog.post(f"/tickets/{ticket}", json={**note, "answer": "Done."})
                return answer.status_code == httpx.codes.NO_CONTENT
        except (ConflictError, LockLostError):
            return False  # somebody else is at it

    def _open_tickets(self) -> list[int]:
        tickets: list[int] = self._backlog.get("/tickets").raise_for_status().json()
        return tickets


def main(name: str, backlog: str) -> None:
    with VolcanoClient() as volcano, httpx.Client(base_url=backlog, trust_env=False) as client:
        Agent(name, client, volcano).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
