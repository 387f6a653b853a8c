"""What each call sends and what its answer means.  Pure: no I/O, no clock, no randomness.

A call that may take more than one try is a *flow*: a generator that yields each `Try` to be sent
and is resumed with its `Outcome`, so that the sync and the async client share every decision and
differ in plumbing only.

    flow ── Try(request, timeout) ──> transport ── Answer | Failure ──> flow ── return or raise
"""

import json
import re
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode

from volcano_sdk import errors
from volcano_sdk.errors import ServerError, TransportError, VolcanoError
from volcano_sdk.lease import LockLease, LockState

TTL_MIN = 5
TTL_MAX = 7_776_000
EXIT_TRY_SECONDS = 2.0
"""How long one try of a release on the way out may take, and how long a cancelled acquire may
still wait for its answer."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_HEADER = re.compile(r"[!-~]([ -~]*[!-~])?")


# --- arguments -----------------------------------------------------------------------------------


def checked_key(key: object, name: str = "key") -> str:
    """The key, or ValueError with the grammar; `name` is the argument's."""
    if isinstance(key, str) and _KEY.fullmatch(key):
        return key
    raise ValueError(
        f"{name} must be 1 to 128 characters, a letter or digit followed by letters, digits,"
        f" '.', '_', ':' or '-' (ASCII); got {_shown(key)}"
    )


def checked_ttl(ttl: object) -> int:
    """The TTL in whole seconds, or ValueError."""
    if isinstance(ttl, int) and not isinstance(ttl, bool) and TTL_MIN <= ttl <= TTL_MAX:
        return ttl
    raise ValueError(
        f"ttl must be a whole number of seconds from {TTL_MIN} to {TTL_MAX} (90 days);"
        f" got {_shown(ttl)}"
    )


def checked_token(token: object) -> str:
    """The lock token in its canonical form, or ValueError that does not show it."""
    return _checked_uuid("token", token, shown=False)


def checked_request_id(request_id: object) -> str:
    """The request id in its canonical form, or ValueError."""
    return _checked_uuid("request_id", request_id, shown=True)


def checked_lease(key: str, lease: object) -> LockLease:
    """The lease, or TypeError / ValueError: it must be a lease of this very key."""
    if not isinstance(lease, LockLease):
        raise TypeError(
            f"lease must be a LockLease, as acquire returns it; got {type(lease).__name__}"
        )
    if lease.key != key:
        raise ValueError(f"lease is a lease of {lease.key!r}, not of {key!r}")
    return lease


def _checked_uuid(name: str, value: object, *, shown: bool) -> str:
    try:
        return str(value if isinstance(value, uuid.UUID) else uuid.UUID(value))  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError):
        got = _shown(value) if shown else f"a {type(value).__name__} that is none"
        raise ValueError(f"{name} must be a UUID; got {got}") from None


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of over 4 300 digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One operation, fixed before the first send and identical on every try of it.

    `path` is relative to the API's URL; `headers` carry the credential and the lock token, but
    for `renew_many`, whose body has the tokens.
    """

    operation: str
    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)

    @property
    def request_id(self) -> str:
        return self.headers["X-Volcano-Request-Id"]


def acquire(key: str, *, ttl: int, token: str, request_id: str, service_key: str) -> Request:
    return _lease_request("acquire", "POST", key, service_key, request_id, token, ttl)


def renew(key: str, *, ttl: int, token: str, request_id: str, service_key: str) -> Request:
    return _lease_request("renew", "PATCH", key, service_key, request_id, token, ttl)


def release(key: str, *, token: str, request_id: str, service_key: str) -> Request:
    return _lease_request("release", "DELETE", key, service_key, request_id, token)


def renew_many(
    leases: Iterable[tuple[LockLease, int]], *, request_id: str, service_key: str
) -> Request:
    """One request for 1 to 500 leases, each with its TTL in seconds: an addition of our server."""
    body = [{"key": lease.key, "token": lease.token, "ttl_seconds": ttl} for lease, ttl in leases]
    return Request(
        "renew_many",
        "PATCH",
        "/lock-leases",
        _headers(service_key, request_id),
        json.dumps({"leases": body}, separators=(",", ":")).encode(),
    )


def get(key: str, *, request_id: str, service_key: str) -> Request:
    return Request("get", "GET", _path(key), _headers(service_key, request_id))


def force_release(key: str, *, request_id: str, service_key: str) -> Request:
    return Request("force_release", "DELETE", _path(key), _headers(service_key, request_id))


def watch(
    keys: Iterable[str],
    prefixes: Iterable[str],
    *,
    last_id: str,
    request_id: str,
    service_key: str,
) -> Request:
    """The stream of events of these: an addition of our server.  `last_id`: after which, or empty.

    An id that does not fit into a header is left out.
    """
    headers = {**_headers(service_key, request_id), "Accept": "text/event-stream"}
    if _HEADER.fullmatch(last_id):
        headers["Last-Event-ID"] = last_id
    query = urlencode([("key", key) for key in keys] + [("prefix", prefix) for prefix in prefixes])
    return Request("watch", "GET", f"/lock-events?{query}", headers)


def _lease_request(
    operation: str,
    method: str,
    key: str,
    service_key: str,
    request_id: str,
    token: str,
    ttl: int | None = None,
) -> Request:
    headers = _headers(service_key, request_id)
    headers["X-Volcano-Lock-Token"] = token
    body = b"" if ttl is None else b'{"ttl_seconds":%d}' % ttl
    return Request(operation, method, f"{_path(key)}/lease", headers, body)


def _path(key: str) -> str:
    return f"/locks/{quote(key, safe='')}"


def _headers(service_key: str, request_id: str) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {service_key}",
        "Content-Type": "application/json",
        "X-Volcano-Request-Id": request_id,
    }


# --- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said.  `sent_at`: when this try was sent, on the local clock.

    `headers` has lower-case names.
    """

    sent_at: float
    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer.  `reached`: the connection stood, so the server may have acted."""

    sent_at: float
    error: TransportError
    reached: bool


Outcome = Answer | Failure


@dataclass(frozen=True, slots=True)
class Try:
    """What a flow wants sent: this request, given up after `timeout` seconds."""

    request: Request
    timeout: float


@dataclass(frozen=True, slots=True)
class Grant:
    """A good answer to an acquire or a renewal.

    `expires_in`: what was left of the lease when the server decided, in seconds, if it says so.
    """

    sent_at: float
    expires_at: datetime
    fencing_token: int
    expires_in: float | None

    def lease(self, key: str, token: str) -> LockLease:
        return LockLease(key, token, self.expires_at, self.fencing_token)


def granted(request: Request, answer: Answer) -> Grant:
    """Read the answer to an acquire (201) or a renewal (200); any other raises its error."""
    _expect(request, answer, 201 if request.operation == "acquire" else 200)
    fields = _json_object(request, answer)
    return _grant(request, answer, fields, answer.headers.get("x-volcano-expires-in"))


def _grant(
    request: Request, answer: Answer, fields: dict[str, Any], expires_in: str | None
) -> Grant:
    return Grant(
        answer.sent_at,
        _instant(request, answer, fields),
        _fencing_token(request, answer, fields),
        _expires_in(expires_in),
    )


def renewed_many(
    request: Request, answer: Answer, keys: Sequence[str]
) -> list[Grant | VolcanoError]:
    """Read the answer to `renew_many`: what became of each lease, by position, asked for `keys`.

    Any answer but a 200 about exactly these raises its error.
    """
    _expect(request, answer, 200)
    items = _json_object(request, answer).get("leases")
    if not isinstance(items, list) or [_key_of(item) for item in items] != list(keys):
        raise _unreadable(request, answer, "leases")
    return [_renewed_one(request, answer, item) for item in items]


def _key_of(item: object) -> object:
    return item.get("key") if isinstance(item, dict) else None


def _renewed_one(request: Request, answer: Answer, item: dict[str, Any]) -> Grant | VolcanoError:
    code = item.get("code")
    if code is None:
        try:
            return _grant(request, answer, item, _as_header(item.get("expires_in")))
        except ServerError as error:
            return error
    status = _STATUS_OF_AN_ITEM.get(str(code))
    if status is None:
        return _unreadable(request, answer, "code")
    return errors.from_status(status)(
        str(item.get("error")),
        status=status,
        code=str(code),
        retry_after=retry_after(_as_header(item.get("retry_after"))),
        request_id=request.request_id,
    )


def _as_header(value: object) -> str | None:
    """A number of the body, as the header of the single route has it."""
    return str(value) if type(value) in (int, float) else None


_STATUS_OF_AN_ITEM = {
    "invalid_request": 400,
    "permission_denied": 403,
    "lock_held": 409,
    "lock_ownership_lost": 409,
    "lock_rate_limited": 429,
    "lock_service_unavailable": 503,
}


def state(request: Request, answer: Answer) -> LockState:
    """Read the answer to a read."""
    _expect(request, answer, 200)
    fields = _json_object(request, answer)
    match fields.get("held"):
        case True:
            return LockState(
                held=True,
                expires_at=_instant(request, answer, fields),
                fencing_token=_fencing_token(request, answer, fields),
            )
        case False:
            return LockState(held=False)
        case _:
            raise _unreadable(request, answer, "held")


def is_stream(status: int, headers: Mapping[str, str]) -> bool:
    """Whether an answer is a stream of events, whose body goes on.  Names are in lower case."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return status == 200 and kind == "text/event-stream"


def not_streamed(request: Request, answer: Answer) -> VolcanoError:
    """The error of an answer to `watch` that is no stream; a NotFoundError: there are no events."""
    if answer.status == 200:
        return _unreadable(request, answer, "content type")
    error = problem(request, answer)
    if answer.status == 405:
        error = errors.NotFoundError(
            str(error), status=405, code=error.code, request_id=error.request_id
        )
    return error


def released(request: Request, answer: Answer) -> None:
    """Read the answer to a release or a force release."""
    _expect(request, answer, 204)


def problem(request: Request, answer: Answer) -> VolcanoError:
    """The error that an answer other than the expected one stands for."""
    sentence, code = "", None
    try:
        fields = json.loads(answer.body)
        sentence, code = str(fields["error"]), str(fields["code"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # not from a lock server: a proxy's page says nothing that helps
    return errors.from_status(answer.status)(
        sentence or f"{request.operation} was answered {answer.status} without an explanation",
        status=answer.status,
        code=code,
        retry_after=retry_after(answer.headers.get("retry-after"), answer.headers.get("date")),
        request_id=request.request_id,
    )


def retry_after(value: str | None, date: str | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks for; None where it says nothing of use.

    A date counts from the answer's own `Date`: the local wall clock may be wrong.
    """
    if value is None:
        return None
    text = value.strip()
    if re.fullmatch(r"[0-9]{1,18}", text):
        return float(text)
    try:
        if date is None:
            return None
        seconds = (parsedate_to_datetime(text) - parsedate_to_datetime(date)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return seconds if seconds >= 0 else None


def _expect(request: Request, answer: Answer, status: int) -> None:
    if answer.status != status:
        raise problem(request, answer)


def _json_object(request: Request, answer: Answer) -> dict[str, Any]:
    try:
        fields = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise _unreadable(request, answer, "body") from None
    if not isinstance(fields, dict):
        raise _unreadable(request, answer, "body")
    return fields


def _instant(request: Request, answer: Answer, fields: dict[str, Any]) -> datetime:
    try:
        instant = datetime.fromisoformat(fields["expires_at"])
        if instant.tzinfo is not None:
            return instant.astimezone(UTC)
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise _unreadable(request, answer, "expires_at")


def _fencing_token(request: Request, answer: Answer, fields: dict[str, Any]) -> int:
    fencing_token = fields.get("fencing_token")
    if type(fencing_token) is not int or not 0 <= fencing_token < 2**53:
        raise _unreadable(request, answer, "fencing_token")
    return fencing_token


def _expires_in(value: str | None) -> float | None:
    if value is not None and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value):
        return float(value)
    return None  # an addition of ours, which other servers lack


def _unreadable(request: Request, answer: Answer, what: str) -> ServerError:
    return ServerError(
        f"{request.operation} was answered {answer.status}, but its {what} cannot be understood",
        status=answer.status,
        request_id=request.request_id,
    )


# --- flows ---------------------------------------------------------------------------------------


class AcquireFailedError(Exception):
    """How an acquire flow ends without a lease; `unknown`: the server may have granted one."""

    def __init__(self, error: VolcanoError, *, unknown: bool) -> None:
        super().__init__(error)
        self.error = error
        self.unknown = unknown


@dataclass(frozen=True, slots=True)
class Acquired:
    """How it ends with one.  `first_sent_at`: when the first try was sent."""

    grant: Grant
    first_sent_at: float


def acquire_flow(
    request: Request, *, ttl: int, timeout: float
) -> Generator[Try, Outcome, Acquired]:
    """At most two tries: a transport failure or a 503 is retried once, immediately.

    docs/semantics.md#ambiguous-acquire.  Raises AcquireFailedError.
    """
    attempt = Try(request, min(timeout, ttl - 1.0))
    first_sent_at: float | None = None
    unknown = False
    is_last = False
    while True:
        outcome = yield attempt
        if first_sent_at is None:
            first_sent_at = outcome.sent_at
        try:
            if isinstance(outcome, Failure):
                raise outcome.error
            return Acquired(granted(request, outcome), first_sent_at)
        except VolcanoError as error:
            unknown = _is_unknown(outcome, error, so_far=unknown)
            if is_last or not (isinstance(outcome, Failure) or outcome.status == 503):
                raise AcquireFailedError(error, unknown=unknown) from None
        is_last = True


def _is_unknown(outcome: Outcome, error: VolcanoError, *, so_far: bool) -> bool:
    if isinstance(outcome, Failure):
        return so_far or outcome.reached
    if outcome.status == 409:
        return False
    return so_far or isinstance(error, ServerError)


def release_flow(request: Request, *, tries: int) -> Generator[Try, Outcome, None]:
    """A release on the way out: bounded tries, the second only after no answer or a 5xx.

    docs/semantics.md#exit.  A 409 to a second try counts as released: the first one did it.
    """
    attempt = Try(request, EXIT_TRY_SECONDS)
    number = 0
    while True:
        outcome = yield attempt
        number += 1
        try:
            if isinstance(outcome, Failure):
                raise outcome.error
            released(request, outcome)
        except errors.ConflictError:
            if number == 1:
                raise
            return
        except (TransportError, ServerError):
            if number == tries:
                raise
        else:
            return
