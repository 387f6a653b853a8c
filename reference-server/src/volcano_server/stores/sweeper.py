"""Walks over the slots for as long as the server runs, so that dead keys do not stay for ever."""

from collections.abc import Awaitable, Callable

from volcano_server.stores.store import Store, StoreUnavailableError

CHUNK = 1_000
IDLE_PAUSE = 1.0
BUSY_PAUSE = 0.05


async def keep_swept(store: Store, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Never returns; cancel it.  `sleep`: `asyncio.sleep`, or a test's own."""
    while True:
        try:
            deleted = await store.sweep(CHUNK)
        except StoreUnavailableError:
            deleted = 0  # The requests are answered so as well; the same slots are looked at again.
        # A thousand slots a second when there is little to do, twenty thousand when there is much.
        await sleep(BUSY_PAUSE if deleted > CHUNK // 2 else IDLE_PAUSE)
