"""Every row of the truth table, and what a batch adds to it."""

import json
from pathlib import Path
from typing import Any

import pytest

from volcano_server.lease import (
    DAY,
    NEVER_HELD,
    SECOND,
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Free,
    Granted,
    Held,
    Lease,
    Read,
    Release,
    Released,
    Renew,
    Slot,
    SlotKey,
    decide,
    decide_all,
)
from volcano_server.problems import LOCK_HELD, LOCK_OWNERSHIP_LOST, Problem

TABLE = Path(__file__).parents[2] / "conformance" / "tables" / "transitions.json"
ROWS = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
NIGHTLY = SlotKey("shop", "nightly")
HOURLY = SlotKey("shop", "hourly")


def slot_of(row: Any) -> Slot:
    if row is None:
        return NEVER_HELD
    lease = row["lease"]
    return Slot(row["fencing_token"], lease and Lease(**lease), row["changed_at"])


def command_of(row: Any) -> Command:
    fields = {name: value for name, value in row.items() if name != "do"}
    kinds = {
        "acquire": Acquire,
        "renew": Renew,
        "release": Release,
        "read": Read,
        "force_release": ForceRelease,
    }
    command: Command = kinds[row["do"]](NIGHTLY, **fields)
    return command


def answer_as_row(answer: Answer) -> Any:
    match answer:
        case Granted():
            return {
                "expires_at": answer.expires_at,
                "fencing_token": answer.fencing_token,
                "expires_in": answer.expires_in,
            }
        case Held():
            return {
                "held": True,
                "expires_at": answer.expires_at,
                "fencing_token": answer.fencing_token,
            }
        case Free():
            return {"held": False}
        case Released():
            return {"released": True}
        case Problem():
            return {"problem": answer.code}


@pytest.mark.parametrize("row", ROWS, ids=[row["title"] for row in ROWS])
def test_the_truth_table_holds(row: Any) -> None:
    before = slot_of(row["slot"])

    after, answer = decide(before, command_of(row["command"]), row["now"], row["fencing_floor"])

    assert row["answer"] == answer_as_row(answer)
    if row["slot_after"] == "unchanged":
        assert after is before
    else:
        assert slot_of(row["slot_after"]) == after


def test_the_truth_table_has_each_command_at_each_boundary() -> None:
    """A row that is taken out of the table is missed."""
    boundaries = {
        (
            row["command"]["do"],
            row["command"].get("token"),
            row["now"] - row["slot"]["lease"]["expires_at"],
        )
        for row in ROWS
        if row["slot"] and row["slot"]["lease"]
    }
    commands = [
        (do, token) for do in ("acquire", "renew", "release") for token in ("alice", "bob")
    ] + [("read", None), ("force_release", None)]

    for do, token in commands:
        for boundary in (-SECOND, 0, SECOND):
            for step in (-1, 0, 1):
                assert (do, token, boundary + step) in boundaries


def test_the_problems_of_the_rules_are_conflicts() -> None:
    assert (LOCK_HELD.status, LOCK_HELD.code) == (409, "lock_held")
    assert (LOCK_OWNERSHIP_LOST.status, LOCK_OWNERSHIP_LOST.code) == (409, "lock_ownership_lost")


def test_each_command_of_a_batch_sees_the_outcome_of_the_one_before() -> None:
    slots: dict[SlotKey, Slot] = {}

    answers, changed = decide_all(
        slots,
        [
            Acquire(NIGHTLY, "alice", 30),
            Acquire(NIGHTLY, "bob", 30),
            Release(NIGHTLY, "alice"),
            Acquire(NIGHTLY, "bob", 30),
            Read(NIGHTLY),
            Read(HOURLY),
        ],
        now=0,
        fencing_floor=100,
    )

    assert [
        Granted(30 * SECOND, 100, 30 * SECOND),
        LOCK_HELD,
        Released(),
        Granted(30 * SECOND, 101, 30 * SECOND),
        Held(30 * SECOND, 101),
        Free(),
    ] == answers
    assert {NIGHTLY: Slot(101, Lease("bob", 30 * SECOND, 90 * DAY), 0)} == changed == slots


def test_a_batch_that_changes_nothing_writes_nothing() -> None:
    slots = {NIGHTLY: Slot(7, Lease("alice", 30 * SECOND, 90 * DAY), 0)}

    answers, changed = decide_all(
        slots, [Acquire(NIGHTLY, "bob", 30), Release(NIGHTLY, "bob"), Read(NIGHTLY)], 1, 0
    )

    assert [LOCK_HELD, LOCK_OWNERSHIP_LOST, Held(30 * SECOND, 7)] == answers
    assert changed == {}


def test_the_same_key_of_two_projects_is_two_locks() -> None:
    mine, theirs = SlotKey("shop", "nightly"), SlotKey("bank", "nightly")

    answers, _ = decide_all({}, [Acquire(mine, "alice", 5), Acquire(theirs, "bob", 5)], 0, 0)

    assert [Granted(5 * SECOND, 1, 5 * SECOND)] * 2 == answers


@pytest.mark.parametrize(
    "holder_of_a_secret",
    [
        Lease("s3cret", 1, 2),
        Slot(7, Lease("s3cret", 1, 2), 0),
        Acquire(NIGHTLY, "s3cret", 5),
        Renew(NIGHTLY, "s3cret", 5),
        Release(NIGHTLY, "s3cret"),
    ],
)
def test_no_repr_shows_a_lock_token(holder_of_a_secret: object) -> None:
    assert "s3cret" not in repr(holder_of_a_secret)


def test_answers_say_for_the_events_what_began_and_what_ended() -> None:
    """What a caller is not told, and no comparison of answers sees."""
    slots: dict[SlotKey, Slot] = {}
    commands: list[Command] = [
        Acquire(NIGHTLY, "alice", 30),
        Acquire(NIGHTLY, "alice", 30),
        Renew(NIGHTLY, "alice", 30),
        Read(NIGHTLY),
        Release(NIGHTLY, "alice"),
        Release(NIGHTLY, "alice"),
        ForceRelease(NIGHTLY),
        Acquire(NIGHTLY, "bob", 5),
        ForceRelease(NIGHTLY),
        Acquire(NIGHTLY, "bob", 5),
    ]

    answers: list[Any] = list(decide_all(slots, commands, now=7, fencing_floor=100)[0])

    first, again, renewed, held, ended, nothing, neither, second, forced, third = answers
    assert [each.begins for each in (first, again, renewed, second, third)] == [
        *(True, False, False, True, True)
    ]
    assert held.expires_in == 30 * SECOND
    assert [(each.fencing_token, each.at) for each in (ended, nothing, neither, forced)] == [
        *((100, 7), (0, 0), (0, 0), (101, 7))
    ]
    (late,), _ = decide_all(slots, [Release(NIGHTLY, "bob")], 6 * SECOND + 7, 0)
    assert isinstance(late, Released)
    assert (late.fencing_token, late.at) == (0, 0)  # it had lapsed, nothing ended by this


def test_a_released_slot_is_free_from_its_release_and_a_held_one_after_the_grace() -> None:
    assert Slot(7, None, changed_at=5).free_at() == 5
    assert Slot(7, Lease("alice", 30 * SECOND, 90 * DAY), changed_at=5).free_at() == 31 * SECOND
