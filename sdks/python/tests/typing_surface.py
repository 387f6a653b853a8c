"""The public types, checked by mypy and never run."""

from datetime import datetime
from typing import assert_type
from uuid import UUID

from volcano_sdk import (
    AsyncVolcanoClient,
    LockGuard,
    LockLease,
    LockLostError,
    LockState,
    VolcanoClient,
    VolcanoError,
)


def calls(client: VolcanoClient, token: UUID) -> None:
    lease = client.locks.acquire("a", ttl=30, token=token, request_id="x")
    assert_type(lease, LockLease)
    assert_type(lease.fencing_token, int)
    assert_type(lease.expires_at, datetime)
    assert_type(client.locks.renew("a", lease, ttl=30), LockLease)
    client.locks.release("a", lease)
    client.locks.force_release("a")
    state = client.locks.get("a")
    assert_type(state, LockState)
    assert_type(state.fencing_token, int | None)
    client.locks.acquire("a")  # type: ignore[call-arg]
    client.locks.acquire("a", 30)  # type: ignore[call-arg]
    lease.fencing_token = 7  # type: ignore[misc]


def block(client: VolcanoClient) -> int:
    with client as same, same.locks.with_lock("a", ttl=30) as guard:
        assert_type(same, VolcanoClient)
        assert_type(guard, LockGuard)
        assert_type(guard.lost, bool)
        assert_type(guard.wait_lost(1.5), bool)
        guard.on_lost(callback)
        guard.lost = True  # type: ignore[misc]
        return guard.lease.fencing_token


def callback(loss: LockLostError) -> None:
    assert_type(loss.status, int | None)
    assert_type(loss.retry_after, float | None)


def handled(error: VolcanoError) -> None:
    assert_type(error.code, str | None)
    assert_type(error.request_id, str | None)


async def asynchronous(client: AsyncVolcanoClient) -> int:
    async with client, client.locks.with_lock("a", ttl=30) as guard:
        assert_type(await guard.wait_lost(), bool)
        return guard.lease.fencing_token
