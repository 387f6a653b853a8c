"""Every refusal: status, code, sentence.  The only list of error codes.

status  code                        when
400     invalid_request             key, TTL, lock token, request id or body is wrong
401     authentication_required     no bearer credential
401     invalid_credentials         an unknown or revoked one
403     permission_denied           an anon key, or a service key without locks.manage
404     not_found                   no such route
405     method_not_allowed          with Allow
409     lock_held                   acquire: somebody else's, or lapsed and in the grace
409     lock_ownership_lost         acquire, renew, release: not yours (any more)
413     payload_too_large           the body
429     lock_rate_limited           over the quota, or too many event streams; with Retry-After
500     internal_error              a fault of the server itself; the log has the details
503     lock_service_unavailable    the store cannot answer, with Retry-After
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One refusal.  `retry_after` is in whole seconds, at least 1 where given."""

    status: int
    code: str
    sentence: str
    retry_after: int | None = None


LOCK_HELD = Problem(409, "lock_held", "Somebody else holds this lock.")
LOCK_OWNERSHIP_LOST = Problem(
    409, "lock_ownership_lost", "This lock token does not hold this lock (any more)."
)

AUTHENTICATION_REQUIRED = Problem(
    401,
    "authentication_required",
    "Authorization: send one header of the form 'Authorization: Bearer <service key>'.",
)
INVALID_CREDENTIALS = Problem(
    401,
    "invalid_credentials",
    "Authorization: this key is unknown or revoked; send a service key of this server.",
)
ANON_KEY_DENIED = Problem(
    403, "permission_denied", "Authorization: an anon key may not use locks; send a service key."
)
PERMISSION_DENIED = Problem(
    403,
    "permission_denied",
    "Authorization: this service key lacks the permission locks.manage; send one that has it.",
)
NOT_FOUND = Problem(404, "not_found", "There is no such route.")
INTERNAL_ERROR = Problem(
    500, "internal_error", "The server failed on this request; its log says more."
)


def invalid_request(sentence: str) -> Problem:
    """A 400.  `sentence` names the field, what came (never a secret) and what is right."""
    return Problem(400, "invalid_request", sentence)


def method_not_allowed(method: str, allowed: str) -> Problem:
    """A 405.  `allowed` is also the answer's Allow header."""
    return Problem(
        405, "method_not_allowed", f"{method} does not work on this route; it takes {allowed}."
    )


def payload_too_large(limit: int) -> Problem:
    """A 413.  `limit` is in bytes."""
    return Problem(413, "payload_too_large", f"The body is too large; send at most {limit} bytes.")


def rate_limited(limit: int, *, retry_after: int) -> Problem:
    """A 429.  `limit` is in requests a minute, `retry_after` in seconds until the window ends."""
    return Problem(
        429,
        "lock_rate_limited",
        f"This project has used its {limit} requests of this minute; try again in {retry_after} s.",
        retry_after=retry_after,
    )


def too_many_streams(limit: int) -> Problem:
    """A 429.  `limit`: of one project at one server."""
    return Problem(
        429,
        "lock_rate_limited",
        f"This project has {limit} event streams open here already; close one or try again in 5 s.",
        retry_after=5,
    )


def service_unavailable(sentence: str) -> Problem:
    """A 503: nothing was acknowledged."""
    return Problem(503, "lock_service_unavailable", sentence, retry_after=1)
