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
    429     lock_rate_limited           with Retry-After
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
