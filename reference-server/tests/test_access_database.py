"""Projects and credentials in PostgreSQL: what test_access.py says of a file, and replicas."""

import signal
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from postgres import Cluster

from volcano_server.access import Access, AccessError, AccessTables, Caller
from volcano_server.access_database import AccessDatabase
from volcano_server.database import Database, migrate
from volcano_server.problems import INVALID_CREDENTIALS


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


@pytest.fixture
def tables(url: str) -> Iterator[AccessTables]:
    with closing(AccessDatabase(Database.parse(url))) as tables:
        tables.create_project("shop", quota=60)
        yield tables


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_new_key_counts_on_every_replica_after_its_next_refresh(
    tables: AccessTables, url: str
) -> None:
    replicas = [Access(tables=AccessDatabase(Database.parse(url))) for _ in range(2)]
    for access in replicas:
        access.refresh()
    key, id_ = tables.create_key("shop", kind="service")

    for access in replicas:
        assert access.refresh().added == {id_}
        assert access.authenticate(bearer(key)) == Caller("shop", id_, quota=60)
        access.close()


def test_a_revoked_key_is_invalid_after_the_next_refresh(tables: AccessTables) -> None:
    key, id_ = tables.create_key("shop", kind="service")
    access = Access(tables=tables)
    access.refresh()
    tables.revoke_key(id_)

    assert access.refresh().removed == {id_}
    assert access.authenticate(bearer(key)) is INVALID_CREDENTIALS
    assert [each.revoked_at is None for each in tables.keys("shop")] == [False]


def test_other_permissions_and_quotas_reach_the_caller(tables: AccessTables) -> None:
    key, id_ = tables.create_key("shop", kind="service")
    access = Access(tables=tables)

    tables.set_permissions(id_, ())
    tables.set_quota("shop", 7)
    access.refresh()

    caller = access.authenticate(bearer(key))
    assert caller == Caller("shop", id_, permissions=frozenset(), quota=7)
    assert not caller.may_manage_locks()


def test_what_has_not_changed_is_not_read_again(
    tables: AccessTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = Access(tables=tables)
    access.refresh()
    monkeypatch.setattr(AccessDatabase, "callers", lambda _: pytest.fail("read again"))

    access.refresh()


def test_a_key_is_kept_as_its_digest_only(tables: AccessTables, url: str) -> None:
    key, _ = tables.create_key("shop", kind="service")

    with psycopg.connect(url) as sql:
        rows = sql.execute("SELECT credential::text FROM volcano.credential").fetchall()
    assert key not in str(rows)
    assert len(rows) == 1


def test_a_refused_change_changes_nothing(tables: AccessTables) -> None:
    with pytest.raises(AccessError, match="exists already"):
        tables.create_project("shop", quota=1)
    for wrong in (
        lambda: tables.create_key("bank", kind="service"),
        lambda: tables.keys("bank"),
        lambda: tables.set_quota("bank", 1),
        lambda: tables.revoke_key("key_none"),
        lambda: tables.set_permissions("key_none", ()),
    ):
        with pytest.raises(AccessError, match=r"no (service )?(key|project)"):
            wrong()

    assert [(each.name, each.quota) for each in tables.projects()] == [("shop", 60)]
    assert tables.keys() == []


def test_an_anon_key_gets_no_permissions(tables: AccessTables) -> None:
    _, id_ = tables.create_key("shop", kind="anon")

    with pytest.raises(AccessError, match="no service key"):
        tables.set_permissions(id_, ("*",))


def test_a_database_without_tables_is_told_in_a_sentence(url: str) -> None:
    with (
        closing(AccessDatabase(Database.parse(url))) as tables,
        pytest.raises(AccessError, match="projects create"),
    ):
        tables.keys()


def test_an_unreachable_database_is_told_without_the_password() -> None:
    with pytest.raises(AccessError) as told:
        AccessDatabase(Database.parse("postgresql://u:secret@127.0.0.1:1/d")).state()

    assert "secret" not in str(told.value)


def test_a_connection_that_was_ended_is_replaced(tables: AccessTables, url: str) -> None:
    access = Access(tables=tables)
    access.refresh()
    with closing(AccessDatabase(Database.parse(url))) as other:
        key, _ = other.create_key("shop", kind="service")
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    with pytest.raises(AccessError):
        access.refresh()
    access.refresh()

    assert isinstance(access.authenticate(bearer(key)), Caller)


def test_a_frozen_database_holds_nobody_for_ever(
    cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volcano_server.access_database._PATIENCE", 0.3)
    migrate(Database.parse(url))
    access = Access(tables=AccessDatabase(Database.parse(url)))
    access.refresh()
    cluster.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(AccessError):
            access.refresh()
        assert time.monotonic() - started < 3
    finally:
        cluster.signal(signal.SIGCONT)
