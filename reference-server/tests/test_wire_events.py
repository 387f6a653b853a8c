"""The query that opens an event stream, and the blocks that it is made of."""

import json

import pytest

from volcano_server.events import Event, Kind
from volcano_server.lease import SlotKey
from volcano_server.wire import InvalidRequestError
from volcano_server.wire_events import Filters, event_block, parse_filters, reset_block


@pytest.mark.parametrize(
    ("query", "filters"),
    [
        (b"key=nightly", Filters(("nightly",), ())),
        (b"prefix=tick", Filters((), ("tick",))),
        (b"prefix=ticket%3A&key=a:b&key=c", Filters(("a:b", "c"), ("ticket:",))),
        (b"key=a&prefix=a&key=a", Filters(("a",), ("a",))),
        (b"%6bey=a", Filters(("a",), ())),
        (
            b"&".join(b"key=k%d" % n for n in range(64)),
            Filters(tuple(f"k{n}" for n in range(64)), ()),
        ),
    ],
)
def test_keys_and_prefixes_in_any_order_each_once(query: bytes, filters: Filters) -> None:
    assert parse_filters(query) == filters


@pytest.mark.parametrize(
    ("query", "begins"),
    [
        (b"", "key, prefix: 0 of them came; send key=K and prefix=P, 1 to 64"),
        (b"&".join([b"key=a"] * 65), "key, prefix: 65 of them came; "),
        (b"keys=a", '"keys": there is no such parameter here; '),
        (b"key=a&", '"": there is no such parameter here; '),
        (b"Key=a", '"Key": there is no such parameter here; '),
        (b"key", 'key: got ""; a key is 1 to 128 of the characters'),
        (b"prefix=", 'prefix: got ""; a key is'),
        (b"key=a%2Fb", 'key: got "a/b"; '),
        (b"key=a+b", 'key: got "a+b"; '),
        (b"prefix=%ff", 'prefix: got "\\\\xff"; '),
        (b"prefix=.", 'prefix: got "."; '),
        (b"key=a%0A", 'key: got "a\\n"; '),
        (b"key=" + b"a" * 129, 'key: got "aaaa'),
    ],
)
def test_anything_else_is_refused_by_name(query: bytes, begins: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        parse_filters(query)

    assert str(refusal.value).startswith(begins)


def test_an_event_is_one_block_of_three_lines() -> None:
    event = Event(
        Kind.FORCE_RELEASED, SlotKey("shop", "ticket:4"), 2**53 - 1, 1_800_000_000_123_999
    )

    block = event_block(event, "5d2c81f0-42", watchers=3)

    name, event_id, data, *rest = block.decode().split("\n")
    assert (name, event_id, rest) == ("event: force_released", "id: 5d2c81f0-42", ["", ""])
    assert data == (
        'data: {"key":"ticket:4","fencing_token":9007199254740991,'
        '"at":"2027-01-15T08:00:00.123Z","watchers":3}'
    )
    assert json.loads(data.removeprefix("data: "))["fencing_token"] == 2**53 - 1


def test_a_reset_has_an_id_and_nothing_to_say() -> None:
    assert reset_block("5d2c81f0-42") == b"event: reset\nid: 5d2c81f0-42\ndata: {}\n\n"
