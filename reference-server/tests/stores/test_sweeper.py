import asyncio

import pytest

from volcano_server.clock import ManualClock
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.store import StoreUnavailableError
from volcano_server.stores.sweeper import BUSY_PAUSE, CHUNK, IDLE_PAUSE, keep_swept

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class ScriptedStore(MemoryStore):
    """Each sweep comes to what the script says: so many deleted, or an error."""

    def __init__(self, *script: int | Exception) -> None:
        super().__init__(ManualClock())
        self.script = iter(script)

    async def sweep(self, limit: int) -> int:
        assert limit == CHUNK
        outcome = next(self.script)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def pauses_of(store: ScriptedStore, count: int) -> list[float]:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == count:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await keep_swept(store, sleep)
    return pauses


async def test_the_sweeper_hurries_only_while_there_is_much_to_delete() -> None:
    store = ScriptedStore(0, CHUNK, CHUNK // 2 + 1, CHUNK // 2)

    assert await pauses_of(store, 4) == [IDLE_PAUSE, BUSY_PAUSE, BUSY_PAUSE, IDLE_PAUSE]


async def test_the_sweeper_outlives_a_store_that_cannot_answer() -> None:
    store = ScriptedStore(StoreUnavailableError("the disk is full"), CHUNK)

    assert await pauses_of(store, 2) == [IDLE_PAUSE, BUSY_PAUSE]
