"""What is valid on the wire, and what goes out."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volcano_server import wire
from volcano_server.lease import Free, Granted, Held, Released
from volcano_server.problems import LOCK_HELD, PERMISSION_DENIED, Problem, rate_limited

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


# ---------------------------------------------------------------- many renewals


A_TOKEN = "0B7c1f2e-5a0f-4c55-9d1d-3c1f6f0f2a11"


def renewal(**members: Any) -> dict[str, Any]:
    return {"key": "nightly", "token": A_TOKEN, "ttl_seconds": 30, **members}


def without(member: str) -> dict[str, Any]:
    return {name: value for name, value in renewal().items() if name != member}


def test_many_renewals_are_read_in_their_order_and_show_no_token() -> None:
    leases = [renewal(key=f"k:{number}", ttl_seconds=5 + number) for number in range(500)]

    found = wire.parse_renewals(json.dumps({"leases": leases}).encode())

    assert [(each.key, each.ttl_seconds) for each in found] == [
        (f"k:{number}", 5 + number) for number in range(500)
    ]
    assert {each.token for each in found} == {A_TOKEN}
    assert A_TOKEN not in repr(found)


def test_the_largest_valid_request_fits_its_limit() -> None:
    leases = [renewal(key="k" * 128, ttl_seconds=7_776_000)] * wire.MOST_LEASES

    assert len(json.dumps({"leases": leases}, indent=1)) < wire.MANY_BODY_LIMIT


WRONG_MEMBERS = [
    (5, "leases[1]: what came is not a JSON object;"),
    ([A_TOKEN], "leases[1]: what came is not a JSON object;"),
    (renewal(holder="x"), 'leases[1]: got the unknown member "holder";'),
    (without("key"), "leases[1].key: the member is missing; a key is"),
    (without("token"), "leases[1].token: the member is missing; send a UUID"),
    (without("ttl_seconds"), "leases[1].ttl_seconds: the member is missing; send a JSON integer"),
    (renewal(key="a/b"), 'leases[1].key: got "a/b"; a key is 1 to 128'),
    (renewal(key="a\n"), 'leases[1].key: got "a\\n"; a key is 1 to 128'),
    (renewal(key=""), 'leases[1].key: got ""; a key is 1 to 128'),
    (renewal(key="é"), 'leases[1].key: got "\\u00e9"; a key is 1 to 128'),
    (renewal(key="k" * 129), 'leases[1].key: got "kkkk'),
    (renewal(key={"token": A_TOKEN}), "leases[1].key: what came is not a string; a key is"),
    (renewal(key=None), "leases[1].key: what came is not a string; a key is"),
    (renewal(token=A_TOKEN[:-1]), "leases[1].token: what came is not a UUID; send a UUID"),
    (renewal(token=A_TOKEN + "\n"), "leases[1].token: what came is not a UUID; send a UUID"),
    (renewal(token=None), "leases[1].token: what came is not a UUID; send a UUID"),
    (renewal(ttl_seconds=4), "leases[1].ttl_seconds: got 4; send a JSON integer from 5 to"),
    (renewal(ttl_seconds=7_776_001), "leases[1].ttl_seconds: got 7776001; send a JSON integer"),
    (renewal(ttl_seconds=30.0), "leases[1].ttl_seconds: got 30.0; send a JSON integer"),
    (renewal(ttl_seconds=True), "leases[1].ttl_seconds: got true; send a JSON integer"),
    (renewal(ttl_seconds=None), "leases[1].ttl_seconds: got null; send a JSON integer"),
    (renewal(ttl_seconds=A_TOKEN), "leases[1].ttl_seconds: what came is not a number; send"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_MEMBERS)
def test_a_wrong_lease_among_many_is_named_by_its_position(wrong: Any, sentence: str) -> None:
    body = json.dumps({"leases": [renewal(), wrong, renewal()]}).encode()

    with pytest.raises(wire.InvalidRequestError) as caught:
        wire.parse_renewals(body)

    assert str(caught.value).startswith(sentence)
    assert A_TOKEN[:-1] not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "body: got an empty body; send"),
        (b"{", "body: got 1 bytes that are not a JSON object; send"),
        (b"[]", "body: got 2 bytes that are not a JSON object; send"),
        (b"\xff", "body: got 1 bytes that are not a JSON object; send"),
        (b"[" * 50_000, "body: got 50000 bytes that are not a JSON object; send"),
        (b"{}", "leases: the member is missing; send"),
        (b'{"leases":[]}', "leases: the array is empty; send"),
        (b'{"leases":{}}', "leases: what came is not a JSON array; send"),
        (b'{"leases":null}', "leases: what came is not a JSON array; send"),
        (b'{"leases":[],"ttl_seconds":30}', 'body: got the unknown member "ttl_seconds"; send'),
        (
            json.dumps({"leases": [renewal()] * 501}).encode(),
            "body: more members came than 500 leases have; send",
        ),
        (b'{"leases":[' + b",".join([b"{}"] * 501) + b"]}", "leases[0].ttl_seconds: the member"),
        (
            b'{"leases":[],' + json.dumps({"leases": [renewal()]}).encode()[1:],
            "body: a member came more than once; send each once.",
        ),
        (
            b'{"leases":[{"key":"other",' + json.dumps(renewal()).encode()[1:] + b"]}",
            "body: a member came more than once; send each once.",
        ),
    ],
)
def test_a_body_that_is_not_many_renewals_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(wire.InvalidRequestError) as caught:
        wire.parse_renewals(body)

    assert str(caught.value).startswith(sentence)


def test_the_answer_to_many_renewals_is_by_position() -> None:
    limited = Problem(429, "lock_rate_limited", 'A "sentence".', retry_after=17)
    granted = Granted(1_800_000_000_123_999, fencing_token=7, expires_in=29_999_999)

    status, headers, body = wire.reply(wire.Together(["a", "b"], [granted, limited]))

    assert status == 200
    assert (b"content-length", b"%d" % len(body)) in headers
    assert json.loads(body) == {
        "leases": [
            {
                "key": "a",
                "expires_at": "2027-01-15T08:00:00.123Z",
                "expires_in": 29.999,
                "fencing_token": 7,
            },
            {
                "key": "b",
                "error": 'A "sentence".',
                "code": "lock_rate_limited",
                "retry_after": 17,
            },
        ]
    }
