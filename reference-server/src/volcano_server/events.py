"""What became of a key's leases: from answers and looks to events.  Pure.

    told(known, command, answer)    what this server's store has decided
    heard(known, event)             what another server's store told of the same key
    seen(known, look)               what a look at the key found
                -> (known, events to publish)

    absent --acquired--> held --released, force_released, lapsed--> over --acquired--> held ...
                          '----------------- acquired (its end was missed) ------------->'

What is known of a key only moves on: to a larger fencing token, or from held to over under the same
one.  Whatever comes twice, or late, is no event.  So each lease has at most one `acquired` and one
end, in this order, whichever way they were heard of.
The rule in words: docs/semantics.md#events.
"""

from dataclasses import dataclass
from enum import StrEnum

from volcano_server.lease import (
    GRACE,
    Answer,
    ForceRelease,
    Granted,
    Held,
    Released,
    SlotKey,
    Write,
)
from volcano_server.value import value


class Kind(StrEnum):
    ACQUIRED = "acquired"
    RELEASED = "released"
    FORCE_RELEASED = "force_released"
    LAPSED = "lapsed"


@value
class Event:
    """The beginning or the end of one lease.  `at`: µs on the store's clock.

    `free_at`: of a lease that begins, when its key is free again unless it is renewed; 0 where that
    is not known.
    """

    kind: Kind
    slot_key: SlotKey
    fencing_token: int
    at: int
    free_at: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """The latest lease of a key.  `free_at`: as far as known; None: it is over."""

    fencing_token: int
    free_at: int | None


NOTHING = Known(0, None)

Followed = tuple[Known, tuple[Event, ...]]


def told(known: Known, command: Write, answer: Answer) -> Followed:
    """One command of a batch that is on disk, in the order of the batch."""
    slot_key = command.slot_key
    if isinstance(answer, Granted):
        at, free_at = answer.expires_at - answer.expires_in, answer.expires_at + GRACE
        if answer.begins:
            return heard(known, Event(Kind.ACQUIRED, slot_key, answer.fencing_token, at, free_at))
        return _goes_on(known, answer.fencing_token, free_at), ()
    if isinstance(answer, Released) and answer.fencing_token:
        kind = Kind.FORCE_RELEASED if isinstance(command, ForceRelease) else Kind.RELEASED
        return heard(known, Event(kind, slot_key, answer.fencing_token, answer.at))
    return known, ()


def heard(known: Known, event: Event) -> Followed:
    """An event of one lease, from wherever."""
    if event.fencing_token < known.fencing_token:
        return known, ()
    begins = event.kind is Kind.ACQUIRED
    if event.fencing_token == known.fencing_token:
        if begins:
            return (_goes_on(known, event.fencing_token, event.free_at or known.free_at), ())
        if known.free_at is None:
            return known, ()
        return Known(event.fencing_token, None), (event,)
    after = Known(event.fencing_token, event.free_at if begins else None)
    return after, (*_missed_end(known, event.slot_key, event.at), event)


def seen(known: Known, slot_key: SlotKey, held: Held | None, at: int) -> Followed:
    """What a look at the key found: the lease that is not over, if any.  `at`: when it looked."""
    if held is None:
        if known.free_at is None:
            return known, ()
        return Known(known.fencing_token, None), _missed_end(known, slot_key, at)
    free_at = held.expires_at + GRACE
    if held.fencing_token > known.fencing_token:
        return heard(known, Event(Kind.ACQUIRED, slot_key, held.fencing_token, at, free_at))
    return _goes_on(known, held.fencing_token, free_at), ()


def learned(known: Known, held: Held) -> Known:
    """The first look at a key: what was before it is no event."""
    if held.fencing_token <= known.fencing_token:
        return known
    return Known(held.fencing_token, held.expires_at + GRACE)


def _goes_on(known: Known, fencing_token: int, free_at: int | None) -> Known:
    """The lease was renewed.  One that is not known of has an `acquired` on its way."""
    if fencing_token != known.fencing_token or known.free_at is None:
        return known
    return Known(fencing_token, free_at)


def _missed_end(known: Known, slot_key: SlotKey, at: int) -> tuple[Event, ...]:
    """The end of a lease that must have come by `at`: by expiry if its time was over."""
    if known.free_at is None:
        return ()
    if at >= known.free_at:
        return (Event(Kind.LAPSED, slot_key, known.fencing_token, known.free_at),)
    return (Event(Kind.RELEASED, slot_key, known.fencing_token, at),)
