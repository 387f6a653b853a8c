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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from volcano_server.lease import (
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Read,
    Release,
    Renew,
    SlotKey,
    Write,
)
from volcano_server.stores.store import Store, StoreUnavailableError

PATIENCE = 5.0
LARGEST_BATCH = 1_000
MOST_WAITING = 10_000

C = TypeVar("C", bound=Command)


class Receiver(Protocol):
    """Takes the answers to what was submitted, one a command: a future, or what does with less.

    It is called while others wait for theirs: what it raises goes to the loop's exception handler.
    """

    def done(self) -> bool: ...

    def set_result(self, answers: Sequence[Answer], /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


class _Single:
    """Takes the answer to a command that came alone."""

    __slots__ = ("_future", "done", "set_exception")

    def __init__(self, future: asyncio.Future[Answer]) -> None:
        self._future = future
        self.done = future.done
        self.set_exception = future.set_exception

    def set_result(self, answers: Sequence[Answer]) -> None:
        self._future.set_result(answers[0])


@dataclass(slots=True, eq=False)
class _Request(Generic[C]):
    """Commands that are decided in their order and in one batch.

    `due`: the time of the loop at which their caller has waited long enough.
    """

    commands: Sequence[C]
    due: float
    receiver: Receiver

    def succeed(self, answers: Sequence[Answer]) -> None:
        if not self.receiver.done():  # given up, or its caller is gone
            try:
                self.receiver.set_result(answers)
            except Exception as fault:  # noqa: BLE001 - the others must get theirs
                _report(fault)

    def fail(self, error: Exception) -> None:
        if not self.receiver.done():
            try:
                self.receiver.set_exception(error)
            except Exception as fault:  # noqa: BLE001 - as above
                _report(fault)

    def refuse(self, why: str) -> None:
        self.fail(StoreUnavailableError(why))


class _Line(Generic[C]):
    """Requests in the order of their arrival.  Its length is that of their commands."""

    def __init__(self) -> None:
        self._requests: deque[_Request[C]] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_Request[C]]:
        return iter(self._requests)

    def join(self, request: _Request[C]) -> None:
        self._requests.append(request)
        self._length += len(request.commands)

    def take(self, most: int) -> Sequence[_Request[C]]:
        """The oldest, and no more once there are `most` commands."""
        taken: list[_Request[C]] = []
        left = max(self._length - most, 0)
        while self._length > left:
            taken.append(self._leave())
        return taken

    def take_overdue(self, now: float) -> Iterator[_Request[C]]:
        while self._requests and self._requests[0].due <= now:
            yield self._leave()

    def _leave(self) -> _Request[C]:
        request = self._requests.popleft()
        self._length -= len(request.commands)
        return request


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
        self._reads: _Line[Read] = _Line()
        self._writes: _Line[Write] = _Line()
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
        self.submit_for(_Single(answer), command)
        return answer

    def submit_for(self, receiver: Receiver, command: Command) -> None:
        """The same with the answer, or StoreUnavailableError, for a receiver.

        Raises StoreUnavailableError; then it is for the caller to tell.
        """
        self._make_sure_of_room(1)
        due = asyncio.get_running_loop().time() + self._patience
        if isinstance(command, Read):
            self._reads.join(_Request((command,), due, receiver))
        else:
            self._writes.join(_Request((command,), due, receiver))
        self._see_to_it(due)

    def submit_all(self, commands: Sequence[Write]) -> Awaitable[Sequence[Answer]]:
        """The answers to commands that are decided in their order and in one batch.

        All of them or none is acknowledged.  Raises StoreUnavailableError as `submit` does.
        """
        self._make_sure_of_room(len(commands))
        loop = asyncio.get_running_loop()
        due = loop.time() + self._patience
        answers: asyncio.Future[Sequence[Answer]] = loop.create_future()
        self._writes.join(_Request(commands, due, answers))
        self._see_to_it(due)
        return answers

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
        self._reading = self._reads.take(len(self._reads))
        self._writing = _acquires_behind_releases(self._writes.take(self._largest_batch))
        if self._reading:
            job = self._store.read(_commands(self._reading))
            self._hand_over(self._reading, job)
        if self._writing:
            self._claim = claim = _Claim()
            commands = _commands(self._writing)
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
            wanted = sum(len(request.commands) for request in requests)
            if len(outcome) != wanted:
                outcome = RuntimeError(f"{len(outcome)} answers for {wanted} commands")
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
        for line in (self._reads, self._writes):
            for request in line.take_overdue(now):
                request.refuse(self._overdue)


def _commands(requests: Iterable[_Request[C]]) -> list[C]:
    return [command for request in requests for command in request.commands]


def _acquires_behind_releases(writes: Sequence[_Request[Write]]) -> Sequence[_Request[Write]]:
    """None has been answered yet, so any order of theirs is right."""
    asked: set[SlotKey] = set()
    for request in writes:
        for command in request.commands:
            if isinstance(command, Acquire):
                asked.add(command.slot_key)
            elif isinstance(command, Release) and command.slot_key in asked:
                return _reordered(writes)
    return writes


def _reordered(writes: Sequence[_Request[Write]]) -> Sequence[_Request[Write]]:
    """One whose token is used otherwise too keeps its place: its caller may be giving it back.

    So do all acquires of such a key, or of one that is force released: none overtakes another.
    """
    last = {
        command.slot_key: place
        for place, request in enumerate(writes)
        for command in request.commands
        if isinstance(command, Release)
    }
    commands = _commands(writes)
    own = {each.token for each in commands if isinstance(each, (Renew, Release))}
    for each in commands:
        if isinstance(each, ForceRelease) or (isinstance(each, Acquire) and each.token in own):
            last.pop(each.slot_key, None)
    ordered: list[_Request[Write]] = []
    waiting: dict[SlotKey, list[_Request[Write]]] = {}
    for place, request in enumerate(writes):
        match request.commands:
            case (Acquire(slot_key),) if place < last.get(slot_key, -1):
                waiting.setdefault(slot_key, []).append(request)
                continue
        ordered.append(request)
        for command in request.commands:
            if last.get(command.slot_key) == place:
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
        place = 0
        for request in requests:
            after = place + len(request.commands)
            request.succeed(outcome[place:after])
            place = after


def _report(fault: Exception) -> None:
    context = {"message": "An answer could not be told.", "exception": fault}
    asyncio.get_running_loop().call_exception_handler(context)
