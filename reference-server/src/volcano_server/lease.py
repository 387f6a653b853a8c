"""The lease rules: what each of the five commands does to the slot of one key.  Pure and total.

    decide(slot, command, now, fencing_floor) -> (slot, answer or problem)

                      grant                     -MARGIN     expires_at          +GRACE
    a lease's life      |-- renew, acquire again --|-- acquire again --|-- nobody's --|-- free

Time is whole microseconds of the store's clock.  A slot that comes back as the same object was not
changed.
The rules in words: docs/semantics.md#lease-rules; as data: conformance/tables/transitions.json.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import field
from typing import NamedTuple, assert_never

from volcano_server import fencing
from volcano_server.problems import LOCK_HELD, LOCK_OWNERSHIP_LOST, Problem
from volcano_server.value import value

SECOND = 1_000_000
DAY = 86_400 * SECOND
GRACE = SECOND
MARGIN = SECOND
LONGEST = 90 * DAY


@value
class Lease:
    """One acquisition of a key.  `token` is the canonical (lower-case) lock token."""

    token: str = field(repr=False)  # a secret
    expires_at: int
    hard_deadline: int


@value
class Slot:
    """What is kept per key.  A release empties the lease and keeps the fencing token.

    `changed_at` is the `now` of the last change.
    """

    fencing_token: int
    lease: Lease | None
    changed_at: int

    def free_at(self) -> int:
        """From when on the key can be taken."""
        return self.changed_at if self.lease is None else self.lease.expires_at + GRACE

    def is_free(self, now: int) -> bool:
        return self.lease is None or now >= self.lease.expires_at + GRACE


NEVER_HELD = Slot(fencing_token=0, lease=None, changed_at=0)


class SlotKey(NamedTuple):  # its hash is asked for several times a command
    """Where a slot lives.  Two projects may use the same key without meeting."""

    project: str
    key: str


@value
class Acquire:
    slot_key: SlotKey
    token: str = field(repr=False)
    ttl_seconds: int


@value
class Renew:
    slot_key: SlotKey
    token: str = field(repr=False)
    ttl_seconds: int


@value
class Release:
    slot_key: SlotKey
    token: str = field(repr=False)


@value
class ForceRelease:
    slot_key: SlotKey


@value
class Read:
    slot_key: SlotKey


Write = Acquire | Renew | Release | ForceRelease
Command = Write | Read


@value
class Granted:
    """The answer to an acquire or a renewal.  `expires_in`: µs left when it was decided.

    What does not count in a comparison is for the events of the lease: its caller is not told.
    """

    expires_at: int
    fencing_token: int
    expires_in: int
    begins: bool = field(default=False, compare=False)  # a new lease


@value
class Released:
    """The key is free at once.  `fencing_token`: of the lease that ended by it `at`, 0 for none."""

    fencing_token: int = field(default=0, compare=False)
    at: int = field(default=0, compare=False)


@value
class Held:
    expires_at: int
    fencing_token: int
    expires_in: int = field(default=0, compare=False)  # below 0 in the grace


@value
class Free:
    """The answer to a read of a key that can be taken."""


Answer = Granted | Released | Held | Free | Problem


def decide(slot: Slot, command: Command, now: int, fencing_floor: int) -> tuple[Slot, Answer]:
    """One command on one slot: the slot afterwards and what the caller hears."""
    match command:
        case Acquire():
            return _acquire(slot, command, now, fencing_floor)
        case Renew():
            return _renew(slot, command, now)
        case Release():
            return _release(slot, command, now)
        case ForceRelease():
            return (slot, Released()) if slot.is_free(now) else _emptied(slot, now)
        case Read():
            return slot, _read(slot, now)
        case _:
            assert_never(command)


def decide_all(
    slots: MutableMapping[SlotKey, Slot], commands: Iterable[Command], now: int, fencing_floor: int
) -> tuple[list[Answer], dict[SlotKey, Slot]]:
    """A batch in its order, each command seeing the outcome of the one before.

    `slots` holds what the store knows of the batch's keys and is brought up to date; a key it lacks
    was never held.  Also returned: the slots that changed, which are what has to be written.
    No slot goes back in time: where `now` is earlier than its last change, that moment counts.
    """
    answers: list[Answer] = []
    changed: dict[SlotKey, Slot] = {}
    for command in commands:
        before = slots.get(command.slot_key, NEVER_HELD)
        after, answer = decide(before, command, max(now, before.changed_at), fencing_floor)
        if after is not before:
            slots[command.slot_key] = changed[command.slot_key] = after
        answers.append(answer)
    return answers, changed


def _acquire(slot: Slot, command: Acquire, now: int, fencing_floor: int) -> tuple[Slot, Answer]:
    lease = slot.lease
    if lease is None or slot.is_free(now):
        fencing_token = fencing.next_token(slot.fencing_token, fencing_floor)
        return _granted(command, fencing_token, now + LONGEST, now, begins=True)
    if lease.token != command.token:
        return slot, LOCK_HELD
    if now >= lease.expires_at:
        return slot, LOCK_OWNERSHIP_LOST
    return _granted(command, slot.fencing_token, lease.hard_deadline, now)


def _renew(slot: Slot, command: Renew, now: int) -> tuple[Slot, Answer]:
    lease = slot.lease
    if lease is None or lease.token != command.token or now >= lease.expires_at - MARGIN:
        return slot, LOCK_OWNERSHIP_LOST
    return _granted(command, slot.fencing_token, lease.hard_deadline, now)


def _granted(
    command: Acquire | Renew,
    fencing_token: int,
    hard_deadline: int,
    now: int,
    *,
    begins: bool = False,
) -> tuple[Slot, Answer]:
    expires_at = min(now + command.ttl_seconds * SECOND, hard_deadline)
    granted = Slot(fencing_token, Lease(command.token, expires_at, hard_deadline), changed_at=now)
    return granted, Granted(expires_at, fencing_token, expires_at - now, begins)


def _release(slot: Slot, command: Release, now: int) -> tuple[Slot, Answer]:
    lease = slot.lease
    if lease is None or slot.is_free(now):
        return slot, Released()
    if lease.token != command.token:
        return slot, LOCK_OWNERSHIP_LOST
    return _emptied(slot, now)


def _emptied(slot: Slot, now: int) -> tuple[Slot, Answer]:
    emptied = Slot(slot.fencing_token, lease=None, changed_at=now)
    return emptied, Released(slot.fencing_token, now)


def _read(slot: Slot, now: int) -> Answer:
    if slot.lease is None or slot.is_free(now):
        return Free()
    return Held(slot.lease.expires_at, slot.fencing_token, slot.lease.expires_at - now)
