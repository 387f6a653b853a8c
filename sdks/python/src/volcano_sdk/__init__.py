"""Volcano's distributed locks: renewable leases with fencing tokens, sync and async."""

from volcano_sdk.async_client import AsyncVolcanoClient
from volcano_sdk.async_guard import AsyncLockGuard
from volcano_sdk.async_watch import AsyncLockWatch
from volcano_sdk.client import VolcanoClient
from volcano_sdk.errors import (
    AuthenticationError,
    ConflictError,
    LockLostError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    ServerError,
    TransportError,
    ValidationError,
    VolcanoError,
)
from volcano_sdk.events import LockEvent
from volcano_sdk.guard import LockGuard
from volcano_sdk.lease import LockLease, LockState
from volcano_sdk.version import __version__
from volcano_sdk.watch import LockWatch

__all__ = [
    "AsyncLockGuard",
    "AsyncLockWatch",
    "AsyncVolcanoClient",
    "AuthenticationError",
    "ConflictError",
    "LockEvent",
    "LockGuard",
    "LockLease",
    "LockLostError",
    "LockState",
    "LockWatch",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitedError",
    "ServerError",
    "TransportError",
    "ValidationError",
    "VolcanoClient",
    "VolcanoError",
    "__version__",
]
