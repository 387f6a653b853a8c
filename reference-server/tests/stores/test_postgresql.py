"""What the PostgreSQL store does beyond the contract: beside other replicas, and in trouble."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from histories import Hold, violations
from postgres import Cluster, DatabaseClock

from volcano_server.clock import ManualClock, SystemClock
from volcano_server.database import Database, migrate, migrations
from volcano_server.lease import (
    SECOND,
    Acquire,
    Answer,
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
from volcano_server.problems import LOCK_HELD
from volcano_server.stores import postgresql
from volcano_server.stores.postgresql import Offset, PostgresqlStore, UnknownOutcomeError
from volcano_server.stores.store import (
    NewerSchemaError,
    NotAStoreError,
    StorePathError,
    StoreUnavailableError,
    StoreUnreachableError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # each waits for timeouts or for races

NIGHTLY = SlotKey("shop", "nightly")
HOURLY = SlotKey("shop", "hourly")
IN_TIME = postgresql._JOB + postgresql._CANCEL + 1  # the 1 s is the test machine's


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@asynccontextmanager
async def replicas(url: str, count: int) -> AsyncIterator[list[PostgresqlStore]]:
    stores = [PostgresqlStore(Database.parse(url), SystemClock()) for _ in range(count)]
    await asyncio.gather(*(store.open() for store in stores))
    yield stores
    await asyncio.gather(*(store.close() for store in stores))


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresqlStore]:
    async with replicas(url, 1) as (store,):
        yield store


@pytest.fixture
def sql(url: str, store: PostgresqlStore) -> Any:
    """Somebody else's connection to the store's database."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


async def apply(store: PostgresqlStore, *commands: Write) -> list[Answer]:
    return await store.apply(commands, lambda: True)


async def acquire(
    store: PostgresqlStore, token: str = "alice", key: SlotKey = NIGHTLY, ttl_seconds: int = 30
) -> Granted:
    (answer,) = await apply(store, Acquire(key, token, ttl_seconds))
    assert isinstance(answer, Granted), answer
    return answer


async def read(store: PostgresqlStore, key: SlotKey = NIGHTLY) -> Answer:
    (answer,) = await store.read([Read(key)])
    return answer


# Replicas.


async def test_two_replicas_that_race_for_a_new_key_make_one_lease(url: str) -> None:
    async with replicas(url, 2) as stores:
        for number in range(50):
            key = SlotKey("shop", f"key-{number}")

            answers = await asyncio.gather(
                *(
                    apply(store, Acquire(key, token, 30))
                    for store, token in zip(stores, ("alice", "bob"), strict=True)
                )
            )

            outcomes = [answer for (answer,) in answers]
            assert outcomes.count(LOCK_HELD) == 1, outcomes
            assert sum(isinstance(outcome, Granted) for outcome in outcomes) == 1


@pytest.mark.parametrize("known", [10, 0, 5], ids=["old", "new", "old and new"])
async def test_batches_in_opposite_orders_stopped_half_way_do_not_deadlock(
    url: str, cluster: Cluster, patient: None, known: int
) -> None:
    """Whatever the order in which callers name the keys, neither batch has what the other needs."""
    keys = [SlotKey("shop", f"key-{number}") for number in range(10)]
    async with replicas(url, 2) as (one, other):
        await apply(one, *(Acquire(key, "carol", 30) for key in keys[:known]))
        await apply(one, *(Release(key, "carol") for key in keys[:known]))
        with psycopg.connect(url) as somebody:
            somebody.execute(_TAKE_ROW, (keys[5].key,))
            batches = [
                asyncio.create_task(apply(one, *(Acquire(key, "alice", 30) for key in keys))),
                asyncio.create_task(apply(other, *(Acquire(key, "bob", 30) for key in keys[::-1]))),
            ]
            await until_waiting(cluster, url, 2)
            somebody.rollback()

            answers = await asyncio.gather(*batches)

    first, second = answers if isinstance(answers[0][0], Granted) else answers[::-1]
    assert all(isinstance(answer, Granted) for answer in first)
    assert second == [LOCK_HELD] * 10
    assert await deadlocks(cluster, url) == 0


async def test_replicas_whose_batches_overlap_wait_and_never_deadlock(
    url: str, cluster: Cluster, patient: None
) -> None:
    """Old keys and new ones, each replica's in another order."""
    history: list[Hold] = []

    async def fight(store: PostgresqlStore, token: str, order: int) -> None:
        for number in range(20):
            keys = [SlotKey("shop", f"key-{(number // 4) * 5 + each}") for each in range(10)]
            asked_at = time.monotonic()
            answers = await apply(store, *(Acquire(key, token, 600) for key in keys[::order]))
            told_at = time.monotonic()
            history.extend(
                Hold(key.key, answer.fencing_token, asked_at, told_at, told_at)
                for key, answer in zip(keys[::order], answers, strict=True)
                if isinstance(answer, Granted)
            )
            await apply(store, *(Release(key, token) for key in keys[::-order]))

    async with replicas(url, 3) as stores:
        await asyncio.gather(
            *(fight(store, f"holder-{n}", 1 - 2 * (n % 2)) for n, store in enumerate(stores))
        )

    # Who wins is chance: one replica may have all of them.  Each key is granted at least once.
    assert {hold.key for hold in history} == {f"key-{number}" for number in range(30)}
    assert violations(history) == []
    assert await deadlocks(cluster, url) == 0


_TAKE_ROW = b"""
INSERT INTO volcano.slots (project, key, fencing_token, changed_at) VALUES ('shop', %s, 1, 1)
ON CONFLICT (project, key) DO UPDATE SET fencing_token = excluded.fencing_token
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that wait for as long as the test does, however slow the machine."""
    monkeypatch.setattr(postgresql, "_JOB", 50.0)
    monkeypatch.setattr(postgresql, "_SET", b"SELECT set_config('lock_timeout', '50s', true)")


async def until_waiting(cluster: Cluster, url: str, count: int) -> None:
    """Until so many sessions of the database wait for a lock."""
    query = (
        "SELECT count(*) FROM pg_stat_activity"
        f" WHERE datname = '{url.rpartition('/')[2]}' AND wait_event_type = 'Lock'"
    )
    while await asyncio.to_thread(cluster.value, query) != count:
        pass


async def deadlocks(cluster: Cluster, url: str) -> object:
    """How often PostgreSQL ended one, tried again unnoticed or not; once all sessions are gone."""
    name = url.rpartition("/")[2]
    sessions = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"
    while await asyncio.to_thread(cluster.value, sessions) != 0:
        pass
    query = f"SELECT deadlocks FROM pg_stat_database WHERE datname = '{name}'"
    return await asyncio.to_thread(cluster.value, query)


async def test_a_batch_waits_for_the_rows_that_another_replica_has_locked(
    url: str, cluster: Cluster, patient: None
) -> None:
    async with replicas(url, 2) as (one, other):
        granted = await acquire(one)
        with psycopg.connect(url) as somebody:
            somebody.execute("SELECT FROM volcano.slots FOR UPDATE")
            waiting = asyncio.create_task(apply(other, Release(NIGHTLY, "alice")))
            await until_waiting(cluster, url, 1)
            assert await read(other) == Held(granted.expires_at, granted.fencing_token)
            assert not waiting.done()
            somebody.rollback()

            assert await waiting == [Released()]


async def test_a_replica_that_freezes_with_rows_locked_is_thrown_out(
    store: PostgresqlStore, url: str
) -> None:
    await acquire(store)
    async with replicas(url, 1) as (frozen,):
        has_locked = asyncio.Event()

        async def freeze(link: psycopg.AsyncConnection[Any]) -> None:
            await link.execute(postgresql._BEGIN)
            await link.execute(postgresql._SET)
            await link.execute(b"SELECT FROM volcano.slots FOR UPDATE")
            has_locked.set()
            await asyncio.sleep(10)

        task = asyncio.create_task(frozen._writing.run(freeze))
        await has_locked.wait()
        started = time.monotonic()

        assert await apply(store, Release(NIGHTLY, "alice")) == [Released()]

        assert time.monotonic() - started < IN_TIME
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_replica_holds_four_connections_however_many_ask(
    store: PostgresqlStore, sql: Any
) -> None:
    jobs = [
        job
        for number in range(20)
        for job in (
            apply(store, Acquire(SlotKey("shop", f"key-{number}"), "alice", 30)),
            store.read([Read(NIGHTLY)]),
            store.sweep(10),
            store.add({("shop", number): 1}),
        )
    ]
    await asyncio.gather(*jobs)

    ((count,),) = sql.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'volcano-server'"
        " AND datname = current_database()"
    ).fetchall()
    assert count == 4


async def test_replicas_sweep_side_by_side(url: str) -> None:
    host = DatabaseClock(url)
    stores = [PostgresqlStore(Database.parse(url), host) for _ in range(3)]
    for store in stores:
        await store.open()
    keys = [SlotKey("shop", f"key-{number:03}") for number in range(100)]
    granted = await apply(stores[0], *(Acquire(key, "alice", 30) for key in keys))
    host.advance(2 * 86_400)

    deleted = await asyncio.gather(*(store.sweep(7) for _ in range(16) for store in stores))

    assert sum(deleted) == 100
    host.step_wall(-10 * 86_400)
    again = await acquire(stores[2], key=keys[0])
    tokens = [answer.fencing_token for answer in granted if isinstance(answer, Granted)]
    assert again.fencing_token > max(tokens)
    for store in stores:
        await store.close()
    host.close()


async def test_counts_of_replicas_add_up(url: str) -> None:
    async with replicas(url, 2) as (one, other):
        assert await one.add({("shop", 7): 3, ("bank", 7): 0}) == {("shop", 7): 3, ("bank", 7): 0}
        assert await other.add({("shop", 7): 4, ("shop", 8): 1}) == {("shop", 7): 7, ("shop", 8): 1}
        assert await one.add({("shop", 100): 1}) == {("shop", 100): 1}
        assert await one.add({("shop", 7): 1}) == {("shop", 7): 1}  # forgotten meanwhile


# The clock.


class Moved:
    """A store whose database's time a test moves; `steps`: what was said of its clock."""

    def __init__(self, url: str) -> None:
        self.host = DatabaseClock(url)
        self.steps: list[float] = []
        self.store = PostgresqlStore(
            Database.parse(url), self.host, on_clock_step=self.steps.append
        )


@pytest.fixture
async def moved(url: str) -> AsyncIterator[Moved]:
    moved = Moved(url)
    await moved.store.open()
    yield moved
    await moved.store.close()
    moved.host.close()


async def test_the_clock_is_read_after_the_rows_are_locked(
    moved: Moved, url: str, cluster: Cluster, patient: None
) -> None:
    await acquire(moved.store)
    with psycopg.connect(url) as somebody:
        somebody.execute("SELECT FROM volcano.slots FOR UPDATE")
        waiting = asyncio.create_task(apply(moved.store, Renew(NIGHTLY, "alice", 60)))
        await until_waiting(cluster, url, 1)
        moved.host.advance(10)
        somebody.rollback()

    (renewed,) = await waiting

    assert isinstance(renewed, Granted)
    assert renewed.expires_at == moved.host.wall() + 60 * SECOND


async def test_a_row_never_goes_back_in_time(moved: Moved) -> None:
    granted = await acquire(moved.store)
    moved.host.step_wall(-20)

    (renewed,) = await apply(moved.store, Renew(NIGHTLY, "alice", 40))

    assert isinstance(renewed, Granted)
    assert renewed.expires_at == granted.expires_at + 10 * SECOND
    assert renewed.expires_in == 40 * SECOND
    moved.host.advance(60.999999)
    assert isinstance(await read(moved.store), Held)
    moved.host.advance(0.000001)
    assert await read(moved.store) == Free()


async def test_the_tokens_of_a_swept_key_rise_with_the_clock_set_back(moved: Moved) -> None:
    before = await acquire(moved.store)
    moved.host.advance(2 * 86_400)
    assert await moved.store.sweep(10) == 1
    moved.host.step_wall(-10 * 86_400)

    assert (await acquire(moved.store)).fencing_token > before.fencing_token


@pytest.mark.parametrize(("seconds", "heard"), [(0.4, []), (1, [1]), (-1, [-1]), (3600, [3600])])
async def test_a_step_of_the_databases_clock_is_told(
    moved: Moved, seconds: float, heard: list[float]
) -> None:
    await acquire(moved.store)
    moved.host.advance(1000)
    await read(moved.store)

    moved.host.step_wall(seconds)

    await read(moved.store)
    await acquire(moved.store)
    assert moved.steps == heard


@pytest.mark.parametrize(
    ("earlier", "later", "step"),
    [
        (Offset(10, 20), Offset(15, 30), 0),
        (Offset(10, 20), Offset(20, 25), 0),
        (Offset(10, 20), Offset(21, 25), 1),
        (Offset(10, 20), Offset(0, 10), 0),
        (Offset(10, 20), Offset(0, 7), -3),
    ],
)
def test_a_step_is_what_two_looks_cannot_both_allow(
    earlier: Offset, later: Offset, step: int
) -> None:
    assert later.step_from(earlier) == step


# Trouble.


async def test_a_connection_that_was_ended_is_replaced_unnoticed(
    store: PostgresqlStore, sql: Any
) -> None:
    granted = await acquire(store)
    await read(store)

    sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'volcano-server' AND datname = current_database()"
    )

    assert await read(store) == Held(granted.expires_at, granted.fencing_token)
    assert await apply(store, Release(NIGHTLY, "alice")) == [Released()]


async def test_a_row_that_stays_locked_is_a_503_in_time(store: PostgresqlStore, url: str) -> None:
    await acquire(store)
    with psycopg.connect(url) as somebody:
        somebody.execute("SELECT FROM volcano.slots FOR UPDATE")
        started = time.monotonic()

        with pytest.raises(StoreUnavailableError, match="55P03"):
            await apply(store, Release(NIGHTLY, "alice"))

        assert time.monotonic() - started < IN_TIME
    assert await apply(store, Release(NIGHTLY, "alice")) == [Released()]


async def test_a_frozen_primary_is_a_503_in_time_and_comes_back(
    store: PostgresqlStore, cluster: Cluster
) -> None:
    granted = await acquire(store)
    await read(store)
    cluster.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        outcomes = await asyncio.gather(
            apply(store, Renew(NIGHTLY, "alice", 60)), read(store), return_exceptions=True
        )
        assert time.monotonic() - started < IN_TIME
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailableError] * 2
    finally:
        cluster.signal(signal.SIGCONT)

    answer = await until_available(store)
    assert isinstance(answer, Held)
    assert answer.fencing_token == granted.fencing_token


async def until_available(store: PostgresqlStore) -> Answer:
    until = time.monotonic() + 10
    while True:
        try:
            return await read(store)
        except StoreUnavailableError:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)


async def test_a_commit_without_its_standby_is_unknown_and_leaves_no_session(
    store: PostgresqlStore, cluster: Cluster, sql: Any
) -> None:
    """Cancelled, PostgreSQL commits without the standby and says so in a warning only."""
    await acquire(store)
    cluster.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    cluster.execute("SELECT pg_reload_conf()")
    try:
        started = time.monotonic()
        with pytest.raises(UnknownOutcomeError, match="synchronous replication"):
            while True:  # the first ones may come before the reload
                await apply(store, Renew(NIGHTLY, "alice", 30))
        assert time.monotonic() - started < IN_TIME
        ((stuck,),) = sql.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        ).fetchall()
        assert stuck == 0
    finally:
        cluster.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")

    await acquire(store)


async def test_what_refuses_writes_refuses_one_that_changes_nothing(
    store: PostgresqlStore, sql: Any, url: str
) -> None:
    """As /readyz tries it."""
    sql.execute(f"ALTER DATABASE {sql.info.dbname} SET default_transaction_read_only = on")
    async with replicas(f"{url}?target_session_attrs=any", 1) as (reader,):
        assert await read(reader) == Free()
        with pytest.raises(StoreUnavailableError, match="25006"):
            await apply(reader, ForceRelease(NIGHTLY))


async def test_a_disk_that_is_full_is_a_503_and_reads_go_on(
    store: PostgresqlStore, sql: Any
) -> None:
    granted = await acquire(store)
    raise_on_write(sql, "RAISE EXCEPTION 'no space left' USING ERRCODE = '53100'")

    with pytest.raises(StoreUnavailableError, match="no space left"):
        await apply(store, Release(NIGHTLY, "alice"))

    assert await read(store) == Held(granted.expires_at, granted.fencing_token)
    sql.execute("DROP FUNCTION moody CASCADE")
    assert await apply(store, Release(NIGHTLY, "alice")) == [Released()]


@pytest.mark.parametrize("state", ["40001", "40P01"])
async def test_a_batch_that_the_database_gave_up_is_decided_again(
    store: PostgresqlStore, sql: Any, state: str
) -> None:
    sql.execute("CREATE SEQUENCE tries")
    raise_on_write(
        sql, f"IF nextval('tries') < 4 THEN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END IF"
    )
    claims = iter([True])  # asked once, however many tries it takes

    answers = await store.apply([Acquire(NIGHTLY, "alice", 30)], lambda: next(claims))

    assert isinstance(answers[0], Granted)
    assert next(claims, None) is None


async def test_a_batch_that_is_given_up_for_ever_is_a_503(store: PostgresqlStore, sql: Any) -> None:
    raise_on_write(sql, "RAISE EXCEPTION 'x' USING ERRCODE = '40001'")
    started = time.monotonic()

    with pytest.raises(StoreUnavailableError, match="40001"):
        await acquire(store)

    assert time.monotonic() - started < IN_TIME
    assert await read(store) == Free()


def raise_on_write(sql: Any, statement: str) -> None:
    sql.execute(
        "CREATE FUNCTION moody() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {statement}; RETURN NEW; END $$"
    )
    sql.execute(
        "CREATE TRIGGER moody BEFORE INSERT OR UPDATE ON volcano.slots"
        " FOR EACH ROW EXECUTE FUNCTION public.moody()"
    )


async def test_a_commit_is_durable_whatever_the_databases_default(
    store: PostgresqlStore, sql: Any, url: str
) -> None:
    sql.execute("CREATE TABLE seen (setting text)")
    raise_on_write(sql, "INSERT INTO public.seen SELECT current_setting('synchronous_commit')")
    name = sql.info.dbname
    for default in ("off", "remote_apply"):
        sql.execute(f"ALTER DATABASE {name} SET synchronous_commit = {default}")
        async with replicas(url, 1) as (fresh,):
            await acquire(fresh, key=SlotKey("shop", default))

    assert sql.execute("SELECT setting FROM seen").fetchall() == [("on",), ("remote_apply",)]


async def test_isolation_is_ours_whatever_the_databases_default(
    store: PostgresqlStore, sql: Any, url: str
) -> None:
    sql.execute(
        f"ALTER DATABASE {sql.info.dbname} SET default_transaction_isolation = serializable"
    )
    sql.execute("CREATE TABLE seen (setting text)")
    raise_on_write(sql, "INSERT INTO public.seen SELECT current_setting('transaction_isolation')")

    async with replicas(url, 1) as (fresh,):
        await acquire(fresh)

    assert sql.execute("SELECT setting FROM seen").fetchall() == [("read committed",)]


# A commit whose answer is lost.


class Wire:
    """Between store and database; `lose`: what becomes of a commit."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.lose = ""
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """The port."""
        server = await asyncio.start_server(self._start, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
        server.close()
        await asyncio.gather(*self._tasks)

    def _start(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.create_task(self._handle(near, back)))

    async def _handle(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, forth = await asyncio.open_connection("127.0.0.1", self._port)
        answers = asyncio.create_task(self._copy(far, back))
        try:
            while data := await near.read(1 << 20):
                commits = b"COMMIT\0" in data and b"volcano.slots" in data
                if commits and self.lose == "request":
                    break
                if commits and self.lose == "answer":
                    answers.cancel()
                    await asyncio.gather(answers, return_exceptions=True)
                    forth.write(data)
                    await far.read(1 << 20)  # it was done
                    break
                forth.write(data)
        finally:
            answers.cancel()
            for each in (forth, back):
                each.close()
                await asyncio.gather(each.wait_closed(), return_exceptions=True)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 20):
            target.write(data)
        target.close()


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_a_commit_without_an_answer_is_unknown_and_the_retry_resolves_it(
    url: str, cluster: Cluster, lost: str
) -> None:
    wire = Wire(cluster.port)
    async with (
        wire.listening() as port,
        replicas(url.replace(str(cluster.port), str(port)), 1) as (store,),
    ):
        wire.lose = lost
        with pytest.raises(UnknownOutcomeError):
            await apply(store, Acquire(NIGHTLY, "alice", 30))
        wire.lose = ""

        after = await read(store)

        assert isinstance(after, Held if lost == "answer" else Free)
        again = await acquire(store)
        assert isinstance(after, Free) or again.fencing_token == after.fencing_token


# Opening.


async def test_replicas_that_start_at_once_make_the_tables_once(url: str) -> None:
    async with replicas(url, 6) as stores:
        await acquire(stores[0])

    with psycopg.connect(url) as sql:
        found = sql.execute("SELECT version FROM volcano.migrations ORDER BY version").fetchall()
    assert found == [(number + 1,) for number in range(len(migrations()))]


async def test_a_newer_schema_is_refused_while_who_runs_goes_on(
    store: PostgresqlStore, sql: Any, url: str
) -> None:
    """A rolling upgrade: what the newer server adds is not in the way of the older ones."""
    sql.execute("ALTER TABLE volcano.slots ADD COLUMN note text")
    sql.execute("INSERT INTO volcano.migrations (version) VALUES (99)")

    await acquire(store)
    with pytest.raises(NewerSchemaError, match=r"version 99, .* up to version"):
        migrate(Database.parse(url))


async def test_another_programs_schema_is_refused(url: str) -> None:
    with psycopg.connect(url) as sql:
        sql.execute("CREATE SCHEMA volcano")
        sql.execute("CREATE TABLE volcano.slots (lava integer)")

    with pytest.raises(NotAStoreError, match="not ours"):
        migrate(Database.parse(url))


def test_what_cannot_be_opened_is_a_sentence_without_the_password(url: str) -> None:
    with pytest.raises(StoreUnreachableError) as unreachable:
        migrate(Database.parse("postgresql://u:secret@127.0.0.1:1/d"))
    with pytest.raises(StoreUnreachableError, match="no_such_database"):
        migrate(Database.parse(url.rpartition("/")[0] + "/no_such_database"))

    assert "secret" not in str(unreachable.value)
    assert "secret" not in repr(Database.parse("postgresql://u:secret@127.0.0.1:1/d"))


def test_a_role_without_rights_is_told_so(cluster: Cluster, url: str) -> None:
    cluster.execute("DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN")

    with pytest.raises(StorePathError, match="permission denied"):
        migrate(Database.parse(url.replace("postgres@", "guest@")))


def test_a_url_that_libpq_does_not_understand_is_refused_without_quoting_it() -> None:
    with pytest.raises(ValueError, match="no connection URL") as refused:
        Database.parse("postgresql://u:secret@h/d?frob=1")

    assert "secret" not in str(refused.value)


async def test_of_several_hosts_the_one_that_takes_writes_is_used(
    store: PostgresqlStore, cluster: Cluster, url: str
) -> None:
    hosts = url.replace(f"127.0.0.1:{cluster.port}", f"127.0.0.1:1,127.0.0.1:{cluster.port}")

    async with replicas(hosts, 1) as (other,):
        granted = await acquire(other)

    assert await read(store) == Held(granted.expires_at, granted.fencing_token)


async def test_the_host_clock_is_not_asked_for_the_time_of_day(url: str) -> None:
    """The replicas' own clocks may be anything."""
    wrong = PostgresqlStore(Database.parse(url), ManualClock(wall=0))
    await wrong.open()

    granted = await acquire(wrong)

    assert abs(granted.fencing_token - time.time() * SECOND) < 60 * SECOND
    await wrong.close()
