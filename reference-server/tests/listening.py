"""A hub on a store in memory whose clock the test moves, and what its readers are told."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from volcano_server.batch import BatchQueue
from volcano_server.clock import ManualClock
from volcano_server.hub import Hub
from volcano_server.lease import (
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Granted,
    Release,
    Renew,
    SlotKey,
)
from volcano_server.stores.memory import MemoryStore
from volcano_server.subscription import Subscription
from volcano_server.wire_events import Filters

PROJECT = "shop"


@dataclass(frozen=True, slots=True)
class Heard:
    """An event as a client reads it; of a `reset` only its id."""

    kind: str
    id: str
    key: str | None = None
    fencing_token: int | None = None
    at: str | None = None
    watchers: int | None = None


def parse(text: bytes) -> list[Heard]:
    """The events among whole blocks."""
    heard = []
    for block in text.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line != ":")
        if fields:
            heard.append(Heard(fields["event"], fields["id"], **json.loads(fields["data"])))
    return heard


def brief(heard: Sequence[Heard]) -> list[tuple[str, str | None]]:
    """[("acquired", "nightly"), ("reset", None), ...]"""
    return [(each.kind, each.key) for each in heard]


class Listening:
    """A queue, its hub and short words for what a test does with them."""

    def __init__(self, store: MemoryStore | None = None, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.store = store or MemoryStore(self.clock)
        self.queue = BatchQueue(self.store)
        self.faults = 0
        self.hub = Hub(self.queue, self.store, self.clock, on_fault=self._count)

    async def close(self) -> None:
        self.hub.close()
        await self.queue.close()

    async def open(
        self,
        *keys: str,
        prefixes: Sequence[str] = (),
        after: str | None = None,
        project: str = PROJECT,
    ) -> Subscription:
        return await self.hub.open(project, Filters(keys, tuple(prefixes)), after)

    async def heard(self, subscription: Subscription) -> list[Heard]:
        """What has come since the last time; does not wait."""
        if not subscription._waiting:
            return []
        return parse(await anext(subscription.blocks()))

    async def do(self, command: Command) -> Any:
        return await self.queue.submit(command)

    async def acquire(
        self, key: str = "nightly", token: str = "alice", ttl: int = 30, project: str = PROJECT
    ) -> Granted:
        answer: Answer = await self.do(Acquire(SlotKey(project, key), token, ttl))
        assert isinstance(answer, Granted), answer
        return answer

    async def renew(self, key: str = "nightly", token: str = "alice", ttl: int = 30) -> Granted:
        answer: Answer = await self.do(Renew(SlotKey(PROJECT, key), token, ttl))
        assert isinstance(answer, Granted), answer
        return answer

    async def release(self, key: str = "nightly", token: str = "alice") -> None:
        await self.do(Release(SlotKey(PROJECT, key), token))

    async def force_release(self, key: str = "nightly") -> None:
        await self.do(ForceRelease(SlotKey(PROJECT, key)))

    async def advance(self, seconds: float) -> None:
        """Time passes, and what is due by then has been told."""
        self.clock.advance(seconds)
        await self.hub.catch_up()

    def _count(self) -> None:
        self.faults += 1
