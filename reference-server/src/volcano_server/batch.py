"""The queue in front of a store: collect, apply, answer.

    submit(read)  --> reads waiting  --,
                                       |-- one round: the reads, then the oldest writes --> store
    submit(write) --> writes waiting --'

What arrives while a round runs is the next round, in its order of arrival.  So a read waits for the
commit that is running and for no other, and one commit serves all who came during the one before.

Nothing is decided later than `patience` after its arrival, because by then its caller has given up:
a request that still waits is taken out; a batch that runs belongs to whoever takes its claim first,
the timer (all of it is answered unavailable, and the store must not commit) or the store, right
before its commit (then its outcome is waited for).
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from volcano_server.lease import Answer, Command, Read, Write
from volcano_server.stores.store import Store, StoreUnavailableError

PATIENCE = 5.0
LARGEST_BATCH = 1_000
MOST_WAITING = 10_000

C = TypeVar("C", bound=Command)


@dataclass(slots=True, eq=False)
class _Request(Generic[C]):
    """`due`: the time of the loop at which its caller has waited long enough."""

    command: C
    due: float
    answer: asyncio.Future[Answer]

    def refuse(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(StoreUnavailableError(why))


class _Claim:
    """On the outcome of one batch; asked from the loop and from the store's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True for the first who asks."""
        return self._lock.acquire(blocking=False)


class BatchQueue:
    """Used from one event loop.  `patience` is in seconds."""

    def __init__(
        self,
        store: Store,
        *,
        patience: float = PATIENCE,
        largest_batch: int = LARGEST_BATCH,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._store = store
        self._patience = patience
        self._overdue = f"Not decided within {patience} s."
        self._largest_batch = largest_batch
        self._most_waiting = most_waiting
        self._reads: deque[_Request[Read]] = deque()
        self._writes: deque[_Request[Write]] = deque()
        self._rounds: asyncio.Task[None] | None = None  # None: nothing waits, nothing runs
        self._reading: Sequence[_Request[Read]] = ()  # what the store has at the moment
        self._writing: Sequence[_Request[Write]] = ()
        self._claim = _Claim()
        self._timer: asyncio.TimerHandle | None = None  # for the oldest request
        self._closed = False

    def submit(self, command: Command) -> Awaitable[Answer]:
        """The answer, once it is on disk.  Raises StoreUnavailableError, here or when awaited.

        The command of a caller who is cancelled meanwhile is applied or not, as it happens.
        """
        if self._closed:
            raise StoreUnavailableError("The server is stopping.")
        if len(self._reads) + len(self._writes) >= self._most_waiting:
            raise StoreUnavailableError(f"{self._most_waiting} requests are waiting already.")
        loop = asyncio.get_running_loop()
        due = loop.time() + self._patience
        answer: asyncio.Future[Answer] = loop.create_future()
        if isinstance(command, Read):
            self._reads.append(_Request(command, due, answer))
        else:
            self._writes.append(_Request(command, due, answer))
        if self._rounds is None:
            self._rounds = loop.create_task(self._run())
        if self._timer is None:
            self._timer = loop.call_at(due, self._give_up)
        return answer

    async def close(self) -> None:
        """Refuse what comes, finish what was accepted."""
        self._closed = True
        if self._rounds is not None:
            await asyncio.wait([self._rounds])
        if self._timer is not None:
            self._timer.cancel()

    async def _run(self) -> None:
        """Rounds, until nothing waits."""
        while self._reads or self._writes:
            # Where the loop was stuck, its timers have their turn only after this.
            self._refuse_waiting(asyncio.get_running_loop().time())
            self._reading = _take(self._reads, len(self._reads))
            self._writing = _take(self._writes, self._largest_batch)
            self._claim = claim = _Claim()
            jobs = []
            if self._reading:
                job = self._store.read([request.command for request in self._reading])
                jobs.append(asyncio.ensure_future(_answer(self._reading, job)))
            if self._writing:
                job = self._store.apply([request.command for request in self._writing], claim.take)
                jobs.append(asyncio.ensure_future(_answer(self._writing, job)))
            if jobs:
                await asyncio.wait(jobs)
        self._reading, self._writing = (), ()
        self._rounds = None

    def _give_up(self) -> None:
        """Refuse all whose time is over; set the timer for the oldest of the others."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._refuse_waiting(now)
        for read in self._reading:
            if read.due <= now:
                read.refuse(self._overdue)
        if self._writing and self._writing[0].due <= now and self._claim.take():
            for write in self._writing:
                write.refuse(self._overdue)
        dues = [
            request.due
            for requests in (self._reads, self._writes, self._reading, self._writing)
            for request in requests
            if request.due > now
        ]
        self._timer = loop.call_at(min(dues), self._give_up) if dues else None

    def _refuse_waiting(self, now: float) -> None:
        for waiting in (self._reads, self._writes):
            while waiting and waiting[0].due <= now:
                waiting.popleft().refuse(self._overdue)


def _take(waiting: deque[_Request[C]], most: int) -> Sequence[_Request[C]]:
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


async def _answer(requests: Sequence[_Request[C]], job: Awaitable[list[Answer]]) -> None:
    try:
        answers = await job
        for request, answer in zip(requests, answers, strict=True):
            if not request.answer.done():  # given up, or its caller is gone
                request.answer.set_result(answer)
    except StoreUnavailableError as error:
        for request in requests:
            request.refuse(str(error))
    except Exception as error:  # noqa: BLE001 - a fault of ours must leave nobody waiting for ever
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(error)
