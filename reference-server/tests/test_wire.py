"""What is valid on the wire, and what goes out."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volcano_server import wire
from volcano_server.lease import Free, Granted, Held, Released
from volcano_server.problems import LOCK_HELD, PERMISSION_DENIED, rate_limited

TABLES = Path(__file__).parents[2] / "conformance" / "tables"
UUID = "0b7c1f2e-5A0f-4c55-9d1d-3c1f6f0f2a11"


@pytest.mark.parametrize(
    ("segment", "key"),
    [
        (b"nightly", "nightly"),
        (b"ticket:4821", "ticket:4821"),
        (b"ticket%3A4821", "ticket:4821"),
        (b"%61.b", "a.b"),
        (b"A-1_2", "A-1_2"),
        (b"0", "0"),
        (b"a" * 128, "a" * 128),
    ],
)
def test_a_key_is_decoded_once(segment: bytes, key: str) -> None:
    assert wire.parse_key(segment) == key


@pytest.mark.parametrize(
    "segment",
    [
        b"",
        b".",
        b"..",
        b"%2e%2e",
        b"-a",
        b":a",
        b"_a",
        b"a%2Fb",
        b"a%252Fb",
        b"a%253Ab",
        b"%2561",
        b"a/b",
        b"a%00",
        b"a%0A",
        b"a%0a",
        b"abc%0A",
        b"abc\n",
        b"%FF",
        b"\xff",
        b"%C3%A9",
        b"a+b",
        b"a%20b",
        b"%",
        b"a%",
        b"a%zz",
        b"a%3",
        b"a?b",
        b"a" * 129,
        b"%EF%BC%A1",
        b"%D9%A1",
    ],
)
def test_what_is_no_key_is_refused_with_the_grammar(segment: bytes) -> None:
    with pytest.raises(wire.InvalidRequestError, match=r"key: got .* 1 to 128 of the characters"):
        wire.parse_key(segment)


@given(st.binary(max_size=40))
def test_a_key_is_refused_or_matches_the_grammar(segment: bytes) -> None:
    try:
        key = wire.parse_key(segment)
    except wire.InvalidRequestError as error:
        refusal = str(error)
        assert refusal.isprintable()
    else:
        assert key.isascii()
        assert key[0].isalnum()
        assert all(each.isalnum() or each in "._:-" for each in key)


def rows(table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((TABLES / table).read_text(encoding="utf-8"))["rows"]
    assert {True, False} == {row["valid"] for row in found}
    return found


@pytest.mark.parametrize("row", rows("keys.json"), ids=json.dumps)
def test_the_keys_that_every_sdk_knows_are_the_servers(row: dict[str, Any]) -> None:
    segment = str(row.get("raw", row.get("segment", row.get("key")))).encode()

    if row["valid"]:
        assert wire.parse_key(segment) == row["key"]
    else:
        with pytest.raises(wire.InvalidRequestError):
            wire.parse_key(segment)


@pytest.mark.parametrize("row", rows("ttls.json"), ids=json.dumps)
def test_the_ttls_that_every_sdk_knows_are_the_servers(row: dict[str, Any]) -> None:
    body = f'{{"ttl_seconds":{row["text"]}}}'.encode()

    if row["valid"]:
        assert wire.parse_ttl(body) == row["ttl"]
    else:
        with pytest.raises(wire.InvalidRequestError):
            wire.parse_ttl(body)


def test_a_lock_token_is_canonical() -> None:
    assert wire.parse_lock_token(UUID.encode()) == UUID.lower()


def test_a_request_id_stays_as_it_came() -> None:
    assert wire.parse_request_id(UUID.encode()) == UUID


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        UUID[:-1],
        UUID + "0",
        UUID + "\n",
        " " + UUID,
        "{" + UUID + "}",
        UUID.replace("-", ""),
        "urn:uuid:" + UUID,
        UUID.replace("-", "_"),
        "g" + UUID[1:],
        "-" + UUID[1:],
    ],
)
def test_what_is_no_uuid_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(
        wire.InvalidRequestError, match=r"X-Volcano-Lock-Token: .* 8-4-4-4-12"
    ) as it:
        wire.parse_lock_token(value.encode())

    assert not value or value not in str(it.value)
    assert not wire.is_request_id(value.encode())


def test_a_missing_header_is_refused_by_its_name() -> None:
    with pytest.raises(wire.InvalidRequestError, match="X-Volcano-Lock-Token: the header is miss"):
        wire.parse_lock_token(None)
    with pytest.raises(wire.InvalidRequestError, match="X-Volcano-Request-Id: the header is miss"):
        wire.parse_request_id(None)
    assert not wire.is_request_id(None)


@pytest.mark.parametrize(
    ("body", "ttl_seconds"),
    [
        (b'{"ttl_seconds":5}', 5),
        (b' {\n\t"ttl_seconds" : 7776000 } \r\n', 7_776_000),
        (b'{"ttl_\\u0073econds": 30}', 30),
    ],
)
def test_a_ttl_is_a_json_integer(body: bytes, ttl_seconds: int) -> None:
    assert wire.parse_ttl(body) == ttl_seconds


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0", "0"),
        ("-1", "-1"),
        ("4", "4"),
        ("7776001", "7776001"),
        ("5.5", "5.5"),
        ("30.0", "30.0"),
        ("3e1", "30.0"),
        ('"30"', '"30"'),
        ("true", "true"),
        ("null", "null"),
        ("1e400", "Infinity"),
        ("NaN", "NaN"),
        ("[30]", "[30]"),
        ("-0", "0"),
        ("1" * 4000, "1" * 60 + "…"),
        ('"' + "x" * 900 + '"', '"' + "x" * 59 + "…"),
    ],
)
def test_a_ttl_that_is_none_is_refused_with_what_came(value: str, shown: str) -> None:
    with pytest.raises(wire.InvalidRequestError) as refusal:
        wire.parse_ttl(f'{{"ttl_seconds":{value}}}'.encode())

    sentence = str(refusal.value)
    assert sentence.startswith(f"ttl_seconds: got {shown}")
    assert sentence.endswith("send a JSON integer from 5 to 7776000 (seconds).")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "body: got an empty body"),
        (b"{}", "ttl_seconds: the member is missing"),
        (b"[]", "body: got 2 bytes that are not a JSON object"),
        (b"30", "body: got 2 bytes that are not a JSON object"),
        (b"nonsense", "body: got 8 bytes that are not a JSON object"),
        (b'{"ttl_seconds":30}}', "body: got 19 bytes that are not"),
        (b'{"ttl_seconds":030}', "body: got 19 bytes that are not"),
        (b"\xef\xbb\xbf" + b'{"ttl_seconds":30}', "body: got 21 bytes that are not"),
        (b"\xff", "body: got 1 bytes that are not"),
        (b'{"ttl_seconds":' + b"[" * 4000, "body: got 4015 bytes that are not"),
        (b'{"ttl":30}', 'body: got the unknown member "ttl"'),
        (b'{"ttl_seconds":30,"wait":1}', 'body: got the unknown member "wait"'),
        (b'{"ttl_seconds":30,"ttl_seconds":30}', "body: a member came more than once"),
        (b'{"ttl_seconds":1,"ttl_seconds":30}', "body: a member came more than once"),
        (b'{"ttl_seconds":30,"ttl_second\\u0073":30}', "body: a member came more than once"),
        (b'{"ttl_seconds":"x","ttl_seconds":30}', "body: a member came more than once"),
    ],
)
def test_a_body_that_is_not_one_object_with_a_ttl_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(wire.InvalidRequestError) as refusal:
        wire.parse_ttl(body)

    assert str(refusal.value).startswith(sentence)


@given(st.binary(max_size=80) | st.from_regex(rb'\{"ttl_seconds": ?[^}]{0,20}\}', fullmatch=True))
def test_any_body_is_a_ttl_or_refused(body: bytes) -> None:
    try:
        ttl_seconds = wire.parse_ttl(body)
    except wire.InvalidRequestError as error:
        refusal = str(error)
        assert refusal.isprintable()
    else:
        assert json.loads(body) == {"ttl_seconds": ttl_seconds}
        assert type(json.loads(body)["ttl_seconds"]) is int


@pytest.mark.parametrize(
    ("instant", "text"),
    [
        (1_800_000_000_000_000, "2027-01-15T08:00:00.000Z"),
        (1_800_000_000_000_999, "2027-01-15T08:00:00.000Z"),
        (1_800_000_000_999_999, "2027-01-15T08:00:00.999Z"),
        (1_800_000_000_001_000, "2027-01-15T08:00:00.001Z"),
        (0, "1970-01-01T00:00:00.000Z"),
    ],
)
def test_an_instant_is_rounded_down_to_milliseconds(instant: int, text: str) -> None:
    assert wire.timestamp(instant) == text


def test_a_duration_is_rounded_down_to_milliseconds() -> None:
    assert wire.seconds_text(29_999_999) == "29.999"
    assert wire.seconds_text(30_000_000) == "30.000"
    assert wire.seconds_text(999) == "0.000"


def test_a_grant_says_what_is_left_of_it() -> None:
    granted = Granted(expires_at=1_800_000_030_000_500, fencing_token=17, expires_in=29_999_500)

    status, headers, body = wire.reply(granted, created=True)

    assert status == 201
    assert wire.reply(granted)[0] == 200
    assert json.loads(body) == {"expires_at": "2027-01-15T08:00:30.000Z", "fencing_token": 17}
    assert dict(headers) == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body),
        b"x-volcano-expires-in": b"29.999",
    }


def test_a_free_key_has_no_further_members() -> None:
    assert wire.reply(Free())[2] == b'{"held":false}'


def test_a_held_key_says_until_when_and_by_which_lease() -> None:
    _, _, body = wire.reply(Held(expires_at=1_800_000_000_000_000, fencing_token=2**53 - 1))

    assert json.loads(body) == {
        "held": True,
        "expires_at": "2027-01-15T08:00:00.000Z",
        "fencing_token": 9007199254740991,
    }


def test_a_release_has_no_body() -> None:
    assert wire.reply(Released()) == (204, [], b"")


def test_a_problem_is_a_sentence_and_a_code() -> None:
    status, headers, body = wire.reply(LOCK_HELD)

    assert status == 409
    assert json.loads(body) == {"error": LOCK_HELD.sentence, "code": "lock_held"}
    assert b"retry-after" not in dict(headers)


def test_a_problem_that_passes_says_when() -> None:
    _, headers, _ = wire.reply(rate_limited(600, retry_after=12))

    assert dict(headers)[b"retry-after"] == b"12"


def test_only_a_401_asks_for_a_credential() -> None:
    assert b"www-authenticate" not in dict(wire.reply(PERMISSION_DENIED)[1])


def test_each_reply_has_headers_of_its_own() -> None:
    """The caller adds to them."""
    wire.reply(LOCK_HELD)[1].append((b"x", b"y"))

    assert (b"x", b"y") not in wire.reply(LOCK_HELD)[1]
