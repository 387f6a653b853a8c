"""What is valid on the wire, and what goes out on it.  Pure.

    in   raw path segment -> key            docs/semantics.md#keys
         header values    -> lock token (canonical), request id
         body             -> TTL in seconds  docs/semantics.md#ttl
                     -> many renewals   docs/semantics.md#renew-many
    out  an answer        -> (status, headers, body)

A value that is not valid raises `InvalidRequestError`, whose sentence names the field, what came
and what is right.  A lock token, a request id and a service key are never repeated in one.
Bodies go out through templates: a tenth of what `model_dump_json` costs, and this is the hot path.
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, NamedTuple
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails

from volcano_server.lease import LONGEST, SECOND, Answer, Free, Granted, Held, Released
from volcano_server.problems import Problem

BODY_LIMIT = 4096
"""Bytes of a request's body."""
MANY_BODY_LIMIT = 128 * 1024
"""The same where the request is to renew many."""
MOST_LEASES = 500
"""In one request to renew many."""

SHORTEST_TTL = 5
LONGEST_TTL = LONGEST // SECOND

LOCK_TOKEN_HEADER = "X-Volcano-Lock-Token"
REQUEST_ID_HEADER = "X-Volcano-Request-Id"

RawHeaders = list[tuple[bytes, bytes]]
Reply = tuple[int, RawHeaders, bytes]
"""Status, headers, body."""

KEY = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_UUID = re.compile(rb"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_KEY_GRAMMAR = (
    "a key is 1 to 128 of the characters A-Z a-z 0-9 . _ : - and begins with a letter or a digit"
)
_SHOWN = 60
"""How many characters of a wrong value a sentence repeats."""


class InvalidRequestError(Exception):
    """A 400.  Its text is the sentence for the caller."""


class LeaseBody(BaseModel):
    """The body of acquire and renew."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ttl_seconds: int = Field(ge=SHORTEST_TTL, le=LONGEST_TTL)


class Renewal(LeaseBody):
    """One of the leases in the body of a request to renew many."""

    # In pydantic's language of patterns $ is the end, also before a newline.
    key: str = Field(pattern=f"^{KEY.pattern.decode()}$")
    token: str = Field(pattern=f"^{_UUID.pattern.decode()}$", repr=False)  # a secret


class RenewalsBody(BaseModel):
    """The body of a request to renew many."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    leases: Annotated[list[Renewal], FailFast()] = Field(min_length=1, max_length=MOST_LEASES)


class Together(NamedTuple):
    """The answers to a request to renew many, by position."""

    keys: Sequence[str]
    answers: Sequence[Answer]


# ---------------------------------------------------------------- in


def parse_key(segment: bytes, name: str = "key", sent_as: str = "path segment") -> str:
    """The key in one raw path segment: percent-decoded once, then checked."""
    # A valid key needs no encoding, so most segments are keys as they come.
    raw = segment if KEY.fullmatch(segment) else unquote_to_bytes(segment)
    if KEY.fullmatch(raw) is None:
        raise InvalidRequestError(
            f"{name}: got {shown(raw)}; {_KEY_GRAMMAR}, sent as one percent-encoded {sent_as}."
        )
    return raw.decode("ascii")


def parse_lock_token(value: bytes | None) -> str:
    """The lock token in its canonical, lower-case form."""
    return _parse_uuid(LOCK_TOKEN_HEADER, value).lower()


def parse_request_id(value: bytes | None) -> str:
    """The request id as it came."""
    return _parse_uuid(REQUEST_ID_HEADER, value)


def is_request_id(value: bytes | None) -> bool:
    """Whether the value may be sent back: also a refused request gets its id again."""
    return value is not None and _UUID.fullmatch(value) is not None


def _parse_uuid(header: str, value: bytes | None) -> str:
    if value is None:
        raise InvalidRequestError(f"{header}: the header is missing; send it once, with a UUID.")
    if _UUID.fullmatch(value) is None:
        raise InvalidRequestError(
            f"{header}: {len(value)} characters came that are not a UUID; "
            "send 8-4-4-4-12 hexadecimal digits."
        )
    return value.decode("ascii")


@lru_cache(maxsize=256)
def parse_ttl(body: bytes) -> int:
    """The TTL in seconds of an acquire's or a renewal's body."""
    try:
        ttl_seconds = LeaseBody.model_validate_json(body).ttl_seconds
    except ValidationError as error:
        raise InvalidRequestError(_body_sentence(error, body)) from None
    # One member without strings in its value has two quotes.  pydantic lets the last of several
    # members of one name win, and what another reader would see must not matter.
    if body.count(b'"') != 2:
        raise InvalidRequestError("body: a member came more than once; send ttl_seconds once.")
    return ttl_seconds


_WANTED_TTL = f"a JSON integer from {SHORTEST_TTL} to {LONGEST_TTL} (seconds)"


def _body_sentence(error: ValidationError, body: bytes) -> str:
    first = _first_error(error)
    kind, where, came = first["type"], first["loc"], first["input"]
    if kind == "extra_forbidden":
        return f"body: got the unknown member {shown(str(where[0]))}; send only ttl_seconds."
    if kind == "missing":
        return f"ttl_seconds: the member is missing; send {_WANTED_TTL}."
    if not where:
        return f'body: got {_no_object(body)}; send {{"ttl_seconds": n}}, n being {_WANTED_TTL}.'
    return f"ttl_seconds: got {_shown_json(came)}; send {_WANTED_TTL}."


def parse_renewals(body: bytes) -> list[Renewal]:
    """The leases in the body of a request to renew many.  One that is wrong spoils them all."""
    # Of a valid body: those of "leases", and of three names and two strings a lease.  More are
    # refused unread, because each unknown member makes an error of its own.
    quotes = body.count(b'"')
    if quotes > 2 + 10 * MOST_LEASES:
        raise InvalidRequestError(
            f"body: more members came than {MOST_LEASES} leases have; {_WANTED_LEASES}."
        )
    try:
        renewals = RenewalsBody.model_validate_json(body).leases
    except ValidationError as error:
        raise InvalidRequestError(_renewals_sentence(error, body)) from None
    if quotes != 2 + 10 * len(renewals):  # as in parse_ttl
        raise InvalidRequestError("body: a member came more than once; send each once.")
    return renewals


_WANTED_LEASES = (
    'send {"leases": [{"key": k, "token": t, "ttl_seconds": n}, ...]}, '
    f"1 to {MOST_LEASES} of them"
)
_WANTED_MEMBERS = {
    "key": _KEY_GRAMMAR,
    "token": "send a UUID, 8-4-4-4-12 hexadecimal digits",
    "ttl_seconds": f"send {_WANTED_TTL}",
}


def _renewals_sentence(error: ValidationError, body: bytes) -> str:
    """Shows what came only where it is a key or a number: anything else may hold a token."""
    first = _first_error(error)
    kind, where = first["type"], first["loc"]
    if not where:
        return f"body: got {_no_object(body)}; {_WANTED_LEASES}."
    if where[0] != "leases":
        return f"body: got the unknown member {shown(str(where[0]))}; {_WANTED_LEASES}."
    if len(where) == 1:
        what = _WRONG_LEASES.get(kind, "what came is not a JSON array")
        return f"leases: {what}; {_WANTED_LEASES}."
    if len(where) == 2:
        return f"leases[{where[1]}]: what came is not a JSON object; {_WANTED_LEASES}."
    position, name = where[1:3]
    if kind == "extra_forbidden":
        member = shown(str(name))
        return f"leases[{position}]: got the unknown member {member}; {_WANTED_LEASES}."
    came = first["input"]
    if kind == "missing":
        what = "the member is missing"
    elif name == "token":
        what = "what came is not a UUID"
    elif isinstance(came, str if name == "key" else float | int | None):
        what = f"got {_shown_json(came)}"
    else:
        what = f"what came is not {'a string' if name == 'key' else 'a number'}"
    return f"leases[{position}].{name}: {what}; {_WANTED_MEMBERS[str(name)]}."


_WRONG_LEASES = {
    "missing": "the member is missing",
    "too_short": "the array is empty",
    "too_long": "the array is too long",
}


def _first_error(error: ValidationError) -> ErrorDetails:
    """An unknown member is said before what is wrong with the others."""
    details = error.errors(include_url=False, include_context=False)
    return next((each for each in details if each["type"] == "extra_forbidden"), details[0])


def _no_object(body: bytes) -> str:
    return f"{len(body)} bytes that are not a JSON object" if body else "an empty body"


def shown(value: bytes | str) -> str:
    """A wrong value in quotes and printable ASCII, shortened."""
    text = value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else value
    return _shortened(json.dumps(text))


def _shown_json(value: Any) -> str:
    return _shortened(json.dumps(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


# ---------------------------------------------------------------- out


def timestamp(instant: int) -> str:
    """`instant` (µs since 1970) as RFC 3339 in UTC, rounded down to milliseconds."""
    seconds, micros = divmod(instant, SECOND)
    return f"{_to_the_second(seconds)}.{micros // 1000:03d}Z"


@lru_cache(maxsize=4096)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]


def seconds_text(micros: int) -> str:
    """A duration in seconds with milliseconds, rounded down."""
    return f"{micros // SECOND}.{micros % SECOND // 1000:03d}"


_JSON = (b"content-type", b"application/json")


def reply(answer: Answer | Together, *, created: bool = False) -> Reply:
    """The HTTP form of an answer.  `created`: a grant is 201 (acquire), else 200 (renew).

    The list of headers is new, so the caller may add its own.
    """
    match answer:
        case Granted():
            status, headers, body = json_reply(
                201 if created else 200,
                b'{"expires_at":"%b","fencing_token":%d}'
                % (timestamp(answer.expires_at).encode(), answer.fencing_token),
            )
            headers.append((b"x-volcano-expires-in", seconds_text(answer.expires_in).encode()))
            return status, headers, body
        case Released():
            return 204, [], b""
        case Held():
            return json_reply(
                200,
                b'{"held":true,"expires_at":"%b","fencing_token":%d}'
                % (timestamp(answer.expires_at).encode(), answer.fencing_token),
            )
        case Free():
            return json_reply(200, b'{"held":false}')
        case Problem():
            return problem_reply(answer)
        case Together():
            leases = map(_lease_in_many, answer.keys, answer.answers)
            return json_reply(200, b'{"leases":[%b]}' % b",".join(leases))


def _lease_in_many(key: str, answer: Answer) -> bytes:
    if isinstance(answer, Problem):
        return b'{"key":"%b",%b}' % (key.encode(), _problem_members(answer))
    assert isinstance(answer, Granted)
    return b'{"key":"%b","expires_at":"%b","expires_in":%b,"fencing_token":%d}' % (
        key.encode(),
        timestamp(answer.expires_at).encode(),
        seconds_text(answer.expires_in).encode(),
        answer.fencing_token,
    )


@lru_cache(maxsize=16)
def _problem_members(problem: Problem) -> bytes:
    members: dict[str, Any] = {"error": problem.sentence, "code": problem.code}
    if problem.retry_after is not None:
        members["retry_after"] = problem.retry_after
    return json.dumps(members, separators=(",", ":")).encode()[1:-1]


def problem_reply(problem: Problem) -> Reply:
    body = {"error": problem.sentence, "code": problem.code}
    status, headers, text = json_reply(problem.status, json.dumps(body).encode())
    if problem.retry_after is not None:
        headers.append((b"retry-after", b"%d" % problem.retry_after))
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, text


def json_reply(status: int, body: bytes) -> Reply:
    return status, [_JSON, (b"content-length", b"%d" % len(body))], body
