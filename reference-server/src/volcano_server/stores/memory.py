"""A store that forgets: for tests, for `--ephemeral`, and as the plainest reading of the seam."""

import heapq
from collections.abc import Callable, Sequence

from volcano_server import fencing
from volcano_server.clock import HostClock, LeaseClock
from volcano_server.lease import (
    DAY,
    NEVER_HELD,
    Answer,
    Held,
    Read,
    Slot,
    SlotKey,
    Write,
    decide,
    decide_all,
)
from volcano_server.stores.store import HeldKeys, StoreUnavailableError


class MemoryStore:
    """Every slot in a dict.  Nothing is awaited inside, so each job is atomic on its loop."""

    def __init__(self, host: HostClock) -> None:
        self._host = host
        self._clock = LeaseClock(host, None)
        self._opened_at = self._clock.now()
        self._slots: dict[SlotKey, Slot] = {}
        self._to_sweep: list[SlotKey] = []
        self._highest_swept = 0

    async def open(self) -> None:
        """Nothing to make ready."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        slots = {
            command.slot_key: self._slots.get(command.slot_key, NEVER_HELD) for command in commands
        }
        floor = fencing.floor(
            highest_swept=self._highest_swept, wall=self._host.wall(), opened_at=self._opened_at
        )
        answers, changed = decide_all(slots, commands, self._clock.now(), floor)
        if not may_commit():
            raise StoreUnavailableError("The batch came too late.")
        self._slots.update(changed)
        return answers

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        now = self._clock.now()
        return [
            decide(self._slots.get(command.slot_key, NEVER_HELD), command, now, 0)[1]
            for command in commands
        ]

    async def held(self, project: str, prefix: str, after: str, limit: int) -> HeldKeys:
        wanted = (
            slot_key
            for slot_key in self._slots
            if slot_key.project == project
            and slot_key.key.startswith(prefix)
            and slot_key.key > after
        )
        keys = heapq.nsmallest(limit, wanted)
        answers = await self.read([Read(slot_key) for slot_key in keys])
        return HeldKeys(
            [
                (slot_key.key, answer)
                for slot_key, answer in zip(keys, answers, strict=True)
                if isinstance(answer, Held)
            ],
            keys[-1].key if len(keys) == limit else None,
        )

    async def sweep(self, limit: int) -> int:
        if not self._to_sweep:
            self._to_sweep = list(self._slots)
        looked_at, self._to_sweep = self._to_sweep[:limit], self._to_sweep[limit:]
        free_before = self._clock.now() - DAY
        deleted = [key for key in looked_at if self._slots[key].free_at() <= free_before]
        for key in deleted:
            self._highest_swept = max(self._highest_swept, self._slots.pop(key).fencing_token)
        return len(deleted)
