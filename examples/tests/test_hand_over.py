import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from running import PATIENCE, line_with, need, requests, show, started, until

from volcano_sdk import VolcanoClient
from volcano_server.testing import VolcanoServer

NAME = "hand-over"
KEY = "migration:shop"


def schema(folder: Path, version: int, fencing_token: int) -> Path:
    file = folder / "schema.json"
    file.write_text(json.dumps({"version": version, "fencing_token": fencing_token}))
    return file


@pytest.mark.timeout(90)
def test_the_application_starts_when_the_migration_has_finished() -> None:
    lines = show(NAME)

    assert [f"migration: step {step} of 3" for step in (1, 2, 3)] == lines[:3]
    assert ["ann: started on schema 3", "bob: started on schema 3"] == sorted(lines[3:])


def test_the_application_waits_without_asking(
    server: VolcanoServer, volcano: VolcanoClient, tmp_path: Path
) -> None:
    file = schema(tmp_path, 2, 1)
    migration = volcano.locks.acquire(KEY, ttl=30)
    with started(server, NAME, "app.mjs", "ann", file) as app:
        until(lambda: requests(server, "acquire", "lock_held") == 2)  # it has tried, and listens
        schema(tmp_path, 3, 1)
        volcano.locks.release(KEY, migration)
        printed, complaints = app.communicate(timeout=PATIENCE)

    assert ("ann: started on schema 3\n", "") == (printed, complaints)
    assert 2 == requests(server, "acquire", "lock_held"), "only the first, and once it listened"
    assert 0 == requests(server, "read"), "it has not asked"


def test_a_migration_that_dies_starts_nobody(server: VolcanoServer, tmp_path: Path) -> None:
    """Its lease lapses; the application looks, and waits for the next one."""
    need(NAME)
    file = tmp_path / "schema.json"
    with (
        ExitStack() as stack,
        started(server, NAME, "migrate.rb", file, STEP_SECONDS="60") as killed,
        VolcanoClient(api_url=server.url, service_key=server.service_key) as volcano,
    ):
        until(lambda: volcano.locks.get(KEY).held)
        app = stack.enter_context(started(server, NAME, "app.mjs", "ann", file))
        until(lambda: requests(server, "events") == 1)  # waits for the lock
        killed.kill()
        server.clock.advance(12)  # its TTL, the grace, and more
        assert "ann: the schema is at 0, and nobody changes it" == line_with(app, "ann")
        until(lambda: requests(server, "events") == 2)  # waits for somebody to begin

        with started(server, NAME, "migrate.rb", file, STEP_SECONDS="0.1") as second:
            assert "ann: started on schema 3" == line_with(app, "ann")
            assert 0 == second.wait(PATIENCE)


def test_a_migration_that_was_asleep_changes_nothing(server: VolcanoServer, tmp_path: Path) -> None:
    need(NAME)
    later = schema(tmp_path, 1, 2**53 - 1)

    with started(server, NAME, "migrate.rb", later, STEP_SECONDS="0") as stale:
        printed, complaints = stale.communicate(timeout=PATIENCE)

    assert ("", "migration: a later migration has been here\n") == (printed, complaints)
    assert 75 == stale.returncode
    assert 1 == json.loads(later.read_text())["version"]


def test_the_migration_does_not_give_up_because_somebody_looks(
    server: VolcanoServer, volcano: VolcanoClient, tmp_path: Path
) -> None:
    looking = volcano.locks.acquire(KEY, ttl=30)
    file = tmp_path / "schema.json"
    with started(server, NAME, "migrate.rb", file, STEP_SECONDS="0") as migration:
        until(lambda: requests(server, "events") == 1)
        volcano.locks.release(KEY, looking)
        printed, complaints = migration.communicate(timeout=PATIENCE)

    assert (3, "") == (len(printed.splitlines()), complaints)
