import json

import pytest
from running import PATIENCE, counted, show, started

from volcano_sdk import LockLease, VolcanoClient
from volcano_server.testing import VolcanoServer

NAME = "child-process"


def handed(lease: LockLease) -> str:
    """The lease as parent.mjs sends it."""
    return json.dumps(
        {"key": lease.key, "token": str(lease.token), "fencingToken": lease.fencing_token}
    )


@pytest.mark.timeout(90)
def test_the_child_works_under_its_parents_lease() -> None:
    lines = show(NAME)

    assert "somebody else is at it" == lines[0]
    assert 1 == counted(lines[:4], "parent: handed over to")
    assert ["child: the same lease", "child: done"] == [
        line for line in lines if line.startswith("child")
    ]


def test_the_child_releases_what_it_was_handed(
    server: VolcanoServer, volcano: VolcanoClient
) -> None:
    lease = volcano.locks.acquire("report:7", ttl=30)
    with started(server, NAME, "child.mjs") as child:
        printed, complaints = child.communicate(handed(lease), timeout=PATIENCE)

    assert ("child: the same lease\nchild: done\n", "", 0) == (
        printed,
        complaints,
        child.returncode,
    )
    assert not volcano.locks.get("report:7").held


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "free"])
def test_a_child_that_comes_too_late_does_nothing(
    server: VolcanoServer, volcano: VolcanoClient, *, taken: bool
) -> None:
    """Whether or not somebody else has taken the key since."""
    lease = volcano.locks.acquire("report:7", ttl=30)
    server.clock.advance(32)
    if taken:
        volcano.locks.acquire("report:7", ttl=30)
    with started(server, NAME, "child.mjs") as child:
        printed, complaints = child.communicate(handed(lease), timeout=PATIENCE)

    assert ("", 1) == (printed, child.returncode)
    assert "handed over too late" in complaints
