"""From answers and looks to events: each lease begins once and ends once, in order."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volcano_server.events import (
    NOTHING,
    Event,
    Followed,
    Kind,
    Known,
    heard,
    learned,
    seen,
    told,
)
from volcano_server.lease import (
    GRACE,
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
    Slot,
    SlotKey,
    Write,
    decide_all,
)
from volcano_server.problems import LOCK_HELD

NIGHTLY = SlotKey("shop", "nightly")
NOW = 1_000 * SECOND
FREE_AT = NOW + 31 * SECOND

ACQUIRE = Acquire(NIGHTLY, "alice", 30)
RENEW = Renew(NIGHTLY, "alice", 30)
RELEASE = Release(NIGHTLY, "alice")
FORCE = ForceRelease(NIGHTLY)

HELD_7 = Known(7, FREE_AT)
OVER_7 = Known(7, None)


def granted(fencing_token: int, *, begins: bool, at: int = NOW) -> Granted:
    return Granted(at + 30 * SECOND, fencing_token, 30 * SECOND, begins)


def event(kind: Kind, fencing_token: int = 7, at: int = NOW, free_at: int = 0) -> Event:
    return Event(kind, NIGHTLY, fencing_token, at, free_at)


def acquired(fencing_token: int, at: int = NOW) -> Event:
    return event(Kind.ACQUIRED, fencing_token, at, at + 31 * SECOND)


# What this server has decided.


@pytest.mark.parametrize(
    ("known", "command", "answer", "followed"),
    [
        (NOTHING, ACQUIRE, granted(7, begins=True), (HELD_7, (acquired(7),))),
        (OVER_7, ACQUIRE, granted(8, begins=True), (Known(8, FREE_AT), (acquired(8),))),
        (HELD_7, RELEASE, Released(7, NOW), (OVER_7, (event(Kind.RELEASED),))),
        (HELD_7, FORCE, Released(7, NOW), (OVER_7, (event(Kind.FORCE_RELEASED),))),
        # A lease that nobody saw begin ends all the same.
        (NOTHING, RELEASE, Released(7, NOW), (OVER_7, (event(Kind.RELEASED),))),
    ],
)
def test_a_lease_begins_and_ends(
    known: Known, command: Write, answer: Answer, followed: Followed
) -> None:
    assert told(known, command, answer) == followed


@pytest.mark.parametrize(
    ("known", "command", "answer"),
    [
        (HELD_7, ACQUIRE, LOCK_HELD),
        (HELD_7, RELEASE, Released()),
        (NOTHING, FORCE, Released()),
        (OVER_7, RENEW, granted(7, begins=False)),
        (NOTHING, RENEW, granted(7, begins=False)),
        (Known(9, None), ACQUIRE, granted(7, begins=True)),
    ],
)
def test_what_changes_nothing_or_is_late_is_no_event(
    known: Known, command: Write, answer: Answer
) -> None:
    after, events = told(known, command, answer)

    assert after is known
    assert events == ()


@pytest.mark.parametrize("command", [ACQUIRE, RENEW])
def test_a_renewal_and_a_repeated_acquire_move_the_lapse_and_are_no_event(command: Write) -> None:
    later = granted(7, begins=False, at=NOW + 5 * SECOND)

    assert told(HELD_7, command, later) == (Known(7, FREE_AT + 5 * SECOND), ())


def test_a_grant_proves_that_the_lease_before_it_lapsed() -> None:
    grant = granted(8, begins=True, at=FREE_AT)

    assert told(HELD_7, ACQUIRE, grant) == (
        Known(8, FREE_AT + 31 * SECOND),
        (event(Kind.LAPSED, at=FREE_AT), acquired(8, FREE_AT)),
    )


def test_a_grant_before_the_lapse_proves_a_release_elsewhere() -> None:
    grant = granted(8, begins=True, at=FREE_AT - 1)

    _, events = told(HELD_7, ACQUIRE, grant)

    assert events == (event(Kind.RELEASED, at=FREE_AT - 1), acquired(8, FREE_AT - 1))


# What was heard and seen.


@pytest.mark.parametrize(
    ("known", "late"),
    [
        (HELD_7, acquired(7)),
        (OVER_7, acquired(7)),
        (OVER_7, event(Kind.LAPSED)),
        (Known(8, FREE_AT), acquired(7)),
        (Known(8, FREE_AT), event(Kind.RELEASED)),
    ],
)
def test_what_is_heard_twice_or_late_is_no_event(known: Known, late: Event) -> None:
    assert heard(known, late) == (known, ())


def test_the_end_of_a_lease_that_was_not_seen_begin_ends_the_one_before_it_too() -> None:
    _, events = heard(HELD_7, event(Kind.RELEASED, 9, NOW + 1))

    assert events == (event(Kind.RELEASED, 7, NOW + 1), event(Kind.RELEASED, 9, NOW + 1))


def test_a_look_at_a_key_makes_good_what_was_missed() -> None:
    later = Held(NOW + 60 * SECOND, 8)

    assert seen(HELD_7, NIGHTLY, None, FREE_AT) == (OVER_7, (event(Kind.LAPSED, at=FREE_AT),))
    assert seen(HELD_7, NIGHTLY, None, NOW + 1) == (OVER_7, (event(Kind.RELEASED, at=NOW + 1),))
    assert seen(OVER_7, NIGHTLY, None, NOW) == (OVER_7, ())
    assert seen(HELD_7, NIGHTLY, later, NOW + 1) == (
        Known(8, NOW + 61 * SECOND),
        (
            event(Kind.RELEASED, at=NOW + 1),
            event(Kind.ACQUIRED, 8, NOW + 1, NOW + 61 * SECOND),
        ),
    )
    assert seen(HELD_7, NIGHTLY, Held(NOW + 60 * SECOND, 7), NOW) == (
        Known(7, NOW + 61 * SECOND),
        (),
    )
    assert seen(Known(9, None), NIGHTLY, later, NOW) == (Known(9, None), ())


def test_the_first_look_is_no_event_and_takes_nothing_back() -> None:
    look = Held(NOW + 30 * SECOND, 7)

    assert learned(NOTHING, look) == HELD_7
    assert learned(OVER_7, look) == OVER_7
    assert learned(Known(8, FREE_AT), look) == Known(8, FREE_AT)


# Laws.

KEYS = [NIGHTLY, SlotKey("shop", "hourly")]
keys, tokens = st.sampled_from(KEYS), st.sampled_from(["alice", "bob"])
writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(Acquire, keys, tokens, st.sampled_from([5, 6, 30])),
    st.builds(Renew, keys, tokens, st.sampled_from([5, 6, 30])),
    st.builds(Release, keys, tokens),
    st.builds(ForceRelease, keys),
)
pauses = st.sampled_from([0, 1, 3 * SECOND, 5 * SECOND, 6 * SECOND, 7 * SECOND - 1, 40 * SECOND])
batches = st.lists(st.tuples(pauses, st.lists(writes, max_size=5), st.booleans()), max_size=12)


def alternating(events: Iterable[Event]) -> None:
    """`acquired`, then exactly one end of the same lease, and so on with larger tokens."""
    open_lease, latest = None, 0
    for each in events:
        if each.kind is Kind.ACQUIRED:
            assert open_lease is None
            assert each.fencing_token > latest
            open_lease = latest = each.fencing_token
        else:
            assert each.fencing_token == open_lease
            open_lease = None


@given(batches)
def test_the_events_of_a_key_are_the_story_that_reads_tell(
    steps: list[tuple[int, list[Write], bool]],
) -> None:
    slots: dict[SlotKey, Slot] = {}
    known = dict.fromkeys(KEYS, NOTHING)
    story: dict[SlotKey, list[Event]] = {key: [] for key in KEYS}
    now = NOW

    def follow(key: SlotKey, followed: Followed) -> None:
        known[key] = followed[0]
        story[key] += followed[1]

    def read(key: SlotKey) -> Answer:
        (answer,), _ = decide_all(slots, [Read(key)], now, 0)
        return answer

    for pause, commands, looks in steps:
        now += pause
        answers, _ = decide_all(slots, commands, now, now)
        for command, answer in zip(commands, answers, strict=True):
            follow(command.slot_key, told(known[command.slot_key], command, answer))
        for key in KEYS if looks else ():  # the timer fires, or does so only later
            free_at = known[key].free_at
            if free_at is not None and now >= free_at:
                assert read(key) == Free()
                follow(key, seen(known[key], key, None, free_at))
            held, events = read(key), story[key]
            if isinstance(held, Held):
                assert events[-1].kind is Kind.ACQUIRED
                assert events[-1].fencing_token == held.fencing_token
                assert known[key].free_at == held.expires_at + GRACE
            else:
                assert not events or events[-1].kind is not Kind.ACQUIRED

    for events in story.values():
        alternating(events)
        assert [each.at for each in events] == sorted(each.at for each in events)


@given(st.lists(st.integers(1, 6)), st.data())
def test_whatever_is_heard_in_whatever_order_makes_sense(
    tokens: list[int], data: st.DataObject
) -> None:
    known = NOTHING
    story: list[Event] = []
    for token in tokens:
        heard_of = event(data.draw(st.sampled_from(list(Kind))), token, NOW, FREE_AT)
        known, events = heard(known, heard_of)
        story += events

    ends = [each.fencing_token for each in story if each.kind is not Kind.ACQUIRED]
    begins = [each.fencing_token for each in story if each.kind is Kind.ACQUIRED]
    assert ends == sorted(set(ends))
    assert begins == sorted(set(begins))
    assert [each.fencing_token for each in story] == sorted(each.fencing_token for each in story)
