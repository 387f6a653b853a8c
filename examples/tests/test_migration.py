import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from running import load, show


@pytest.mark.timeout(90)
def test_each_step_runs_once_and_every_instance_waits_for_the_schema() -> None:
    lines = show("migration")

    assert 4 == len(lines)
    assert [] == [line for line in lines if "steps applied, the schema is at 3" not in line]
    assert 3 == sum(int(line.split()[0]) for line in lines)


def test_an_instance_that_slept_through_its_lease_applies_nothing(tmp_path: Path) -> None:
    migrate = load("migration", "migrate")
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as database:
        migrate.apply(database, 0, fencing_token=7)
        migrate.apply(database, 1, fencing_token=8)

        with pytest.raises(migrate.StaleWriteError):
            migrate.apply(database, 2, fencing_token=7)
        with pytest.raises(migrate.StaleWriteError):
            migrate.apply(database, 1, fencing_token=9)

        assert 2 == migrate.version(database)
