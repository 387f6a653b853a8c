# ruff: noqa: ASYNC240 - a test may wait for its own small files
"""What the SQLite store does beyond the contract: its file, its failures, its copies."""

import asyncio
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from volcano_server.clock import ManualClock
from volcano_server.lease import (
    SECOND,
    Acquire,
    Answer,
    Free,
    Granted,
    Held,
    Read,
    Release,
    Renew,
    SlotKey,
    Write,
)
from volcano_server.stores import sqlite
from volcano_server.stores.sqlite import APPLICATION_ID, SqliteStore
from volcano_server.stores.store import (
    NewerSchemaError,
    NotAStoreError,
    StoreBrokenError,
    StoreInUseError,
    StoreOpenError,
    StorePathError,
    StoreUnavailableError,
)

pytestmark = pytest.mark.anyio

NIGHTLY = SlotKey("shop", "nightly")
HOURLY = SlotKey("shop", "hourly")
HOUR = 3600


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def host() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
async def store(path: Path, host: ManualClock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, host)
    await store.open()
    yield store
    await store.close()


async def apply(store: SqliteStore, *commands: Write) -> list[Answer]:
    return await store.apply(commands, lambda: True)


async def acquire(store: SqliteStore, token: str = "alice", key: SlotKey = NIGHTLY) -> Granted:
    (answer,) = await apply(store, Acquire(key, token, 30))
    assert isinstance(answer, Granted), answer
    return answer


async def read(store: SqliteStore, key: SlotKey = NIGHTLY) -> Answer:
    (answer,) = await store.read([Read(key)])
    return answer


async def pragma(store: SqliteStore, text: str) -> object:
    return await store._run(lambda: store._connection.execute(f"PRAGMA {text}").fetchone()[0])


async def trace(store: SqliteStore, seen: list[str]) -> None:
    """Note what the connection is asked, in order; only the first words of each."""

    def note(text: str) -> None:
        seen.append(" ".join(text.split()[:2]))

    await store._run(lambda: store._connection.set_trace_callback(note))


async def open_and_close(path: Path, host: ManualClock) -> None:
    store = SqliteStore(path, host)
    await store.open()
    await store.close()


# One batch.


async def test_each_commit_is_on_disk_and_the_file_is_ours_alone(store: SqliteStore) -> None:
    assert await pragma(store, "synchronous") == 2  # FULL
    assert await pragma(store, "journal_mode") == "wal"
    assert await pragma(store, "locking_mode") == "exclusive"
    assert not store._path.with_name("locks.db-shm").exists()


async def test_only_its_owner_reads_the_file_and_its_copies(path: Path, host: ManualClock) -> None:
    """Lock tokens are in it."""
    before = os.umask(0)
    try:
        store = SqliteStore(path, host)
        await store.open()
        await acquire(store)
        await store.copy_to(path.with_name("copy.db"))
        modes = {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()}
        await store.close()
    finally:
        os.umask(before)

    assert modes == {"locks.db": 0o600, "locks.db-wal": 0o600, "copy.db": 0o600}


async def test_a_batch_of_any_size_is_one_transaction_with_one_load(store: SqliteStore) -> None:
    """And 64 slots are saved by one statement."""
    seen: list[str] = []
    await trace(store, seen)
    for size, saves in ((1, 1), (64, 1), (130, 3)):
        commands = [Acquire(SlotKey("shop", f"{size}-{n}"), "alice", 30) for n in range(size)]
        seen.clear()
        await apply(store, *commands)

        assert seen == [
            "BEGIN IMMEDIATE",
            "SELECT json_group_array(json_array(",
            *["INSERT INTO"] * saves,
            "UPDATE store",
            "COMMIT",
        ]


async def test_a_batch_that_changes_nothing_writes_nothing(store: SqliteStore) -> None:
    await acquire(store)
    seen: list[str] = []
    await trace(store, seen)

    await apply(store, Acquire(NIGHTLY, "bob", 30), Release(NIGHTLY, "bob"))

    assert seen == ["BEGIN IMMEDIATE", "SELECT json_group_array(json_array(", "COMMIT"]


async def test_the_clock_is_read_once_and_within_the_transaction(path: Path) -> None:
    """`expires_at >= send time + TTL` for each of the batch, however long it waited."""
    seen: list[str] = []

    class Host(ManualClock):
        def elapsed(self) -> int:
            seen.append("clock")
            return super().elapsed()

    store = SqliteStore(path, Host())
    await store.open()
    await trace(store, seen)
    seen.clear()

    await apply(store, Acquire(NIGHTLY, "alice", 30), Acquire(HOURLY, "alice", 30))

    assert seen.count("clock") == 1
    assert seen.index("BEGIN IMMEDIATE") < seen.index("clock") < seen.index("INSERT INTO")
    await store.close()


async def test_the_claim_is_taken_right_before_the_commit(store: SqliteStore) -> None:
    seen: list[str] = []
    await trace(store, seen)

    def may_commit() -> bool:
        seen.append("claim")
        return True

    await store.apply([Acquire(NIGHTLY, "alice", 30)], may_commit)

    assert seen[-3:] == ["UPDATE store", "claim", "COMMIT"]


async def test_a_job_that_nobody_waits_for_is_left_out_and_one_that_runs_is_finished(
    store: SqliteStore,
) -> None:
    begun, go = threading.Event(), threading.Event()
    done: list[str] = []

    def running() -> None:
        begun.set()
        go.wait(5)
        done.append("running")

    first = asyncio.create_task(store._run(running))
    second = asyncio.create_task(store._run(lambda: done.append("waiting")))
    third = asyncio.create_task(store._run(lambda: done.append("wanted")))
    await asyncio.to_thread(begun.wait, 5)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    go.set()
    await third

    assert done == ["running", "wanted"]


async def test_what_a_job_raises_is_its_callers_and_the_next_one_is_done(
    store: SqliteStore,
) -> None:
    def failing() -> None:
        raise SystemExit("a fault of ours")

    with pytest.raises(SystemExit):
        await store._run(failing)

    assert await store._run(lambda: "done") == "done"


def test_a_job_that_outlives_its_loop_does_not_end_the_thread(
    path: Path, host: ManualClock
) -> None:
    store = SqliteStore(path, host)
    begun, go = threading.Event(), threading.Event()

    def running() -> None:
        begun.set()
        go.wait(5)

    async def leave() -> None:
        job = asyncio.ensure_future(store._run(running))
        await asyncio.to_thread(begun.wait, 5)
        job.cancel()

    asyncio.run(store.open())
    asyncio.run(leave())
    go.set()

    assert asyncio.run(read(store)) == Free()
    asyncio.run(store.close())


@pytest.mark.parametrize("name", ["locks.db", "none/locks.db"])
async def test_no_thread_outlives_its_store(tmp_path: Path, host: ManualClock, name: str) -> None:
    before = set(threading.enumerate())
    with suppress(StoreOpenError):
        await open_and_close(tmp_path / name, host)

    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


# Failures.


async def test_a_full_disk_refuses_the_batch_and_reads_and_recovers(store: SqliteStore) -> None:
    granted = await acquire(store)
    pages = await pragma(store, "page_count")
    await pragma(store, f"max_page_count = {pages}")
    many = [Acquire(SlotKey("shop", f"key-{number}"), "bob", 30) for number in range(500)]

    with pytest.raises(StoreUnavailableError, match="SQLITE_FULL"):
        await apply(store, Release(NIGHTLY, "alice"), *many)

    assert await read(store) == Held(granted.expires_at, granted.fencing_token)
    assert await read(store, many[0].slot_key) == Free()
    (renewed,) = await apply(store, Renew(NIGHTLY, "alice", 30))
    assert isinstance(renewed, Granted)
    await pragma(store, "max_page_count = 1000000")
    assert all(isinstance(answer, Granted) for answer in await apply(store, *many))


async def test_a_disk_that_takes_no_more_bytes_refuses_and_recovers(
    store: SqliteStore, path: Path
) -> None:
    """The operating system itself refuses to write, as it does on a full disk or quota."""
    granted = await acquire(store)
    many = [Acquire(SlotKey("shop", f"key-{number}"), "bob", 30) for number in range(2000)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 65_536, hard))
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="SQLITE_"):
                await apply(store, Release(NIGHTLY, "alice"), *many)
            assert await read(store) == Held(granted.expires_at, granted.fencing_token)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert all(isinstance(answer, Granted) for answer in await apply(store, *many))
    assert await read(store) == Held(granted.expires_at, granted.fencing_token)


async def test_a_failed_commit_leaves_nothing_behind(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sqlite, "_SAVE_ANCHOR", "UPDATE store SET boot_id = ?, elapsed = ?, now=?/x"
    )
    with pytest.raises(StoreUnavailableError):
        await acquire(store)
    monkeypatch.undo()

    assert await read(store) == Free()
    await acquire(store, "bob")


async def test_a_rollback_that_failed_is_made_up_for_before_the_next_job(
    store: SqliteStore,
) -> None:
    def leave_a_transaction_open() -> None:
        store._connection.execute("BEGIN IMMEDIATE")
        store._connection.execute(
            "INSERT INTO slots VALUES ('shop', 'nightly', 1, 0, 'x', ?, ?)", (10**17, 10**17)
        )

    await store._run(leave_a_transaction_open)
    assert await read(store) == Free()
    await store._run(leave_a_transaction_open)
    await acquire(store)
    await apply(store, Release(NIGHTLY, "alice"))


async def test_a_fault_in_the_middle_of_a_batch_is_rolled_back(store: SqliteStore) -> None:
    def may_commit() -> bool:
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError):
        await store.apply([Acquire(NIGHTLY, "alice", 30)], may_commit)

    assert await read(store) == Free()


async def test_a_sweep_that_failed_looks_at_the_same_slots_again(
    store: SqliteStore, host: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = await acquire(store)
    host.advance(2 * 86_400)
    host.step_wall(-10 * 86_400)
    monkeypatch.setattr(sqlite, "_SAVE_HIGHEST_SWEPT", "UPDATE nothing SET x = ?")
    with pytest.raises(StoreUnavailableError):
        await store.sweep(10)
    monkeypatch.undo()

    assert await store.sweep(10) == 1
    assert (await acquire(store)).fencing_token > granted.fencing_token


# Opening.


async def refused(path: Path) -> StoreOpenError:
    with pytest.raises(StoreOpenError) as caught:
        await SqliteStore(path, ManualClock()).open()
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return caught.value


async def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    error = await refused(tmp_path / "none" / "locks.db")

    assert (type(error), error.exit_status) == (StorePathError, 73)
    assert f"there is no directory {tmp_path / 'none'}" in str(error)


async def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    error = await refused(tmp_path)

    assert (type(error), error.exit_status) == (StorePathError, 73)


async def test_a_database_without_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leases would be gone with the process; that is what the memory store is for."""
    monkeypatch.chdir(tmp_path)
    error = await refused(Path(":memory:"))

    assert (type(error), error.exit_status) == (StorePathError, 73)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
async def test_a_place_where_nobody_can_write_is_refused() -> None:
    error = await refused(Path("/proc/locks.db"))

    assert (type(error), error.exit_status) == (StorePathError, 73)
    assert "not writable" in str(error)


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"x" * 4096])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(
    path: Path, content: bytes
) -> None:
    path.write_bytes(content)

    error = await refused(path)

    assert (type(error), error.exit_status) == (NotAStoreError, 65)
    assert "not a database" in str(error)
    assert path.read_bytes() == content


async def test_a_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE songs (title)")
    other.close()

    error = await refused(path)

    assert (type(error), error.exit_status) == (NotAStoreError, 65)
    assert "another program" in str(error)
    other = sqlite3.connect(path)
    assert other.execute("SELECT name FROM sqlite_schema").fetchall() == [("songs",)]
    other.close()


async def test_a_newer_schema_is_refused_with_both_versions(path: Path, host: ManualClock) -> None:
    await open_and_close(path, host)
    later = sqlite3.connect(path)
    later.execute("PRAGMA user_version = 99")
    later.close()

    error = await refused(path)

    assert (type(error), error.exit_status) == (NewerSchemaError, 65)
    assert "version 99" in str(error)
    assert f"up to version {len(sqlite._migrations())}" in str(error)


async def test_a_damaged_file_is_refused(path: Path, host: ManualClock) -> None:
    await open_and_close(path, host)
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))

    error = await refused(path)

    assert (type(error), error.exit_status) == (NotAStoreError, 65)
    assert "damaged" in str(error)


async def test_a_second_server_is_refused_at_once_and_the_first_goes_on(
    store: SqliteStore, path: Path
) -> None:
    """Already when the first has not answered a single request."""
    error = await refused(path)

    assert (type(error), error.exit_status) == (StoreInUseError, 75)
    assert "another server" in str(error)
    await acquire(store)


async def test_a_second_process_is_refused_at_once(store: SqliteStore, path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from volcano_server.clock import SystemClock\n"
        "from volcano_server.stores.sqlite import SqliteStore\n"
        "from volcano_server.stores.store import StoreInUseError\n"
        "try:\n"
        "    asyncio.run(SqliteStore(pathlib.Path(sys.argv[1]), SystemClock()).open())\n"
        "except StoreInUseError as error:\n"
        "    print(error)\n"
    )
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(path), stdout=subprocess.PIPE
    )
    output, _ = await second.communicate()

    assert output.decode() == (
        f"Cannot open {path}: another server is using it; "
        "stop that one or give this one another file with --store.\n"
    )


async def test_after_a_refusal_the_file_can_be_opened(
    path: Path, host: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_SAVE_ANCHOR", "UPDATE nothing SET x = ?")
    error = await refused(path)
    monkeypatch.undo()

    assert (type(error), error.exit_status) == (StoreBrokenError, 74)
    await open_and_close(path, host)


async def test_a_crash_while_leases_are_moved_moves_them_once(
    path: Path, host: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leases and the clock that they were moved by are one transaction."""
    store = SqliteStore(path, host)
    await store.open()
    await acquire(store)
    await store.close()
    host.reboot()
    host.step_wall(HOUR)
    monkeypatch.setattr(sqlite, "_SAVE_ANCHOR", "UPDATE nothing SET x = ?")
    await refused(path)
    monkeypatch.undo()

    store = SqliteStore(path, host)
    await store.open()

    host.advance(30.999999)
    assert isinstance(await read(store), Held)
    host.advance(0.000001)
    assert await read(store) == Free()
    await store.close()


# Schema.


async def test_the_file_says_what_it_is(store: SqliteStore) -> None:
    assert await pragma(store, "application_id") == APPLICATION_ID
    assert await pragma(store, "user_version") == len(sqlite._migrations())


async def test_a_migration_keeps_what_is_there_and_one_that_fails_changes_nothing(
    path: Path, host: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(path, host)
    await store.open()
    granted = await acquire(store)
    await store.close()
    scripts = sqlite._migrations()
    extra = "ALTER TABLE slots ADD COLUMN note TEXT;"

    monkeypatch.setattr(sqlite, "_migrations", lambda: [*scripts, extra, "SELECT nonsense;"])
    assert isinstance(await refused(path), StoreBrokenError)
    monkeypatch.setattr(sqlite, "_migrations", lambda: [*scripts, extra])
    store = SqliteStore(path, host)
    await store.open()

    assert await pragma(store, "user_version") == len(scripts) + 1
    assert await read(store) == Held(granted.expires_at, granted.fencing_token)
    await store.close()


# Copies.


async def test_a_copy_is_whole_and_opens_as_a_store(
    store: SqliteStore, host: ManualClock, tmp_path: Path
) -> None:
    granted = await acquire(store)

    await store.copy_to(tmp_path / "copy.db")

    await apply(store, Release(NIGHTLY, "alice"))
    copy = SqliteStore(tmp_path / "copy.db", host)
    await copy.open()
    assert await read(copy) == Held(granted.expires_at, granted.fencing_token)
    await copy.close()


async def test_a_copy_never_overwrites(store: SqliteStore, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    target.write_text("precious")

    with pytest.raises(StoreUnavailableError, match="exists already"):
        await store.copy_to(target)

    assert target.read_text() == "precious"


async def test_a_copy_that_fails_leaves_nothing_and_the_store_goes_on(
    store: SqliteStore, tmp_path: Path
) -> None:
    with pytest.raises(StoreUnavailableError):
        await store.copy_to(tmp_path / "none" / "copy.db")

    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(StoreUnavailableError):
            await store.copy_to(tmp_path / "copy.db")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
    await acquire(store)


async def test_a_copy_that_did_not_reach_the_disk_is_taken_back(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sqlite, "_sync", failing)

    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        await store.copy_to(tmp_path / "copy.db")

    assert not list(tmp_path.glob("copy.db*"))


async def test_what_a_killed_copy_left_is_no_obstacle(store: SqliteStore, tmp_path: Path) -> None:
    (tmp_path / "copy.db.partial").write_text("half")

    await store.copy_to(tmp_path / "copy.db")

    assert not (tmp_path / "copy.db.partial").exists()


@pytest.mark.parametrize("set_back", [0, HOUR])
async def test_tokens_of_a_restored_backup_are_above_all_that_were_forgotten(
    store: SqliteStore, host: ManualClock, tmp_path: Path, set_back: int
) -> None:
    """Also when the wall clock was set back while the server ran, before or after the backup."""
    tokens = [(await acquire(store)).fencing_token]
    await store.copy_to(tmp_path / "backup.db")
    for _ in range(3):
        host.advance(60)
        tokens.append((await acquire(store)).fencing_token)
    host.step_wall(-set_back)
    for _ in range(3):
        host.advance(60)
        tokens.append((await acquire(store)).fencing_token)
    host.advance(1)

    restored = SqliteStore(tmp_path / "backup.db", host)
    await restored.open()
    tokens.append((await acquire(restored)).fencing_token)
    tokens.append((await acquire(restored, key=HOURLY)).fencing_token)
    await restored.close()

    assert max(tokens[:-2]) < min(tokens[-2:])
    assert tokens[:-1] == sorted(set(tokens[:-1]))


async def test_a_backup_restored_after_a_reboot_keeps_its_leases_and_its_tokens_rise(
    store: SqliteStore, host: ManualClock, tmp_path: Path
) -> None:
    granted = await acquire(store)
    await store.copy_to(tmp_path / "backup.db")
    host.advance(2 * HOUR)
    forgotten = await acquire(store, "bob")
    host.reboot()
    host.advance(60)

    restored = SqliteStore(tmp_path / "backup.db", host)
    await restored.open()

    held = await read(restored)
    assert isinstance(held, Held)
    assert held.expires_at == granted.expires_at + (2 * HOUR + 60) * SECOND
    host.advance(31)
    assert (await acquire(restored, "carol")).fencing_token > forgotten.fencing_token
    await restored.close()


async def test_a_closed_store_keeps_nobody_waiting(path: Path, host: ManualClock) -> None:
    store = SqliteStore(path, host)
    await store.open()
    await store.close()

    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(store.read([Read(SlotKey("shop", "nightly"))]), 5)
