"""The queue in front of a store: collect, apply, answer.

    submit(read)  --> reads waiting  --,
                                       |-- one round: the reads, then the oldest writes --> store
    submit(write) --> writes waiting --'

What arrives while a round runs is the next round, in its order of arrival, but for who asks for a
key that the same batch releases: behind the release it gets what it would be refused before.
So a read waits for the commit that is running and for no other, and one commit serves all who came
during the one before.
A round begins once the answers of the last one are out, because more will have come by then: fewer
and larger rounds gain more than a store that works meanwhile.

Nothing is decided later than `patience` after its arrival, because by then its caller has given up:
a request that still waits is taken out; a batch that runs belongs to whoever takes its claim first,
the timer (all of it is answered unavailable, and the store must not commit) or the store, right
before its commit (then its outcome is waited for).
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from volcano_server.lease import Acquire, Answer, Command, Read, Release, Renew, SlotKey, Write
from volcano_server.stores.store import Store, StoreUnavailableError

PATIENCE = 5.0
LARGEST_BATCH = 1_000
MOST_WAITING = 10_000

C = TypeVar("C", bound=Command)


class Receiver(Protocol):
    """Takes the answer to one command: a future, or what does with less.

    It is called while others wait for theirs: what it raises goes to the loop's exception handler.
    """

    def done(self) -> bool: ...

    def set_result(self, answer: Answer, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


class _Answers:
    """Takes the answers to commands that share a batch; they come in order.

    A future for each, and a callback on each, would cost more than to decide it.
    """

    __slots__ = ("_answers", "_wanted", "future")

    def __init__(self, wanted: int, future: asyncio.Future[list[Answer]]) -> None:
        self.future = future
        self._wanted = wanted
        self._answers: list[Answer] = []

    def done(self) -> bool:
        return self.future.done()

    def set_result(self, answer: Answer) -> None:
        self._answers.append(answer)
        if len(self._answers) == self._wanted:
            self.future.set_result(self._answers)

    def set_exception(self, error: Exception) -> None:
        self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Request(Generic[C]):
    """`due`: the time of the loop at which its caller has waited long enough.

    `follows`: it shares the batch of the one before it.
    """

    command: C
    due: float
    answer: Receiver
    follows: bool = False

    def succeed(self, answer: Answer) -> None:
        if not self.answer.done():  # given up, or its caller is gone
            try:
                self.answer.set_result(answer)
            except Exception as fault:  # noqa: BLE001 - the others must get theirs
                _report(fault)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            try:
                self.answer.set_exception(error)
            except Exception as fault:  # noqa: BLE001 - as above
                _report(fault)

    def refuse(self, why: str) -> None:
        self.fail(StoreUnavailableError(why))


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
        self.on_written: Callable[[Sequence[Write], Sequence[Answer]], None] | None = None
        """Hears of each batch that is on disk, in their order, before its answers go out."""
        self._store = store
        self._patience = patience
        self._overdue = f"Not decided within {patience} s."
        self._largest_batch = largest_batch
        self._most_waiting = most_waiting
        self._reads: deque[_Request[Read]] = deque()
        self._writes: deque[_Request[Write]] = deque()
        self._jobs: set[asyncio.Task[None]] = set()  # of this round, with the store
        self._beginning: asyncio.Handle | None = (
            None  # a round that begins in this turn of the loop
        )
        self._reading: Sequence[_Request[Read]] = ()  # what the store has at the moment
        self._writing: Sequence[_Request[Write]] = ()
        self._claim = _Claim()
        self._timer: asyncio.TimerHandle | None = None  # for the oldest request
        self._closed = False

    def submit(self, command: Command) -> Awaitable[Answer]:
        """The answer, once it is on disk.  Raises StoreUnavailableError, here or when awaited.

        The command of a caller who is cancelled meanwhile is applied or not, as it happens.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.submit_for(answer, command)
        return answer

    def submit_for(self, receiver: Receiver, command: Command) -> None:
        """The same with the answer, or StoreUnavailableError, for a receiver.

        Raises StoreUnavailableError; then it is for the caller to tell.
        """
        self._make_sure_of_room(1)
        due = asyncio.get_running_loop().time() + self._patience
        if isinstance(command, Read):
            self._reads.append(_Request(command, due, receiver))
        else:
            self._writes.append(_Request(command, due, receiver))
        self._see_to_it(due)

    def submit_all(self, commands: Sequence[Write]) -> Awaitable[list[Answer]]:
        """The answers to commands that are decided in their order and in one batch.

        All of them or none is acknowledged.  Raises StoreUnavailableError as `submit` does.
        """
        self._make_sure_of_room(len(commands))
        loop = asyncio.get_running_loop()
        due = loop.time() + self._patience
        answers = _Answers(len(commands), loop.create_future())
        requests = [_Request(each, due, answers, follows=True) for each in commands]
        requests[0].follows = False
        self._writes.extend(requests)
        self._see_to_it(due)
        return answers.future

    def _make_sure_of_room(self, newcomers: int) -> None:
        if self._closed:
            raise StoreUnavailableError("The server is stopping.")
        if len(self._reads) + len(self._writes) + newcomers > self._most_waiting:
            raise StoreUnavailableError(f"{self._most_waiting} requests are waiting already.")

    def _see_to_it(self, due: float) -> None:
        """After something came: a round will begin, and the timer runs."""
        if not self._jobs:
            self._begin_soon()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(due, self._give_up)

    async def close(self) -> None:
        """Refuse what comes, finish what was accepted."""
        self._closed = True
        if self._beginning is not None:
            self._begin()
        while self._jobs:
            await asyncio.wait(self._jobs)
        if self._timer is not None:
            self._timer.cancel()

    def _begin_soon(self) -> None:
        """What else arrives in this turn of the loop shares the round."""
        if self._beginning is None:
            self._beginning = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """One round, if anything waits."""
        if self._beginning is not None:
            self._beginning.cancel()
            self._beginning = None
        # Where the loop was stuck, its timers have their turn only after this.
        self._refuse_waiting(asyncio.get_running_loop().time())
        self._reading = _take(self._reads, len(self._reads))
        self._writing = _acquires_behind_releases(_take(self._writes, self._largest_batch))
        if self._reading:
            job = self._store.read([request.command for request in self._reading])
            self._hand_over(self._reading, job)
        if self._writing:
            self._claim = claim = _Claim()
            commands = [request.command for request in self._writing]
            job = self._store.apply(commands, claim.take)
            self._hand_over(self._writing, job, commands)

    def _hand_over(
        self,
        requests: Sequence[_Request[C]],
        job: Awaitable[list[Answer]],
        writes: Sequence[Write] = (),
    ) -> None:
        self._jobs.add(asyncio.get_running_loop().create_task(self._do(requests, job, writes)))

    async def _do(
        self, requests: Sequence[_Request[C]], job: Awaitable[list[Answer]], writes: Sequence[Write]
    ) -> None:
        outcome: Sequence[Answer] | Exception
        try:
            outcome = await job
            if len(outcome) != len(requests):
                outcome = RuntimeError(f"{len(outcome)} answers for {len(requests)} commands")
        except Exception as error:  # noqa: BLE001 - a fault of ours must leave nobody waiting for ever
            outcome = error
        task = asyncio.current_task()
        assert task is not None
        self._jobs.discard(task)
        if writes and self.on_written is not None and not isinstance(outcome, Exception):
            self.on_written(writes, outcome)
        _answer(requests, outcome)
        if not self._jobs:
            self._begin_soon()

    def _give_up(self) -> None:
        """Refuse all whose time is over; set the timer for the oldest of the others."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._refuse_waiting(now)
        for read in self._reading:
            if read.due <= now:
                read.refuse(self._overdue)
        if any(write.due <= now for write in self._writing) and self._claim.take():
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
    """The oldest `most`, and the rest of what the last of them belongs to."""
    taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
    while waiting and waiting[0].follows:
        taken.append(waiting.popleft())
    return taken


def _acquires_behind_releases(writes: Sequence[_Request[Write]]) -> Sequence[_Request[Write]]:
    """None has been answered yet, so any order of theirs is right.

    An acquire whose token is used otherwise too keeps its place: its caller may be giving it back.
    """
    commands = [each.command for each in writes]
    last = {
        each.slot_key: place for place, each in enumerate(commands) if isinstance(each, Release)
    }
    if not last:
        return writes
    own = {each.token for each in commands if isinstance(each, (Renew, Release))}
    ordered: list[_Request[Write]] = []
    waiting: dict[SlotKey, list[_Request[Write]]] = {}
    for place, (each, command) in enumerate(zip(writes, commands, strict=True)):
        release = last.get(command.slot_key, -1)
        if place < release and isinstance(command, Acquire) and command.token not in own:
            waiting.setdefault(command.slot_key, []).append(each)
        else:
            ordered.append(each)
        if place == release:
            ordered += waiting.pop(command.slot_key, ())
    return ordered


def _answer(requests: Sequence[_Request[C]], outcome: Sequence[Answer] | Exception) -> None:
    if isinstance(outcome, StoreUnavailableError):
        for request in requests:
            request.refuse(str(outcome))
    elif isinstance(outcome, Exception):
        for request in requests:
            request.fail(outcome)
    else:
        for request, answer in zip(requests, outcome, strict=True):
            request.succeed(answer)


def _report(fault: Exception) -> None:
    context = {"message": "An answer could not be told.", "exception": fault}
    asyncio.get_running_loop().call_exception_handler(context)
