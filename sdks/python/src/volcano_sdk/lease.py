"""The values that callers get: frozen, and silent about the lock token."""

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class LockLease:
    """One acquisition of a key.

    `token` is the lock token, a UUID and a secret: whoever knows it holds the lease.
    `expires_at` is the server's instant in UTC, for people; trust a guard instead.
    `fencing_token` rises with each new holder and stays the same through renewals.
    """

    key: str
    token: str = field(repr=False)
    expires_at: datetime
    fencing_token: int


@dataclass(frozen=True, slots=True)
class LockState:
    """What a read tells of a key; `expires_at` and `fencing_token` are None when it is free."""

    held: bool
    expires_at: datetime | None = None
    fencing_token: int | None = None
