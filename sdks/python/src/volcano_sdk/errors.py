"""What can go wrong, as a tree.

    VolcanoError
    ├── ValidationError        400: the server found the request wrong
    ├── AuthenticationError    401, or no service key was configured
    │   └── PermissionDeniedError  403
    ├── NotFoundError          404
    ├── ConflictError          409 of a direct call; from `with_lock`: somebody else holds the lock
    ├── LockLostError          from a guard or `with_lock`: we held the lock and may no longer act
    ├── RateLimitedError       429; `retry_after` says when to come back
    ├── ServerError            5xx, or an answer that cannot be understood
    └── TransportError         no answer arrived: whether the server acted is not known

`ConflictError` ("somebody else has it") and `LockLostError` ("I had it and lost it") are apart on
purpose.  Arguments that cannot be right raise ValueError before anything is sent.
The same names in every SDK: conformance/tables/error_names.json.
"""


class VolcanoError(Exception):
    """Base of all.  Each attribute is None where the error did not come with it.

    `status` is the HTTP status, `code` the server's word for it, `retry_after` seconds,
    `request_id` what the server logged the operation under.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.request_id = request_id


class ValidationError(VolcanoError):
    """The server found a key, TTL, token or request id wrong."""


class AuthenticationError(VolcanoError):
    """No service key, or one that the server does not know (any more)."""


class PermissionDeniedError(AuthenticationError):
    """The credential is good, but may not manage locks."""


class NotFoundError(VolcanoError):
    """The server has no such route: is `api_url` right?"""


class ConflictError(VolcanoError):
    """Somebody else holds the lock, or this lock token does not."""


class LockLostError(VolcanoError):
    """We held the lock and may no longer act; `__cause__`: what the server or network last said."""


class RateLimitedError(VolcanoError):
    """The project's quota of this minute is used up."""


class ServerError(VolcanoError):
    """The server failed, or said something that cannot be understood."""


class TransportError(VolcanoError):
    """No answer arrived.  The server may or may not have acted."""


def put_beside(error: BaseException, companion: BaseException) -> None:
    """Let `companion` travel with `error`: as a note, and at the end of its `__context__` chain.

    The user's own error is never masked: docs/semantics.md#exit.
    """
    travelling = chain(error)
    if companion in travelling:
        return
    for one in chain(companion):
        if one.__context__ in travelling:
            one.__context__ = None  # it was raised while `error` was handled: no circle
    travelling[-1].__context__ = companion
    travelling[-1].__suppress_context__ = False
    error.add_note(f"{type(companion).__name__}: {companion}")


def chain(error: BaseException) -> list[BaseException]:
    """The error, what it was raised from or while handling, and so on: as a traceback shows it."""
    errors = [error]
    while (before := _before(errors[-1])) is not None and before not in errors:
        errors.append(before)
    return errors


def _before(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def from_status(status: int) -> type[VolcanoError]:
    """The class of an error answer."""
    return _BY_STATUS.get(status, ServerError if status >= 500 else VolcanoError)


_BY_STATUS: dict[int, type[VolcanoError]] = {
    400: ValidationError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: ValidationError,
    429: RateLimitedError,
}
