"""The queue, in front of a store whose jobs end when the test says so.

Time is the loop's, moved by the test.
"""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from volcano_server.batch import BatchQueue
from volcano_server.clock import ManualClock
from volcano_server.lease import (
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Free,
    Granted,
    Held,
    Read,
    Release,
    Released,
    Renew,
    SlotKey,
    Write,
)
from volcano_server.problems import LOCK_HELD, LOCK_OWNERSHIP_LOST
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.sqlite import SqliteStore
from volcano_server.stores.store import StoreUnavailableError

pytestmark = pytest.mark.anyio

NIGHTLY = SlotKey("shop", "nightly")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(eq=False)
class Job:
    """One call of the store.  It goes on when `go` is set; `failure` is raised then."""

    commands: list[Command]
    may_commit: Callable[[], bool]
    go: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None

    def proceed(self) -> None:
        self.go.set()

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self.go.set()


class HeldStore(MemoryStore):
    """Jobs wait in `jobs` until the test lets each of them go on."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.jobs: list[Job] = []
        self.ended = False
        self._all: list[Job] = []

    def begin(self, commands: Sequence[Command], may_commit: Callable[[], bool]) -> Job:
        job = Job(list(commands), may_commit=may_commit)
        if self.ended:
            job.proceed()
        self.jobs.append(job)
        self._all.append(job)
        return job

    def end(self) -> None:
        """No job waits any more, so that a test that failed ends."""
        self.ended = True
        for job in self._all:
            job.proceed()

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        job = self.begin(commands, may_commit)
        await job.go.wait()
        if job.failure:
            raise job.failure
        return await super().apply(commands, may_commit)

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        job = self.begin(commands, lambda: True)
        await job.go.wait()
        if job.failure:
            raise job.failure
        return await super().read(commands)

    async def next_job(self) -> Job:
        await until(lambda: bool(self.jobs))
        return self.jobs.pop(0)


@pytest.fixture
async def store() -> HeldStore:
    return HeldStore()


@pytest.fixture
async def queue(store: HeldStore) -> AsyncIterator[BatchQueue]:
    queue = BatchQueue(store)
    yield queue
    store.end()
    await queue.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)


async def settle() -> None:
    """Let the loop do all that it can do without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


def move_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    then = loop.time
    monkeypatch.setattr(loop, "time", lambda: then() + seconds, raising=False)


def start(queue: BatchQueue, *commands: Command) -> list[asyncio.Future[Answer]]:
    return [asyncio.ensure_future(queue.submit(command)) for command in commands]


def keys(job: Job) -> list[str]:
    return [command.slot_key.key for command in job.commands]


def acquire(key: str) -> Acquire:
    return Acquire(SlotKey("shop", key), "alice", 30)


def read(key: str) -> Read:
    return Read(SlotKey("shop", key))


async def await_all(answers: Awaitable[Sequence[Answer]]) -> Sequence[Answer]:
    return await answers


async def refusal(answer: Awaitable[Answer]) -> str:
    with pytest.raises(StoreUnavailableError) as caught:
        await answer
    return str(caught.value)


class Heard:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Answer | Exception] = []

    def done(self) -> bool:
        return bool(self.told)

    def set_result(self, answers: Sequence[Answer]) -> None:
        self.told += answers

    def set_exception(self, error: Exception) -> None:
        self.told.append(error)


# Collecting.


async def test_what_arrives_while_a_commit_runs_is_the_next_batch_in_order(
    queue: BatchQueue, store: HeldStore
) -> None:
    first = start(queue, acquire("a"))
    job = await store.next_job()
    rest = start(queue, acquire("b"), acquire("c"), acquire("d"))
    await settle()
    assert not store.jobs, "one write job at a time"

    job.proceed()
    second = await store.next_job()
    second.proceed()

    assert keys(job) == ["a"]
    assert keys(second) == ["b", "c", "d"]
    assert all(isinstance(answer, Granted) for answer in await asyncio.gather(*first, *rest))


async def test_a_round_begins_once_the_answers_of_the_last_one_are_out(
    queue: BatchQueue, store: HeldStore
) -> None:
    """More will have come by then."""
    (answer,) = start(queue, acquire("a"))
    job = await store.next_job()
    rest = start(queue, *(acquire(f"b{number}") for number in range(100)))
    await settle()
    sent: list[bool] = []
    answer.add_done_callback(lambda _: sent.append(bool(store.jobs)))

    job.proceed()
    await answer
    await settle()

    assert sent == [False]
    assert len(keys(store.jobs[0])) == 100
    store.end()
    await asyncio.gather(*rest)


async def test_what_was_written_is_known_before_its_answers_are_out(
    queue: BatchQueue, store: HeldStore
) -> None:
    """So the event of a lease never comes behind what its holder does next."""
    first, second = Heard(), Heard()
    known: list[tuple[Sequence[Write], Sequence[Answer], bool]] = []
    queue.on_written = lambda writes, answers: known.append(
        (writes, answers, first.done() or second.done())
    )
    queue.submit_for(first, acquire("a"))
    queue.submit_for(second, acquire("b"))
    (await store.next_job()).proceed()

    await until(second.done)

    assert known == [([acquire("a"), acquire("b")], [*first.told, *second.told], False)]


async def test_each_caller_gets_the_answer_to_its_own_command(
    queue: BatchQueue, store: HeldStore
) -> None:
    answers = start(
        queue,
        Acquire(NIGHTLY, "alice", 30),
        Release(NIGHTLY, "alice"),
        Acquire(NIGHTLY, "bob", 5),
        ForceRelease(NIGHTLY),
    )
    (await store.next_job()).proceed()

    first, released, second, forced = await asyncio.gather(*answers)

    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert (first.expires_in, second.expires_in) == (30_000_000, 5_000_000)
    assert (released, forced) == (Released(), Released())


async def test_who_asks_for_a_key_that_the_same_batch_releases_gets_it(
    queue: BatchQueue, store: HeldStore
) -> None:
    (first,) = start(queue, Acquire(NIGHTLY, "alice", 30))
    holding = await store.next_job()
    answers = start(
        queue,
        Acquire(NIGHTLY, "bob", 5),
        Acquire(NIGHTLY, "carol", 5),
        acquire("other"),
        Release(NIGHTLY, "alice"),
    )
    holding.proceed()
    job = await store.next_job()
    job.proceed()

    bob, carol, other, released = await asyncio.gather(*answers)

    assert isinstance(await first, Granted)
    assert keys(job) == ["other", "nightly", "nightly", "nightly"]
    assert [type(bob), type(other)] == [Granted, Granted]
    assert (carol, released) == (LOCK_HELD, Released())


@pytest.mark.parametrize(
    "own", [Release(NIGHTLY, "bob"), Renew(NIGHTLY, "bob", 5)], ids=["release", "renewal"]
)
async def test_an_acquire_never_passes_what_else_is_asked_with_its_token(
    queue: BatchQueue, store: HeldStore, own: Write
) -> None:
    """Bob gave up waiting for its answer and sends its release: no lease may come after that."""
    (first,) = start(queue, Acquire(NIGHTLY, "alice", 30))
    holding = await store.next_job()
    answers = start(queue, Acquire(NIGHTLY, "bob", 5), own, Release(NIGHTLY, "alice"))
    holding.proceed()
    (await store.next_job()).proceed()

    assert isinstance(await first, Granted)
    assert await asyncio.gather(*answers) == [LOCK_HELD, LOCK_OWNERSHIP_LOST, Released()]
    (state,) = start(queue, Read(NIGHTLY))
    (await store.next_job()).proceed()
    assert await state == Free()


@pytest.mark.parametrize(
    "other", [ForceRelease(NIGHTLY), Acquire(NIGHTLY, "dave", 5)], ids=["force release", "own"]
)
async def test_where_one_acquire_keeps_its_place_all_of_that_key_do(
    queue: BatchQueue, store: HeldStore, other: Write
) -> None:
    (first,) = start(queue, acquire("other"))
    holding = await store.next_job()
    commands = [
        Acquire(NIGHTLY, "bob", 5),
        other,
        Renew(NIGHTLY, "dave", 5),
        Release(NIGHTLY, "stale"),
    ]
    answers = start(queue, *commands)
    holding.proceed()
    job = await store.next_job()
    job.proceed()
    await asyncio.gather(first, *answers)

    assert job.commands == commands


async def test_a_request_that_let_a_release_pass_is_refused_in_time_all_the_same(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = start(queue, Acquire(NIGHTLY, "alice", 30))
    holding = await store.next_job()
    (waiting,) = start(queue, Acquire(NIGHTLY, "bob", 5))
    await settle()
    move_time(monkeypatch, 3)
    (release,) = start(queue, Release(NIGHTLY, "alice"))
    holding.proceed()
    job = await store.next_job()
    await first

    move_time(monkeypatch, 2.1)
    await settle()

    assert [waiting.done(), release.done()] == [True, True]
    assert ["within 5" in await refusal(answer) for answer in (waiting, release)] == [True, True]
    assert not job.may_commit()
    job.proceed()


async def test_a_batch_has_its_limit_and_the_rest_is_the_next_one(store: HeldStore) -> None:
    queue = BatchQueue(store, largest_batch=2)
    answers = start(queue, *(acquire(key) for key in "abcde"))

    sizes = []
    for _ in range(3):
        job = await store.next_job()
        sizes.append(keys(job))
        job.proceed()

    assert sizes == [["a", "b"], ["c", "d"], ["e"]]
    await asyncio.gather(*answers)
    await queue.close()


async def test_commands_that_belong_together_share_a_batch_over_its_limit(
    store: HeldStore,
) -> None:
    """In their order, behind what came before them and before what came after."""
    queue = BatchQueue(store, largest_batch=2)
    first = start(queue, acquire("a"))
    together = asyncio.ensure_future(queue.submit_all([acquire(key) for key in "bcd"]))
    last = start(queue, acquire("e"))

    batches = []
    for _ in range(2):
        job = await store.next_job()
        batches.append(keys(job))
        job.proceed()

    assert batches == [["a", "b", "c", "d"], ["e"]]
    assert all(isinstance(answer, Granted) for answer in await together)
    await asyncio.gather(*first, *last)
    await queue.close()


async def test_the_answers_to_commands_that_belong_together_are_in_their_order(
    queue: BatchQueue, store: HeldStore
) -> None:
    """One that is refused does not hurt the others, and a key that repeats is decided anew."""
    alice = Acquire(NIGHTLY, "alice", 30)
    together = asyncio.ensure_future(
        queue.submit_all(
            [
                alice,
                Renew(NIGHTLY, "bob", 60),
                Renew(NIGHTLY, "alice", 9),
                Release(NIGHTLY, "alice"),
            ]
        )
    )
    (await store.next_job()).proceed()

    granted, refused, renewed, released = await together

    assert isinstance(granted, Granted)
    assert refused == LOCK_OWNERSHIP_LOST
    assert isinstance(renewed, Granted)
    assert (granted.expires_in, renewed.expires_in) == (30_000_000, 9_000_000)
    assert released == Released()


async def test_who_asks_for_a_key_that_commands_that_belong_together_release_gets_it(
    queue: BatchQueue, store: HeldStore
) -> None:
    (first,) = start(queue, Acquire(NIGHTLY, "alice", 30))
    holding = await store.next_job()
    (bob,) = start(queue, Acquire(NIGHTLY, "bob", 5))
    await settle()
    together = queue.submit_all([acquire("other"), Release(NIGHTLY, "alice")])
    holding.proceed()
    (await store.next_job()).proceed()

    granted, released = await together

    assert [type(answer) for answer in (await first, await bob, granted)] == [Granted] * 3
    assert released == Released()


async def test_commands_that_belong_together_are_refused_together(
    queue: BatchQueue, store: HeldStore
) -> None:
    """Also those that do not fit any more: none of them is queued."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "_most_waiting", 2)
        with pytest.raises(StoreUnavailableError, match="2 requests are waiting already"):
            await queue.submit_all([acquire(key) for key in "abc"])
        together = queue.submit_all([acquire(key) for key in "ab"])
        with pytest.raises(StoreUnavailableError, match="2 requests are waiting already"):
            queue.submit(read("c"))
    job = await store.next_job()
    job.fail(StoreUnavailableError("the disk is full"))

    assert keys(job) == ["a", "b"]
    with pytest.raises(StoreUnavailableError, match="the disk is full"):
        await together


async def test_commands_that_belong_together_are_overdue_together(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(queue, acquire("a"))
    job = await store.next_job()
    together = asyncio.ensure_future(queue.submit_all([acquire("b"), acquire("c")]))
    await settle()
    move_time(monkeypatch, 5.1)
    queue._give_up()

    with pytest.raises(StoreUnavailableError, match="Not decided within"):
        await together
    job.proceed()
    await settle()
    assert not store.jobs
    await asyncio.gather(*first, return_exceptions=True)


async def test_a_caller_of_many_that_goes_away_leaves_nothing_behind(
    queue: BatchQueue, store: HeldStore
) -> None:
    """No complaint about answers that nobody took."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, each: reported.append(each))
    for failure in (None, StoreUnavailableError("the disk is full"), ValueError("a fault")):
        caller = asyncio.create_task(await_all(queue.submit_all([acquire("a"), acquire("b")])))
        job = await store.next_job()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        if failure is None:
            job.proceed()
        else:
            job.fail(failure)
        await settle()
        del caller, job
        gc.collect()
        await settle()

    assert reported == []


async def test_reads_that_came_during_a_commit_are_one_job_before_the_next_commit(
    queue: BatchQueue, store: HeldStore
) -> None:
    answers = start(queue, acquire("a"))
    commit = await store.next_job()
    answers += start(queue, acquire("b"), read("a"), read("b"), acquire("c"), read("c"))

    commit.proceed()
    reads = await store.next_job()
    writes = await store.next_job()

    assert keys(reads) == ["a", "b", "c"]
    assert all(isinstance(command, Read) for command in reads.commands)
    assert keys(writes) == ["b", "c"]
    reads.proceed()
    writes.proceed()
    await asyncio.gather(*answers)


async def test_a_read_does_not_wait_for_the_commit_of_its_own_round(
    queue: BatchQueue, store: HeldStore
) -> None:
    (write, answer) = start(queue, acquire("a"), read("a"))
    reads, writes = await store.next_job(), await store.next_job()

    reads.proceed()

    assert await answer == Free()
    assert not write.done()
    writes.proceed()
    await write


# Failing.


async def test_a_failed_commit_refuses_exactly_its_own_batch(
    queue: BatchQueue, store: HeldStore
) -> None:
    doomed = start(queue, acquire("a"), acquire("b"))
    first = await store.next_job()
    spared = start(queue, acquire("c"))

    first.fail(StoreUnavailableError("the disk is full"))
    (await store.next_job()).proceed()

    assert [await refusal(answer) for answer in doomed] == ["the disk is full"] * 2
    assert isinstance(await spared[0], Granted)


async def test_failed_reads_do_not_touch_the_writes_of_their_round(
    queue: BatchQueue, store: HeldStore
) -> None:
    (write, answer) = start(queue, acquire("a"), read("a"))
    reads, writes = await store.next_job(), await store.next_job()

    reads.fail(StoreUnavailableError("no"))
    writes.proceed()

    assert await refusal(answer) == "no"
    assert isinstance(await write, Granted)


async def test_a_fault_of_ours_reaches_the_caller_and_the_queue_goes_on(
    queue: BatchQueue, store: HeldStore
) -> None:
    (answer,) = start(queue, acquire("a"))
    (await store.next_job()).fail(RuntimeError("a fault"))
    with pytest.raises(RuntimeError, match="a fault"):
        await answer

    (answer,) = start(queue, acquire("a"))
    (await store.next_job()).proceed()

    assert isinstance(await answer, Granted)


async def test_a_store_that_answers_too_few_leaves_nobody_waiting(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forgetful(_: Sequence[Read]) -> list[Answer]:
        return [Free()]

    monkeypatch.setattr(store, "read", forgetful)

    first, second = await asyncio.gather(
        *start(queue, read("a"), read("b")), return_exceptions=True
    )

    assert isinstance(first, RuntimeError)  # whose answer was it?
    assert isinstance(second, RuntimeError)


async def test_too_many_waiting_are_refused_at_once_and_the_others_served(
    store: HeldStore,
) -> None:
    queue = BatchQueue(store, most_waiting=3)
    running = start(queue, acquire("a"))
    job = await store.next_job()
    waiting = start(queue, acquire("b"), read("b"), acquire("c"))

    with pytest.raises(StoreUnavailableError, match="3 requests are waiting"):
        queue.submit(acquire("d"))

    job.proceed()
    for _ in range(2):
        (await store.next_job()).proceed()
    await asyncio.gather(*running, *waiting)
    await queue.close()


# Patience.


async def test_a_request_that_still_waits_after_five_seconds_is_refused_and_never_decided(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (running,) = start(queue, acquire("a"))
    stuck = await store.next_job()
    assert stuck.may_commit(), "so that the running one is out of the game"
    early = start(queue, acquire("early"), read("early"))
    move_time(monkeypatch, 4.9)
    late = start(queue, acquire("late"), read("late"))
    await settle()
    assert not any(answer.done() for answer in early)

    move_time(monkeypatch, 0.2)

    assert "within 5" in await refusal(early[0])
    assert "within 5" in await refusal(early[1])
    assert not any(answer.done() for answer in late)
    stuck.fail(StoreUnavailableError("late"))
    assert await refusal(running) == "late"
    reads, writes = await store.next_job(), await store.next_job()
    assert (keys(reads), keys(writes)) == (["late"], ["late"])
    reads.proceed()
    writes.proceed()
    await asyncio.gather(*late)


async def test_what_became_overdue_while_the_loop_was_stuck_is_never_decided(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop turns to the queue before it turns to the timer."""
    alone = start(queue, acquire("alone"))
    move_time(monkeypatch, 5.1)
    assert "within 5" in await refusal(alone[0])

    overdue = start(queue, acquire("a"), read("a"))
    move_time(monkeypatch, 5.1)
    late = start(queue, acquire("late"))

    for answer in overdue:
        assert "within 5" in await refusal(answer)

    job = await store.next_job()
    assert keys(job) == ["late"]
    job.proceed()
    await asyncio.gather(*late)


async def test_the_timer_goes_on_to_the_next_oldest(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (running,) = start(queue, acquire("a"))
    stuck = await store.next_job()
    waiting = []
    for _ in range(3):
        move_time(monkeypatch, 1)
        waiting += start(queue, acquire("b"))
        await settle()

    move_time(monkeypatch, 2)  # 5, 4, 3 and 2 s old
    assert "within" in await refusal(running)
    for number, answer in enumerate(waiting):
        assert not answer.done()
        move_time(monkeypatch, 1)
        assert "within" in await refusal(answer)
        assert not any(later.done() for later in waiting[number + 1 :])
    stuck.proceed()


@pytest.mark.parametrize("command", [acquire("a"), read("a")])
async def test_the_timer_of_a_request_long_answered_is_set_again_for_a_job_that_is_stuck(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (quick,) = start(queue, acquire("a"))
    (await store.next_job()).proceed()
    await quick
    move_time(monkeypatch, 3)
    (stuck,) = start(queue, command)
    job = await store.next_job()
    move_time(monkeypatch, 2.1)
    await settle()
    assert not stuck.done()

    move_time(monkeypatch, 3)

    assert "within 5" in await refusal(stuck)
    job.proceed()


async def test_the_timer_is_set_again_after_it_found_nobody(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quick,) = start(queue, acquire("a"))
    (await store.next_job()).proceed()
    await quick
    move_time(monkeypatch, 5.1)
    await settle()
    (stuck,) = start(queue, acquire("a"))
    job = await store.next_job()

    move_time(monkeypatch, 5.1)

    assert "within 5" in await refusal(stuck)
    job.proceed()


async def test_a_batch_whose_claim_the_timer_took_does_not_commit(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = start(queue, acquire("a"), acquire("b"))
    job = await store.next_job()

    move_time(monkeypatch, 5.1)

    assert ["within 5" in await refusal(answer) for answer in answers] == [True, True]
    assert not job.may_commit()
    job.proceed()
    (state,) = start(queue, read("a"))
    (await store.next_job()).proceed()
    assert await state == Free()


async def test_a_batch_whose_claim_the_store_took_is_waited_for(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (answer,) = start(queue, acquire("a"))
    job = await store.next_job()
    assert job.may_commit()

    move_time(monkeypatch, 60)
    await settle()

    assert not answer.done()
    job.fail(StoreUnavailableError("the commit failed"))
    assert await refusal(answer) == "the commit failed"


async def test_no_batch_starts_before_the_one_given_up_has_ended(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (answer,) = start(queue, acquire("a"))
    job = await store.next_job()
    move_time(monkeypatch, 5.1)
    await refusal(answer)
    (later,) = start(queue, acquire("b"))
    await settle()

    assert not store.jobs
    job.proceed()
    (await store.next_job()).proceed()
    assert isinstance(await later, Granted)


async def test_reads_in_a_stuck_store_are_refused_singly(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (answer,) = start(queue, read("a"))
    job = await store.next_job()
    move_time(monkeypatch, 5.1)

    assert "within 5" in await refusal(answer)
    job.proceed()


async def test_the_claim_goes_to_exactly_one_of_many_threads() -> None:
    from volcano_server.batch import _Claim

    for _ in range(50):
        claim = _Claim()
        taken: list[bool] = []
        barrier = threading.Barrier(4)

        def race(
            claim: _Claim = claim,
            taken: list[bool] = taken,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait()
            taken.append(claim.take())

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == [False, False, False, True]


# Callers who go away, and the end.


@pytest.mark.parametrize("when", ["waiting", "running"])
async def test_a_caller_that_goes_away_does_not_hurt_the_others(
    queue: BatchQueue, store: HeldStore, when: str
) -> None:
    running = start(queue, acquire("a"), acquire("b"))
    job = await store.next_job()
    waiting = start(queue, acquire("c"), acquire("d"))
    (running if when == "running" else waiting)[0].cancel()

    job.proceed()
    (await store.next_job()).proceed()

    answers = await asyncio.gather(*running, *waiting, return_exceptions=True)
    assert sum(isinstance(answer, Granted) for answer in answers) == 3
    assert sum(isinstance(answer, asyncio.CancelledError) for answer in answers) == 1


async def test_a_batch_whose_callers_have_all_gone_leaves_nothing_behind(
    queue: BatchQueue, store: HeldStore
) -> None:
    """No unread exception is reported either: warnings and loop errors fail this test."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    answers = start(queue, acquire("a"), read("a"))
    reads, writes = await store.next_job(), await store.next_job()
    for answer in answers:
        answer.cancel()

    reads.fail(StoreUnavailableError("no"))
    writes.fail(RuntimeError("no"))
    await settle()
    del answers, reads, writes
    gc.collect()
    await settle()

    assert reported == []
    assert not queue._jobs


async def test_closing_finishes_what_was_accepted_and_refuses_what_comes(
    store: HeldStore,
) -> None:
    queue = BatchQueue(store)
    answers = start(queue, acquire("a"))
    first = await store.next_job()
    answers += start(queue, acquire("b"), read("c"))
    closing = asyncio.ensure_future(queue.close())
    await settle()

    with pytest.raises(StoreUnavailableError, match="stopping"):
        queue.submit(acquire("d"))
    first.proceed()
    reads, writes = await store.next_job(), await store.next_job()
    assert not closing.done()
    reads.proceed()
    writes.proceed()

    await closing
    assert all(answer.done() for answer in answers)
    assert queue._timer is None or queue._timer.cancelled()


async def test_a_close_that_is_cancelled_does_not_stop_the_work(
    queue: BatchQueue, store: HeldStore
) -> None:
    (answer,) = start(queue, acquire("a"))
    job = await store.next_job()
    closing = asyncio.ensure_future(queue.close())
    await settle()

    closing.cancel()
    await settle()
    job.proceed()

    assert isinstance(await answer, Granted)


# On the real store.


async def test_many_renewals_are_one_commit_over_sqlite(tmp_path: Path) -> None:
    """All of them are on disk when the answers come, the last of a repeated key too."""
    clock = ManualClock()
    file = tmp_path / "locks.db"
    store = SqliteStore(file, clock)
    await store.open()
    queue = BatchQueue(store, largest_batch=10)
    slots = [SlotKey("shop", f"k{number}") for number in range(500)]
    await queue.submit_all([Acquire(slot, "alice", 30) for slot in slots])
    renewals = [Renew(slot, "alice", 60) for slot in slots[:-1]]

    answers = await queue.submit_all([*renewals, Renew(slots[0], "alice", 90)])
    await queue.close()
    await store.close()

    assert all(isinstance(answer, Granted) for answer in answers)
    assert len({answer.expires_at for answer in answers[:-1] if isinstance(answer, Granted)}) == 1
    again = SqliteStore(file, clock)
    await again.open()
    held = await again.read([Read(slot) for slot in slots])
    await again.close()
    start = clock.wall()
    found = [answer.expires_at for answer in held if isinstance(answer, Held)]
    assert found == [start + 90_000_000, *[start + 60_000_000] * 498, start + 30_000_000]


async def test_many_clients_at_once_over_sqlite_never_share_a_lock(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "locks.db", ManualClock())
    await store.open()
    queue = BatchQueue(store)
    holder: str | None = None
    tokens: list[int] = []

    async def client(name: str) -> None:
        nonlocal holder
        for _ in range(60):
            answer = await queue.submit(Acquire(NIGHTLY, name, 30))
            if isinstance(answer, Granted):
                assert holder is None
                holder = name
                tokens.append(answer.fencing_token)
                await queue.submit(Read(NIGHTLY))
                holder = None
                assert await queue.submit(Release(NIGHTLY, name)) == Released()

    await asyncio.gather(*(client(f"client-{number}") for number in range(16)))

    assert len(tokens) >= 30
    assert tokens == sorted(set(tokens))
    await queue.close()
    await store.close()


# Receivers.


async def test_receivers_are_told_in_their_order_and_without_a_turn_of_the_loop_each(
    queue: BatchQueue, store: HeldStore
) -> None:
    first, second, third = Heard(), Heard(), Heard()
    queue.submit_for(first, acquire("a"))
    queue.submit_for(second, Acquire(SlotKey("shop", "a"), "bob", 30))
    queue.submit_for(third, read("a"))
    reading, writing = await store.next_job(), await store.next_job()
    reading.proceed()
    writing.proceed()

    await until(first.done)

    assert [type(told) for told in first.told] == [Granted]
    assert second.told == [LOCK_HELD]
    assert third.told == [Free()]


async def test_a_receiver_is_told_once(
    queue: BatchQueue, store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the timer, or else by the store."""
    overdue = Heard()
    queue.submit_for(overdue, acquire("a"))
    job = await store.next_job()
    move_time(monkeypatch, 5.1)
    await until(overdue.done)

    job.proceed()
    await settle()

    assert [type(told) for told in overdue.told] == [StoreUnavailableError]


class Deaf(Heard):
    def set_result(self, answers: Sequence[Answer]) -> None:
        raise RuntimeError("cannot be told")

    def set_exception(self, error: Exception) -> None:
        raise RuntimeError("cannot be told")


@pytest.mark.parametrize("failure", [None, StoreUnavailableError("no room"), RuntimeError("ours")])
async def test_a_receiver_that_raises_costs_nobody_else_the_answer(
    queue: BatchQueue, store: HeldStore, failure: Exception | None
) -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    deaf, heard, next_one = Deaf(), Heard(), Heard()
    queue.submit_for(deaf, acquire("a"))
    queue.submit_for(heard, acquire("b"))
    job = await store.next_job()
    queue.submit_for(next_one, acquire("c"))
    job.proceed() if failure is None else job.fail(failure)

    await until(heard.done)
    (await store.next_job()).proceed()
    await until(next_one.done)

    assert [str(fault["exception"]) for fault in faults] == ["cannot be told"]


async def test_a_queue_that_is_full_tells_no_receiver(store: HeldStore) -> None:
    """Whoever asks hears it and tells."""
    heard = Heard()
    queue = BatchQueue(store, most_waiting=0)

    with pytest.raises(StoreUnavailableError):
        queue.submit_for(heard, acquire("a"))

    assert heard.told == []
