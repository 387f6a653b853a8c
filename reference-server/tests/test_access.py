"""Who may do what, and how a change on disk reaches a running server."""

import os
import sqlite3
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from volcano_server.access import Access, AccessError, AccessFile, Caller, Changes, digest
from volcano_server.problems import AUTHENTICATION_REQUIRED, INVALID_CREDENTIALS

FIXED = Caller("dev", "dev-service")


@pytest.fixture
def file(tmp_path: Path) -> AccessFile:
    file = AccessFile.beside(tmp_path / "locks.db")
    file.create_project("shop", quota=60)
    return file


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_the_file_lies_beside_the_locks() -> None:
    assert AccessFile.beside(Path("/data/locks.db")).path == Path("/data/locks.access.db")
    assert AccessFile.beside(Path("/data/locks")).path == Path("/data/locks.access.db")


@pytest.mark.parametrize(
    "authorization",
    [None, b"", b"Bearer", b"Bearer ", b"Basic sk-fixed", b"sk-fixed", b"Bearersk-fixed"],
)
def test_without_a_bearer_credential_one_is_asked_for(authorization: bytes | None) -> None:
    access = Access({"sk-fixed": FIXED})

    assert access.authenticate(authorization) is AUTHENTICATION_REQUIRED


def test_the_scheme_may_be_in_any_case() -> None:
    access = Access({"sk-fixed": FIXED})

    assert access.authenticate(b"bearer  sk-fixed") == FIXED
    assert access.authenticate(b"BEARER sk-fixed") == FIXED


@pytest.mark.parametrize(
    "key", ["sk-other", "sk-fixe", "SK-FIXED", "sk-fixed x", "sk-fixed,sk-fixed"]
)
def test_an_unknown_key_is_invalid(key: str) -> None:
    assert Access({"sk-fixed": FIXED}).authenticate(bearer(key)) is INVALID_CREDENTIALS


def test_a_new_key_counts_after_the_next_refresh(file: AccessFile) -> None:
    access = Access(tables=file)
    access.refresh()
    key, id_ = file.create_key("shop", kind="service")

    changes = access.refresh()

    assert changes.added == {id_}
    assert access.authenticate(bearer(key)) == Caller("shop", id_, quota=60)


def test_a_revoked_key_is_invalid_after_the_next_refresh(file: AccessFile) -> None:
    key, id_ = file.create_key("shop", kind="service")
    access = Access(tables=file)
    access.refresh()
    file.revoke_key(id_)

    changes = access.refresh()

    assert changes.removed == {id_}
    assert access.authenticate(bearer(key)) is INVALID_CREDENTIALS


def test_a_change_within_one_tick_of_the_files_times_is_seen(file: AccessFile) -> None:
    """Two writes may leave the same size and times; the file is young, so it is read again."""
    _, first = file.create_key("shop", kind="service")
    access = Access(tables=file)
    access.refresh()
    times = file.path.stat()
    file.revoke_key(first)
    os.utime(file.path, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert access.refresh().removed == {first}


def test_a_file_that_is_long_unchanged_is_not_read_again(
    file: AccessFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = Access(tables=file)
    os.utime(file.path, (1_000_000_000, 1_000_000_000))
    access.refresh()
    monkeypatch.setattr(AccessFile, "callers", lambda _: pytest.fail("read again"))

    assert access.refresh().added == set()


def test_a_file_that_could_not_be_read_is_read_again_though_unchanged(
    file: AccessFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was locked for long, say."""
    access = Access(tables=file)
    access.refresh()
    _, id_ = file.create_key("shop", kind="service")
    os.utime(file.path, (1_000_000_000, 1_000_000_000))

    def fail(_: AccessFile) -> NoReturn:
        raise AccessError("busy", 74)

    with monkeypatch.context() as patched, pytest.raises(AccessError):
        patched.setattr(AccessFile, "callers", fail)
        access.refresh()

    assert access.refresh().added == {id_}


def test_a_change_during_a_refresh_is_seen_by_the_next_one(
    file: AccessFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, id_ = file.create_key("shop", kind="service")
    access = Access(tables=file)
    read = AccessFile.callers

    def read_before_a_change(self: AccessFile) -> dict[bytes, Caller]:
        found = read(self)
        file.revoke_key(id_)
        os.utime(file.path, (1_000_000_000, 1_000_000_000))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(AccessFile, "callers", read_before_a_change)
        assert access.refresh().added == {id_}

    assert access.refresh().removed == {id_}


def test_a_changed_quota_reaches_the_caller(file: AccessFile) -> None:
    key, id_ = file.create_key("shop", kind="service")
    access = Access(tables=file)
    access.refresh()
    file.set_quota("shop", 0)

    changes = access.refresh()

    assert changes == Changes(changed=frozenset({id_}))
    assert access.authenticate(bearer(key)) == Caller("shop", id_, quota=0)


def test_a_fixed_key_needs_no_file_and_stays(file: AccessFile) -> None:
    access = Access({"sk-fixed": FIXED}, tables=file)
    access.refresh()

    assert access.authenticate(b"Bearer sk-fixed") == FIXED


def test_a_file_that_is_not_there_is_no_credentials(tmp_path: Path) -> None:
    access = Access(tables=AccessFile(tmp_path / "none.db"))
    access.refresh()

    assert access.authenticate(b"Bearer sk-any") is INVALID_CREDENTIALS
    assert not (tmp_path / "none.db").exists()


def test_an_unreadable_file_leaves_what_was_read(file: AccessFile) -> None:
    key, id_ = file.create_key("shop", kind="service")
    access = Access(tables=file)
    access.refresh()
    file.path.write_bytes(b"no database at all" * 100)

    with pytest.raises(AccessError):
        access.refresh()
    assert access.authenticate(bearer(key)) == Caller("shop", id_, quota=60)


@pytest.mark.parametrize(
    ("kind", "permissions", "may"),
    [
        ("service", ("locks.manage",), True),
        ("service", ("*",), True),
        ("service", ("files.read", "locks.manage"), True),
        ("service", (), False),
        ("service", ("locks.read",), False),
        ("anon", ("locks.manage",), False),
    ],
)
def test_who_may_manage_locks(
    file: AccessFile, kind: str, permissions: tuple[str, ...], may: bool
) -> None:
    key, _ = file.create_key("shop", kind=kind, permissions=permissions)  # type: ignore[arg-type]

    caller = file.callers()[digest(key.encode())]

    assert caller.may_manage_locks() is may


def test_an_anon_key_never_manages_locks_whatever_its_row_says() -> None:
    assert not Caller("shop", "key_1", "anon", frozenset({"*"})).may_manage_locks()


def test_keys_are_long_random_and_kept_nowhere(file: AccessFile) -> None:
    service, _ = file.create_key("shop", kind="service")
    anon, _ = file.create_key("shop", kind="anon")

    assert service.startswith("sk-")
    assert anon.startswith("ak-")
    assert min(len(service), len(anon)) >= 3 + 43
    content = file.path.read_bytes()
    assert service.encode() not in content
    assert service[3:].encode() not in content
    assert digest(service.encode()) in content


def test_a_list_of_keys_shows_ids_and_states(file: AccessFile) -> None:
    _, first = file.create_key("shop", kind="service")
    _, second = file.create_key("shop", kind="anon")
    file.revoke_key(first)

    listed = {each.id: each for each in file.keys("shop")}

    assert set(listed) == {first, second}
    assert listed[first].revoked_at is not None
    assert listed[second].revoked_at is None
    assert listed[first].permissions == ("locks.manage",)
    assert listed[second].permissions == ()


def test_revoking_twice_keeps_the_first_time(file: AccessFile) -> None:
    _, id_ = file.create_key("shop", kind="service")
    file.revoke_key(id_)
    database = sqlite3.connect(file.path)
    database.execute("update credential set revoked_at = 5")
    database.commit()
    database.close()

    file.revoke_key(id_)

    assert file.keys()[0].revoked_at == 5


def test_only_its_owner_reads_the_file(file: AccessFile) -> None:
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_the_journal_is_a_rollback_journal(file: AccessFile) -> None:
    """A WAL would leave two more files, and a reader that cannot write would fail."""
    database = sqlite3.connect(file.path)
    assert database.execute("pragma journal_mode").fetchone() == ("delete",)
    database.close()


def test_unknown_names_are_refused_in_a_sentence(file: AccessFile) -> None:
    for call in (
        lambda: file.create_key("nope", kind="service"),
        lambda: file.keys("nope"),
        lambda: file.set_quota("nope", 1),
    ):
        with pytest.raises(AccessError, match="there is no project 'nope'") as refusal:
            call()
        assert refusal.value.exit_status == 67
    with pytest.raises(AccessError, match="no key has the id 'key_0'"):
        file.revoke_key("key_0")


def test_a_project_is_created_once(file: AccessFile) -> None:
    with pytest.raises(AccessError, match="the project 'shop' exists already"):
        file.create_project("shop")

    assert [each.quota for each in file.projects()] == [60]


def test_a_failed_change_changes_nothing(file: AccessFile) -> None:
    with pytest.raises(AccessError):
        file.create_key("nope", kind="service")

    assert file.keys() == []


def test_a_file_of_a_newer_version_is_refused(file: AccessFile) -> None:
    database = sqlite3.connect(file.path)
    database.execute("pragma user_version = 99")
    database.close()

    with pytest.raises(AccessError, match="has schema 99, written by a newer") as refusal:
        file.callers()
    assert refusal.value.exit_status == 65


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "locks.access.db"
    path.write_text("shopping list\n" * 100)
    file = AccessFile(path)

    for call in (file.callers, file.projects, file.keys, lambda: file.create_project("shop")):
        with pytest.raises(AccessError, match="is not a file of volcano-server credentials"):
            call()


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "locks.access.db"
    database = sqlite3.connect(path)
    database.execute("create table shopping (item)")
    database.commit()
    database.close()

    with pytest.raises(AccessError, match="is not a file of volcano-server credentials"):
        AccessFile(path).create_project("shop")
    database = sqlite3.connect(path)
    assert database.execute("select name from sqlite_schema").fetchall() == [("shopping",)]
    database.close()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"cannot write .*/none/locks.access.db: No such file"):
        AccessFile.beside(tmp_path / "none" / "locks.db").create_project("shop")


def test_a_refused_list_before_the_first_project_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"projects create NAME. makes it"):
        AccessFile(tmp_path / "locks.access.db").keys()
