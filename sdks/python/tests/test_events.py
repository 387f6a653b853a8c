import re
from datetime import UTC, datetime
from typing import Any

import pytest
from tables import rows, section

from volcano_sdk import events
from volcano_sdk.errors import ServerError
from volcano_sdk.events import (
    MOST_FILTERS,
    EventParser,
    Filters,
    LockEvent,
    Message,
    checked_filters,
    lock_event,
)

AT = "2026-12-01T01:00:00.123+01:00"
DATA = '{"key":"a:b","fencing_token":9007199254740991,"at":"' + AT + '","watchers":3,"more":[]}'


# --- bytes


@pytest.mark.parametrize("row", rows("event_stream"), ids=lambda row: str(row["title"]))
def test_a_stream_is_read_as_every_sdk_reads_it(row: dict[str, Any]) -> None:
    parser = EventParser()
    messages = [m for chunk in row["chunks"] for m in parser.feed(chunk.encode("latin-1"))]

    assert [{"type": m.type, "data": m.data, "id": m.id} for m in messages] == row["events"]
    assert parser.last_id == row["last_id"]


@pytest.mark.parametrize("row", rows("event_stream"), ids=lambda row: str(row["title"]))
def test_how_a_stream_is_cut_into_chunks_means_nothing(row: dict[str, Any]) -> None:
    parser = EventParser()
    whole = "".join(row["chunks"]).encode("latin-1")
    messages = [m for number in range(len(whole)) for m in parser.feed(whole[number : number + 1])]

    assert [{"type": m.type, "data": m.data, "id": m.id} for m in messages] == row["events"]


def test_a_stream_goes_on_behind_the_last_id() -> None:
    parser = EventParser("41")

    assert parser.last_id == "41"
    assert parser.feed(b"data: x\n\n") == [Message("message", "x", "41")]


def test_events_and_comments_are_heard_and_nothing_else_is() -> None:
    parser = EventParser()
    heard = []
    for chunk in (b"retry: 5\n\n", b": hello\n", b"data: x\n", b"\n", b"\n", b"event: x\n\n"):
        parser.feed(chunk)
        heard.append(parser.heard)

    assert heard == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("endless", [b"data: " + b"x" * 4096, b"data: " + b"x" * 4096 + b"\n"])
def test_an_event_without_an_end_is_given_up(endless: bytes) -> None:
    parser = EventParser()
    with pytest.raises(ServerError, match="over 1 MiB"):
        for _ in range(300):
            parser.feed(endless)


# --- events


@pytest.mark.parametrize("kind", ["acquired", "released", "force_released", "lapsed"])
def test_an_event_of_a_lease(kind: Any) -> None:
    at = datetime(2026, 12, 1, 0, 0, 0, 123_000, tzinfo=UTC)

    event = lock_event(Message(kind, DATA, "1"))

    assert event == LockEvent(kind, "a:b", 2**53 - 1, at, 3)
    assert event is not None
    assert event.at is not None
    assert event.at.tzinfo is UTC


def test_a_reset_has_nothing_but_its_type() -> None:
    assert lock_event(Message("reset", "{}", "1")) == LockEvent("reset", None, None, None, None)


@pytest.mark.parametrize("kind", ["message", "renamed", ""])
def test_an_event_of_another_type_is_none(kind: str) -> None:
    assert lock_event(Message(kind, DATA, "1")) is None


@pytest.mark.parametrize(
    "data",
    [
        "",
        "junk",
        "[]",
        "null",
        "7",
        "{}",
        "[" * 100_000,
        DATA.replace('"a:b"', '"a/b"'),
        DATA.replace('"a:b"', "7"),
        DATA.replace("9007199254740991", "9007199254740992"),
        DATA.replace("9007199254740991", "-1"),
        DATA.replace("9007199254740991", "7.0"),
        DATA.replace("9007199254740991", "true"),
        DATA.replace("9007199254740991", '"7"'),
        DATA.replace("3,", '"3",'),
        DATA.replace("3,", "-1,"),
        DATA.replace(AT, "yesterday"),
        DATA.replace(AT, "2026-12-01T01:00:00.123"),
        DATA.replace(AT, "0001-01-01T00:00:00+23:59"),
        DATA.replace(f'"{AT}"', "7"),
    ],
)
def test_an_event_that_cannot_be_understood_says_read_again(data: str) -> None:
    assert lock_event(Message("released", data, "1")) == LockEvent("reset")


# --- filters


@pytest.mark.parametrize("row", rows("event_filters"), ids=lambda row: str(row["title"]))
def test_many_keys_become_shared_prefixes(row: dict[str, Any]) -> None:
    filters = Filters.of(row["keys"])

    assert {"keys": list(filters.keys), "prefixes": list(filters.prefixes)} == row["filters"]
    assert all(filters.cover(key) for key in row["keys"])


@pytest.mark.parametrize(
    "row", section("event_filters", "covers"), ids=lambda row: str(row["title"])
)
def test_whether_a_stream_tells_of_a_key(row: dict[str, Any]) -> None:
    filters = Filters(tuple(row["filters"]["keys"]), tuple(row["filters"]["prefixes"]))

    assert filters.cover(row["key"]) is row["covered"]


@pytest.mark.parametrize(
    ("key", "prefix", "expected"),
    [
        ("a", None, Filters(("a",), ())),
        (None, "a:", Filters((), ("a:",))),
        (["b", "a", "b"], ("d", "c"), Filters(("a", "b"), ("c", "d"))),
        ({"a"}, iter(["b"]), Filters(("a",), ("b",))),
        ([], "a", Filters((), ("a",))),
        ([f"k{number}" for number in range(63)] * 2, "a", None),
    ],
)
def test_a_watch_has_keys_and_prefixes(key: Any, prefix: Any, expected: Filters | None) -> None:
    filters = checked_filters(key, prefix)

    assert expected in (filters, None)
    assert len(filters.keys) + len(filters.prefixes) <= MOST_FILTERS


@pytest.mark.parametrize(
    ("key", "prefix", "named"),
    [
        (None, None, "a key or a prefix"),
        ([], [], "got 0 keys and 0 prefixes"),
        ([f"k{number}" for number in range(64)], "a", "got 64 keys and 1 prefixes"),
        ("", None, "key must be"),
        ("a/b", None, "key must be"),
        ("a\n", None, "key must be"),
        (["a", 7], None, "key must be"),
        (7, None, "key must be"),
        (b"a", None, "key must be"),
        (None, "", "prefix must be"),
        (None, ":a", "prefix must be"),
        (None, True, "prefix must be"),
    ],
)
def test_a_watch_of_what_cannot_be_right_is_refused(key: Any, prefix: Any, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        checked_filters(key, prefix)


def test_the_types_that_free_a_key() -> None:
    assert events.FREEING == {"released", "force_released", "lapsed"}
