"""What every store must do.  A new store joins by a bench of its own in the lists below.

`steady`: those with a clock of their own that nobody sets; PostgreSQL's is the database's wall
clock (its own rules about that are in test_postgresql.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
from postgres import DatabaseClock

from volcano_server.clock import ManualClock
from volcano_server.database import Database
from volcano_server.lease import (
    DAY,
    GRACE,
    SECOND,
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
)
from volcano_server.problems import LOCK_HELD, LOCK_OWNERSHIP_LOST
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.postgresql import PostgresqlStore
from volcano_server.stores.sqlite import SqliteStore
from volcano_server.stores.store import Store, StoreUnavailableError

pytestmark = pytest.mark.anyio

NIGHTLY = SlotKey("shop", "nightly")
HOURLY = SlotKey("shop", "hourly")
HOUR = 3600


class Bench(Protocol):
    """A store with a host that a test moves."""

    host: ManualClock
    store: Store


class DurableBench(Bench, Protocol):
    async def restart(self) -> None:
        """Another server process on what the store has kept."""


class MemoryBench:
    def __init__(self) -> None:
        self.host = ManualClock()
        self.store: Store = MemoryStore(self.host)


class SqliteBench:
    def __init__(self, directory: Path) -> None:
        self.host = ManualClock()
        self.path = directory / "locks.db"
        self.store: Store = SqliteStore(self.path, self.host)

    async def restart(self) -> None:
        await self.store.close()
        self.store = SqliteStore(self.path, self.host)
        await self.store.open()


class PostgresqlBench:
    def __init__(self, url: str) -> None:
        self.database = Database.parse(url)
        self.host: ManualClock = DatabaseClock(url)
        self.store: Store = PostgresqlStore(self.database, self.host)

    async def restart(self) -> None:
        await self.store.close()
        self.store = PostgresqlStore(self.database, self.host)
        await self.store.open()


STEADY_DURABLE = ["sqlite"]
DURABLE = [*STEADY_DURABLE, "postgresql"]
STEADY = ["memory", *STEADY_DURABLE]
ALL = ["memory", *DURABLE]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Bench]:
    """The bench that the parameter names, with an empty store."""
    bench: Bench
    if request.param == "postgresql":
        bench = PostgresqlBench(request.getfixturevalue("cluster").database())
    elif request.param == "sqlite":
        bench = SqliteBench(directory)
    else:
        bench = MemoryBench()
    await bench.store.open()
    yield bench
    await bench.store.close()
    if isinstance(bench.host, DatabaseClock):
        bench.host.close()


@pytest.fixture(params=ALL)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(request, tmp_path) as bench:
        yield bench


@pytest.fixture(params=STEADY)
async def steady(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(request, tmp_path) as bench:
        yield bench


@pytest.fixture(params=DURABLE)
async def durable(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DurableBench]:
    async with opened(request, tmp_path) as bench:
        assert isinstance(bench, SqliteBench | PostgresqlBench)
        yield bench


@pytest.fixture(params=STEADY_DURABLE)
async def steady_durable(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[DurableBench]:
    async with opened(request, tmp_path) as bench:
        assert isinstance(bench, SqliteBench)
        yield bench


async def apply(bench: Bench, *commands: Command) -> list[Answer]:
    writes = [command for command in commands if not isinstance(command, Read)]
    return await bench.store.apply(writes, lambda: True)


async def read(bench: Bench, key: SlotKey = NIGHTLY) -> Answer:
    (answer,) = await bench.store.read([Read(key)])
    return answer


async def acquire(
    bench: Bench, token: str = "alice", ttl_seconds: int = 30, key: SlotKey = NIGHTLY
) -> Granted:
    (answer,) = await apply(bench, Acquire(key, token, ttl_seconds))
    assert isinstance(answer, Granted), answer
    return answer


# What is held.


async def held(
    bench: Bench, prefix: str, after: str = "", limit: int = 1_000
) -> tuple[list[str], str | None]:
    found = await bench.store.held("shop", prefix, after, limit)
    return [key for key, _ in found.held], found.looked_to


async def test_the_keys_that_are_held_and_begin_so_in_their_order(bench: Bench) -> None:
    for key in ("tick", "ticket:9", "ticket:10", "ticket~", "tidy", "tic", "Ticket", "tick.et"):
        await acquire(bench, key=SlotKey("shop", key))
    await acquire(bench, key=SlotKey("bank", "ticket:7"))

    assert await held(bench, "tick") == (
        ["tick", "tick.et", "ticket:10", "ticket:9", "ticket~"],
        None,
    )
    assert await held(bench, "none") == ([], None)


async def test_a_key_is_held_until_the_end_of_its_grace(bench: Bench) -> None:
    granted = await acquire(bench, ttl_seconds=5)
    await acquire(bench, key=HOURLY)
    await apply(bench, Release(HOURLY, "alice"))
    bench.host.advance(5.9)

    ((key, found),) = (await bench.store.held("shop", "n", "", 10)).held
    assert (key, found) == ("nightly", Held(granted.expires_at, granted.fencing_token))
    assert found.expires_in == -900_000
    bench.host.advance(0.1)
    assert await held(bench, "n") == ([], None)
    assert await held(bench, "h") == ([], None)


async def test_what_is_held_comes_in_pieces_free_slots_counted_too(bench: Bench) -> None:
    """So that no piece takes long, however many dead keys lie between."""
    for number in range(5):
        await acquire(bench, key=SlotKey("shop", f"k{number}"))
    await apply(bench, *(ForceRelease(SlotKey("shop", f"k{number}")) for number in (0, 1, 3)))

    assert await held(bench, "k", limit=2) == ([], "k1")
    assert await held(bench, "k", "k1", limit=2) == (["k2"], "k3")
    assert await held(bench, "k", "k3", limit=2) == (["k4"], None)
    assert await held(bench, "k4", limit=1) == (["k4"], "k4")
    assert await held(bench, "k4", "k4", limit=1) == ([], None)


# Batches.


async def test_all_five_commands(bench: Bench) -> None:
    granted = await acquire(bench)
    bench.host.advance(10)

    assert await apply(
        bench,
        Renew(NIGHTLY, "alice", 60),
        Acquire(NIGHTLY, "bob", 30),
        Release(NIGHTLY, "bob"),
        Renew(HOURLY, "alice", 30),
    ) == [
        Granted(granted.expires_at + 40 * SECOND, granted.fencing_token, 60 * SECOND),
        LOCK_HELD,
        LOCK_OWNERSHIP_LOST,
        LOCK_OWNERSHIP_LOST,
    ]
    assert await read(bench) == Held(granted.expires_at + 40 * SECOND, granted.fencing_token)
    assert await read(bench, HOURLY) == Free()
    assert await apply(bench, Release(NIGHTLY, "alice"), ForceRelease(NIGHTLY)) == [
        Released(),
        Released(),
    ]
    assert await read(bench) == Free()


async def test_a_batch_is_decided_in_its_order_and_each_sees_the_one_before(bench: Bench) -> None:
    answers = await apply(
        bench,
        Acquire(NIGHTLY, "alice", 30),
        Acquire(NIGHTLY, "bob", 30),
        Release(NIGHTLY, "alice"),
        Acquire(NIGHTLY, "bob", 5),
        ForceRelease(NIGHTLY),
        Acquire(NIGHTLY, "carol", 5),
    )

    first, held, released, second, forced, third = answers
    assert (held, released, forced) == (LOCK_HELD, Released(), Released())
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert isinstance(third, Granted)
    assert first.fencing_token < second.fencing_token < third.fencing_token
    assert await read(bench) == Held(third.expires_at, third.fencing_token)


async def test_a_large_batch_touches_each_of_its_keys(bench: Bench) -> None:
    keys = [SlotKey(f"project-{number % 3}", f"key-{number}") for number in range(1000)]

    answers = await apply(bench, *(Acquire(key, "alice", 30) for key in keys))

    assert all(isinstance(answer, Granted) for answer in answers)
    states = await bench.store.read([Read(key) for key in keys])
    assert all(isinstance(state, Held) for state in states)


async def test_the_same_key_of_two_projects_is_two_locks(bench: Bench) -> None:
    await acquire(bench, "alice")
    await acquire(bench, "bob", key=SlotKey("bank", "nightly"))

    await apply(bench, Release(NIGHTLY, "alice"))

    assert await read(bench) == Free()
    assert isinstance(await read(bench, SlotKey("bank", "nightly")), Held)


async def test_a_key_is_free_after_expiry_and_grace_and_not_before(bench: Bench) -> None:
    first = await acquire(bench)
    bench.host.advance(30.999999)
    assert await read(bench) == Held(first.expires_at, first.fencing_token)
    assert await apply(bench, Acquire(NIGHTLY, "bob", 5)) == [LOCK_HELD]

    bench.host.advance(0.000001)

    assert await read(bench) == Free()
    assert (await acquire(bench, "bob")).fencing_token > first.fencing_token


async def test_a_batch_that_came_too_late_writes_nothing(bench: Bench) -> None:
    asked = 0

    def too_late() -> bool:
        nonlocal asked
        asked += 1
        return False

    with pytest.raises(StoreUnavailableError):
        await bench.store.apply(
            [Acquire(NIGHTLY, "alice", 30), Acquire(HOURLY, "alice", 30)], too_late
        )

    assert asked == 1
    assert (await read(bench), await read(bench, HOURLY)) == (Free(), Free())
    assert (await acquire(bench, "bob")).expires_in == 30 * SECOND


async def test_the_claim_is_asked_once_even_where_nothing_changes(bench: Bench) -> None:
    """Else a refusal could be answered twice, by the timer and by the store."""
    claims = iter([True])

    await bench.store.apply([Release(NIGHTLY, "alice")], lambda: next(claims))

    assert next(claims, None) is None


# Time.


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_wall_clock_that_is_set_neither_lengthens_nor_shortens_a_lease(
    steady: Bench, hours: int
) -> None:
    await acquire(steady)

    steady.host.step_wall(hours * HOUR)

    steady.host.advance(30.999999)
    assert isinstance(await read(steady), Held)
    steady.host.advance(0.000001)
    assert await read(steady) == Free()


@pytest.mark.parametrize("hours", [-1, 1])
async def test_tokens_rise_however_the_wall_clock_is_set(bench: Bench, hours: int) -> None:
    tokens = []
    for step in (0, hours, -hours, 2 * hours):
        bench.host.step_wall(step * HOUR)
        tokens.append((await acquire(bench)).fencing_token)
        await apply(bench, ForceRelease(NIGHTLY))

    assert tokens == sorted(set(tokens))


# Restarts.


async def test_a_restart_keeps_each_lease_to_the_microsecond(durable: DurableBench) -> None:
    granted = await acquire(durable)
    durable.host.advance(20)

    await durable.restart()

    assert await read(durable) == Held(granted.expires_at, granted.fencing_token)
    durable.host.advance(10.999999)
    assert isinstance(await read(durable), Held)
    durable.host.advance(0.000001)
    assert await read(durable) == Free()


async def test_a_restart_keeps_whose_lease_it_is_and_its_hard_deadline(
    durable: DurableBench,
) -> None:
    granted = await acquire(durable)

    await durable.restart()

    assert await apply(
        durable, Renew(NIGHTLY, "bob", 30), Renew(NIGHTLY, "alice", 90 * 86_400)
    ) == [
        LOCK_OWNERSHIP_LOST,
        Granted(granted.expires_at - 30 * SECOND + 90 * DAY, granted.fencing_token, 90 * DAY),
    ]
    durable.host.advance(86_400)
    assert await apply(durable, Renew(NIGHTLY, "alice", 90 * 86_400)) == [
        Granted(granted.expires_at - 30 * SECOND + 90 * DAY, granted.fencing_token, 89 * DAY)
    ]


async def test_a_restart_after_the_lease_lapsed_finds_it_free_at_once(
    durable: DurableBench,
) -> None:
    await acquire(durable)
    durable.host.advance(31)

    await durable.restart()

    assert await read(durable) == Free()


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_wall_clock_set_before_a_restart_in_the_same_boot_changes_nothing(
    steady_durable: DurableBench, hours: int
) -> None:
    granted = await acquire(steady_durable)
    await apply(steady_durable, ForceRelease(NIGHTLY))
    again = await acquire(steady_durable)
    steady_durable.host.advance(20)
    steady_durable.host.step_wall(hours * HOUR)

    await steady_durable.restart()

    assert await read(steady_durable) == Held(again.expires_at, again.fencing_token)
    steady_durable.host.advance(10.999999)
    assert isinstance(await read(steady_durable), Held)
    steady_durable.host.advance(0.000001)
    later = await acquire(steady_durable, "bob")
    assert granted.fencing_token < again.fencing_token < later.fencing_token


async def test_a_reboot_with_the_wall_clock_an_hour_ahead_keeps_what_each_lease_had_left(
    steady_durable: DurableBench,
) -> None:
    await acquire(steady_durable)
    steady_durable.host.advance(10)
    await acquire(steady_durable, "bob", key=HOURLY)  # the last commit: alice has 20 s left
    steady_durable.host.reboot()
    steady_durable.host.step_wall(HOUR)

    await steady_durable.restart()

    assert (await apply(steady_durable, Renew(NIGHTLY, "alice", 20)))[0] != LOCK_OWNERSHIP_LOST
    steady_durable.host.advance(20.999999)
    assert isinstance(await read(steady_durable), Held)
    assert isinstance(await read(steady_durable, HOURLY), Held)
    steady_durable.host.advance(0.000001)
    assert await read(steady_durable) == Free()
    steady_durable.host.advance(10)
    assert await read(steady_durable, HOURLY) == Free()


async def test_a_reboot_moves_the_hard_deadline_with_the_lease(
    steady_durable: DurableBench,
) -> None:
    await acquire(steady_durable)
    steady_durable.host.reboot()
    steady_durable.host.step_wall(HOUR)

    await steady_durable.restart()

    (renewed,) = await apply(steady_durable, Renew(NIGHTLY, "alice", 90 * 86_400))
    assert isinstance(renewed, Granted)
    assert renewed.expires_in == 90 * DAY


async def test_a_reboot_moves_no_lease_twice(steady_durable: DurableBench) -> None:
    await acquire(steady_durable)
    steady_durable.host.reboot()
    steady_durable.host.step_wall(HOUR)

    await steady_durable.restart()
    await steady_durable.restart()

    steady_durable.host.advance(30.999999)
    assert isinstance(await read(steady_durable), Held)
    steady_durable.host.advance(0.000001)
    assert await read(steady_durable) == Free()


async def test_a_reboot_moves_no_lease_that_was_free_at_the_last_commit(
    steady_durable: DurableBench,
) -> None:
    """It was free for the two days, however unknown their length."""
    await acquire(steady_durable)
    steady_durable.host.advance(31)
    await acquire(steady_durable, "bob", key=HOURLY)
    steady_durable.host.reboot()
    steady_durable.host.step_wall(2 * 86_400)

    await steady_durable.restart()

    assert await read(steady_durable) == Free()
    assert await steady_durable.store.sweep(10) == 1
    assert isinstance(await read(steady_durable, HOURLY), Held)


async def test_a_reboot_keeps_a_lease_that_was_in_its_grace(steady_durable: DurableBench) -> None:
    await acquire(steady_durable)
    steady_durable.host.advance(30.5)
    await acquire(steady_durable, "bob", key=HOURLY)
    steady_durable.host.reboot()
    steady_durable.host.step_wall(HOUR)

    await steady_durable.restart()

    assert isinstance(await read(steady_durable), Held)
    assert await apply(steady_durable, Acquire(NIGHTLY, "alice", 30)) == [LOCK_OWNERSHIP_LOST]
    steady_durable.host.advance(0.5)
    assert await read(steady_durable) == Free()


async def test_a_reboot_with_the_wall_clock_behind_takes_no_time_from_a_lease(
    steady_durable: DurableBench,
) -> None:
    granted = await acquire(steady_durable)
    steady_durable.host.reboot()
    steady_durable.host.step_wall(-HOUR)

    await steady_durable.restart()

    assert await read(steady_durable) == Held(granted.expires_at, granted.fencing_token)
    steady_durable.host.advance(31)
    assert (await acquire(steady_durable, "bob")).fencing_token > granted.fencing_token


# Sweeping.


async def test_a_slot_is_swept_when_it_was_free_for_a_day_and_not_before(bench: Bench) -> None:
    await acquire(bench)
    await acquire(bench, key=HOURLY)
    await apply(bench, Release(HOURLY, "alice"))

    bench.host.advance(86_399.999999)
    assert await bench.store.sweep(10) == 0
    bench.host.advance(0.000001)
    assert await bench.store.sweep(10) == 1  # released at once
    bench.host.advance(30.999999)
    assert await bench.store.sweep(10) == 0
    bench.host.advance(0.000001)
    assert await bench.store.sweep(10) == 1  # lapsed, and out of its grace
    assert GRACE == SECOND


async def test_a_slot_that_is_not_due_stays_beside_one_that_is(bench: Bench) -> None:
    await acquire(bench)  # lapses after 30 s, free after 31
    await acquire(bench, key=HOURLY)
    bench.host.advance(30.5)
    await apply(bench, Release(HOURLY, "alice"))
    bench.host.advance(86_400)

    assert await bench.store.sweep(10) == 1
    bench.host.advance(0.5)
    assert await bench.store.sweep(10) == 1


async def test_a_held_slot_is_never_swept(bench: Bench) -> None:
    granted = await acquire(bench, ttl_seconds=90 * 86_400)
    bench.host.advance(89 * 86_400)

    assert await bench.store.sweep(10) == 0
    assert await read(bench) == Held(granted.expires_at, granted.fencing_token)


async def test_the_tokens_of_a_swept_key_rise_with_the_wall_clock_set_back(steady: Bench) -> None:
    before = await acquire(steady)
    steady.host.advance(2 * 86_400)
    steady.host.step_wall(-10 * 86_400)
    assert await steady.store.sweep(10) == 1

    assert (await acquire(steady)).fencing_token > before.fencing_token


async def test_the_tokens_of_a_swept_key_rise_after_a_restart_too(
    steady_durable: DurableBench,
) -> None:
    steady_durable.host.step_wall(10 * 86_400)
    before = await acquire(steady_durable)
    steady_durable.host.step_wall(-10 * 86_400)
    steady_durable.host.advance(2 * 86_400)
    assert await steady_durable.store.sweep(10) == 1

    await steady_durable.restart()

    assert (await acquire(steady_durable)).fencing_token > before.fencing_token


async def test_a_low_token_that_is_swept_after_a_high_one_does_not_lower_the_mark(
    steady: Bench,
) -> None:
    before, high, after = (SlotKey("shop", key) for key in "abc")
    await acquire(steady, key=before)
    steady.host.step_wall(10 * 86_400)
    highest = await acquire(steady, key=high)
    steady.host.step_wall(-10 * 86_400)
    assert (await acquire(steady, key=after)).fencing_token < highest.fencing_token
    steady.host.advance(2 * 86_400)

    assert sum([await steady.store.sweep(1) for _ in range(4)]) == 3

    assert (await acquire(steady, key=high)).fencing_token > highest.fencing_token


async def test_the_sweeper_walks_over_all_slots_in_chunks(bench: Bench) -> None:
    keys = [SlotKey(f"project-{number % 3}", f"key-{number:03}") for number in range(100)]
    await apply(bench, *(Acquire(key, "alice", 5) for key in keys[::2]))
    await apply(bench, *(Acquire(key, "alice", 90 * 86_400) for key in keys[1::2]))
    bench.host.advance(2 * 86_400)

    deleted = [await bench.store.sweep(7) for _ in range(16)]

    assert sum(deleted) == 50
    states = await bench.store.read([Read(key) for key in keys])
    assert [isinstance(state, Held) for state in states] == [False, True] * 50
    assert [await bench.store.sweep(7) for _ in range(16)] == [0] * 16


async def test_the_sweeper_starts_again_at_the_first_slot(bench: Bench) -> None:
    await acquire(bench, key=SlotKey("b", "b"))
    assert await bench.store.sweep(10) == 0
    await acquire(bench, key=SlotKey("a", "a"), ttl_seconds=5)
    bench.host.advance(2 * 86_400)

    assert sum([await bench.store.sweep(1) for _ in range(4)]) == 2


async def test_the_sweeper_under_load_removes_only_what_is_free(bench: Bench) -> None:
    """Dead keys are taken again while they are being swept."""
    keys = [SlotKey("shop", f"key-{number:03}") for number in range(60)]
    last = dict.fromkeys(keys, 0)

    async def hold_some(token: str, part: list[SlotKey]) -> None:
        for key in part:
            granted = await acquire(bench, token, 30, key)
            assert granted.fencing_token > last[key]
            last[key] = granted.fencing_token
            (renewed,) = await apply(bench, Renew(key, token, 30))
            assert isinstance(renewed, Granted)
            assert isinstance(await read(bench, key), Held)

    async def sweep() -> None:
        for _ in range(20):
            await bench.store.sweep(9)

    for round_number in range(3):
        await asyncio.gather(
            sweep(),
            *(hold_some(f"{round_number}-{offset}", keys[offset::4]) for offset in range(4)),
        )
        states = await bench.store.read([Read(key) for key in keys])
        assert all(isinstance(state, Held) for state in states)
        bench.host.advance(2 * 86_400)
    while await bench.store.sweep(60):
        pass
    assert all(state == Free() for state in await bench.store.read([Read(key) for key in keys]))
