import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from tables import rows

from volcano_sdk import errors, operations
from volcano_sdk.errors import (
    ConflictError,
    RateLimitedError,
    ServerError,
    TransportError,
    VolcanoError,
)
from volcano_sdk.lease import LockLease, LockState
from volcano_sdk.operations import (
    Acquired,
    AcquireFailedError,
    Answer,
    Failure,
    Outcome,
    Request,
    Try,
    acquire_flow,
    granted,
    release_flow,
)

TOKEN = "4b5c3f7e-8f0c-4c3b-9a55-0d9d3c0f7a11"
REQUEST_ID = "0e3a1c52-77aa-4a53-8b1a-5f6f3f4f9f00"
GOOD = b'{"expires_at": "2026-11-29T12:00:00.123Z", "fencing_token": 7}'


def acquire() -> Request:
    return operations.acquire("a:b", ttl=30, token=TOKEN, request_id=REQUEST_ID, service_key="sk-1")


def release() -> Request:
    return operations.release("a", token=TOKEN, request_id=REQUEST_ID, service_key="sk-1")


def answer(status: int, body: bytes = b"", sent_at: float = 10.0, **headers: str) -> Answer:
    return Answer(
        sent_at, status, {name.replace("_", "-"): value for name, value in headers.items()}, body
    )


def refused(status: int, code: str) -> Answer:
    return answer(status, b'{"error": "A sentence.", "code": "%s"}' % code.encode())


def no_answer(*, reached: bool, sent_at: float = 10.0) -> Failure:
    return Failure(sent_at, TransportError("reset"), reached)


# --- arguments


@pytest.mark.parametrize(
    "row", rows("keys", having="key"), ids=lambda row: repr(row.get("key"))[:30]
)
def test_a_key_is_taken_or_refused_as_the_table_says(row: dict[str, Any]) -> None:
    if row["valid"]:
        request = operations.get(
            operations.checked_key(row["key"]), request_id=REQUEST_ID, service_key="sk-1"
        )
        assert request.path == f"/locks/{row['segment']}"
    else:
        with pytest.raises(ValueError, match="key must be 1 to 128 characters"):
            operations.checked_key(row["key"])


@pytest.mark.parametrize("row", rows("ttls", having="ttl"), ids=lambda row: row["text"][:30])
def test_a_ttl_is_taken_or_refused_as_the_table_says(row: dict[str, Any]) -> None:
    if row["valid"]:
        assert operations.checked_ttl(row["ttl"]) == row["ttl"]
    else:
        with pytest.raises(ValueError, match="ttl must be a whole number of seconds from 5"):
            operations.checked_ttl(row["ttl"])


@pytest.mark.parametrize(
    "ttl", [float("nan"), float("inf"), 10**400, pytest.param(10**5000, id="huge"), 30.0, b"30"]
)
def test_what_json_cannot_say_is_no_ttl_either(ttl: object) -> None:
    with pytest.raises(ValueError, match="ttl must be"):
        operations.checked_ttl(ttl)


@pytest.mark.parametrize("form", [TOKEN, TOKEN.upper(), f"{{{TOKEN}}}", uuid.UUID(TOKEN)])
def test_a_token_is_sent_in_its_canonical_form(form: object) -> None:
    assert operations.checked_token(form) == TOKEN


@pytest.mark.parametrize("form", ["secret-but-no-uuid", "", 7, None, b"x"])
def test_a_refused_token_is_not_shown(form: object) -> None:
    with pytest.raises(ValueError, match=r"token must be a UUID; got a .* that is none") as refusal:
        operations.checked_token(form)

    assert "secret" not in str(refusal.value)


def test_a_refused_request_id_is_shown_but_not_at_length() -> None:
    with pytest.raises(ValueError, match=r"request_id must be a UUID; got 'x{76}\.\.\."):
        operations.checked_request_id("x" * 1000)


def test_a_lease_must_be_one_and_of_this_key() -> None:
    lease = LockLease("a", TOKEN, datetime.now(UTC), 7)

    assert operations.checked_lease("a", lease) is lease
    with pytest.raises(ValueError, match="lease is a lease of 'a', not of 'b'"):
        operations.checked_lease("b", lease)
    with pytest.raises(
        TypeError, match="lease must be a LockLease, as acquire returns it; got str"
    ):
        operations.checked_lease("a", TOKEN)


# --- requests


def test_each_request_is_what_the_api_wants() -> None:
    common = {"request_id": REQUEST_ID, "service_key": "sk-1"}
    requests = [
        acquire(),
        operations.renew("a:b", ttl=5, token=TOKEN, **common),
        operations.release("a:b", token=TOKEN, **common),
        operations.get("a:b", **common),
        operations.force_release("a:b", **common),
    ]

    assert [(one.operation, one.method, one.path, one.body) for one in requests] == [
        ("acquire", "POST", "/locks/a%3Ab/lease", b'{"ttl_seconds":30}'),
        ("renew", "PATCH", "/locks/a%3Ab/lease", b'{"ttl_seconds":5}'),
        ("release", "DELETE", "/locks/a%3Ab/lease", b""),
        ("get", "GET", "/locks/a%3Ab", b""),
        ("force_release", "DELETE", "/locks/a%3Ab", b""),
    ]
    for one in requests:
        assert one.headers["Authorization"] == "Bearer sk-1"
        assert one.headers["Content-Type"] == "application/json"
        assert one.request_id == one.headers["X-Volcano-Request-Id"] == REQUEST_ID
        has_token = one.operation in ("acquire", "renew", "release")
        assert one.headers.get("X-Volcano-Lock-Token") == (TOKEN if has_token else None)


def test_no_repr_shows_a_secret() -> None:
    request = acquire()
    lease = granted(request, answer(201, GOOD)).lease("a:b", TOKEN)
    told = repr([request, Try(request, 1.0), lease, answer(201, TOKEN.encode())])

    assert TOKEN not in told
    assert "sk-1" not in told


# --- answers


def test_a_grant_is_read_with_its_instant_in_utc() -> None:
    body = b'{"expires_at": "2026-11-29T13:00:00.123+01:00", "fencing_token": 9007199254740991}'
    grant = granted(acquire(), answer(201, body, x_volcano_expires_in="29.950"))

    assert grant.expires_at == datetime(2026, 11, 29, 12, 0, 0, 123000, tzinfo=UTC)
    assert grant.expires_at.tzinfo is UTC
    assert grant.fencing_token == 2**53 - 1
    assert grant.expires_in == 29.95
    assert grant.sent_at == 10.0


@pytest.mark.parametrize("expires_in", ["", "-1", "soon", "1e3", "٧", "0x10", "nan"])
def test_an_expires_in_that_is_none_is_not_used(expires_in: str) -> None:
    grant = granted(acquire(), answer(201, GOOD, x_volcano_expires_in=expires_in))
    assert grant.expires_in is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[" * 100_000,
        b"7",
        b"\xff",
        b"{}",
        b'{"expires_at": null, "fencing_token": 7}',
        b'{"expires_at": "soon", "fencing_token": 7}',
        b'{"expires_at": "2026-11-29T12:00:00", "fencing_token": 7}',
        b'{"expires_at": "0001-01-01T00:00:00+23:00", "fencing_token": 7}',
        b'{"expires_at": "2026-11-29T12:00:00Z"}',
        b'{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": "7"}',
        b'{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": 7.0}',
        b'{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": true}',
        b'{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": -1}',
        b'{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": 9007199254740992}',
    ],
    ids=lambda body: body[:60],
)
def test_a_grant_that_cannot_be_read_is_a_server_error(body: bytes) -> None:
    with pytest.raises(ServerError, match="cannot be understood") as caught:
        granted(acquire(), answer(201, body))

    assert (caught.value.status, caught.value.request_id) == (201, REQUEST_ID)


def test_a_state_is_read() -> None:
    get = operations.get("a", request_id=REQUEST_ID, service_key="sk-1")
    held = b'{"held": true, ' + GOOD[1:]

    assert operations.state(get, answer(200, b'{"held": false}')) == LockState(held=False)
    assert operations.state(get, answer(200, held)) == LockState(
        held=True,
        expires_at=datetime(2026, 11, 29, 12, 0, 0, 123000, tzinfo=UTC),
        fencing_token=7,
    )
    for body in (b"{}", b'{"held": 1}', b'{"held": true}'):
        with pytest.raises(ServerError):
            operations.state(get, answer(200, body))


@pytest.mark.parametrize(
    "row", rows("error_names"), ids=lambda row: f"{row['status']} {row['code']}"
)
def test_an_error_has_the_name_that_all_sdks_share(row: dict[str, Any]) -> None:
    error = operations.problem(acquire(), refused(row["status"], row["code"]))

    assert type(error).__name__ == row["error"]
    assert (error.status, error.code, error.request_id) == (row["status"], row["code"], REQUEST_ID)
    assert str(error) == "A sentence."


@pytest.mark.parametrize(("status", "kind"), [(413, errors.ValidationError), (418, VolcanoError)])
def test_other_statuses_have_an_error_too(status: int, kind: type[VolcanoError]) -> None:
    assert type(operations.problem(acquire(), answer(status))) is kind


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"7", b'{"error": "x"}', b"[" * 100_000])
def test_a_page_of_a_proxy_is_an_error_without_explanation(body: bytes) -> None:
    error = operations.problem(acquire(), answer(502, body))

    assert str(error) in ("acquire was answered 502 without an explanation", "x")
    assert error.code is None


@pytest.mark.parametrize("row", rows("retry_after"), ids=lambda row: row["header"])
def test_retry_after_is_read_as_the_table_says(row: dict[str, Any]) -> None:
    assert operations.retry_after(row["header"]) == row["seconds"]


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:27:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:01 GMT", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "now", None),
        ("Wed, 21 Oct 2015 07:28:00 -0000", "Wed, 21 Oct 2015 07:28:00 GMT", None),
        (None, None, None),
    ],
)
def test_a_date_counts_from_the_answers_own_date(
    value: str | None, date: str | None, seconds: float | None
) -> None:
    assert operations.retry_after(value, date) == seconds


def test_a_refusal_carries_when_to_come_back() -> None:
    error = operations.problem(acquire(), answer(429, b"{}", retry_after="17"))

    assert isinstance(error, RateLimitedError)
    assert error.retry_after == 17


# --- flows


def acquired(*outcomes: Outcome, ttl: int = 30, timeout: float = 10) -> tuple[list[Try], Acquired]:
    tries, waiting = [], list(outcomes)
    flow = acquire_flow(acquire(), ttl=ttl, timeout=timeout)
    try:
        attempt = next(flow)
        while True:
            tries.append(attempt)
            attempt = flow.send(waiting.pop(0))
    except StopIteration as end:
        assert not waiting
        return tries, end.value


def test_an_acquire_that_is_answered_is_sent_once() -> None:
    tries, result = acquired(answer(201, GOOD, sent_at=3.0))

    assert len(tries) == 1
    assert (result.first_sent_at, result.grant.sent_at) == (3.0, 3.0)


@pytest.mark.parametrize(
    "first", [no_answer(reached=True), no_answer(reached=False), refused(503, "x")]
)
def test_an_acquire_without_a_decision_is_tried_once_more_and_is_the_same(first: Outcome) -> None:
    tries, result = acquired(first, answer(201, GOOD, sent_at=12.0))

    assert tries[0] == tries[1]
    assert tries[0].request.headers == tries[1].request.headers
    assert (result.first_sent_at, result.grant.sent_at) == (10.0, 12.0)


@pytest.mark.parametrize(("ttl", "timeout", "bound"), [(5, 10, 4), (30, 10, 10), (5, 1, 1)])
def test_a_try_of_an_acquire_takes_less_than_the_ttl(
    ttl: int, timeout: float, bound: float
) -> None:
    tries, _ = acquired(answer(201, GOOD), ttl=ttl, timeout=timeout)
    assert [one.timeout for one in tries] == [bound]


LOST, UNREACHABLE = no_answer(reached=True), no_answer(reached=False)
HELD, BUSY, JUNK = refused(409, "lock_held"), refused(503, "x"), answer(201, b"junk")
FORBIDDEN, BROKEN = refused(403, "permission_denied"), refused(500, "x")


@pytest.mark.parametrize(
    ("outcomes", "unknown"),
    [
        ([HELD], False),
        ([FORBIDDEN], False),
        ([BROKEN], True),
        ([JUNK], True),
        ([LOST, LOST], True),
        ([LOST, HELD], False),
        ([LOST, UNREACHABLE], True),
        ([LOST, FORBIDDEN], True),
        ([BUSY, HELD], False),
        ([BUSY, FORBIDDEN], True),
        ([BUSY, BUSY], True),
        ([UNREACHABLE, UNREACHABLE], False),
        ([UNREACHABLE, HELD], False),
        ([UNREACHABLE, LOST], True),
    ],
)
def test_whether_a_failed_acquire_left_a_lease_behind(
    outcomes: list[Outcome], unknown: bool
) -> None:
    with pytest.raises(AcquireFailedError) as failed:
        acquired(*outcomes)

    assert failed.value.unknown is unknown


def released(*outcomes: Outcome, tries: int = 2) -> int:
    flow = release_flow(release(), tries=tries)
    sent = 0
    try:
        attempt = next(flow)
        while True:
            assert attempt.timeout == 2.0
            sent += 1
            attempt = flow.send(outcomes[sent - 1])
    except StopIteration:
        assert sent == len(outcomes)
        return sent


DONE = answer(204)


def test_a_release_is_sent_again_only_without_an_answer_or_after_a_5xx() -> None:
    assert released(DONE) == 1
    assert released(LOST, DONE) == 2
    assert released(UNREACHABLE, DONE) == 2
    assert released(BROKEN, DONE) == 2
    assert released(LOST, HELD) == 2  # the first one did it


@pytest.mark.parametrize(
    ("outcomes", "tries", "error"),
    [
        ([HELD], 2, ConflictError),
        ([FORBIDDEN], 2, errors.PermissionDeniedError),
        ([LOST, LOST], 2, TransportError),
        ([LOST, BROKEN], 2, ServerError),
        ([LOST], 1, TransportError),
        ([BROKEN], 1, ServerError),
    ],
)
def test_a_release_that_fails_says_why(
    outcomes: list[Outcome], tries: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        released(*outcomes, tries=tries)
