"""One reader of a project's events: what waits for it, and when it ends.

    tell, comment --> waiting blocks --> blocks() --> the connection, as fast as it takes them

What waits is bounded: a reader with too much before it is cut off.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from enum import StrEnum

from volcano_server.wire_events import COMMENT, Filters

MOST_WAITING = 1_000


class Ending(StrEnum):
    """Why a stream is over."""

    READER_GONE = "reader_gone"
    CUT_OFF = "cut_off"
    REFUSED = "refused"  # its credential does not count any more, or not as it did
    STOPPING = "stopping"


class Subscription:
    """Used from one event loop.  Blocks are whole events or comments, as they go out.

    `endings`: where its end is counted.
    """

    def __init__(self, project: str, filters: Filters, endings: Counter[Ending]) -> None:
        self.project = project
        self.filters = filters
        self.told = 0
        """How many events were handed to the connection."""
        self.ending: Ending | None = None
        self.on_end: Callable[[Ending], None] | None = None
        """Called when nothing more will come; what waits may still go out.  Maybe several times."""
        self._endings = endings
        self._waiting: list[bytes] = [COMMENT]  # at once: the reader knows that it is heard
        self._events_waiting = 0
        self._wake: asyncio.Future[None] | None = None

    def tell(self, block: bytes, reset: bytes) -> None:
        """An event.  `reset`: what a reader gets instead for whom it is one too many."""
        if self.ending is not None:
            return
        if self._events_waiting == MOST_WAITING:
            self.cut_off(reset)
            return
        self._waiting.append(block)
        self._events_waiting += 1
        self._go_on()

    def cut_off(self, reset: bytes) -> None:
        """The end, and word of it instead of what waits."""
        self._waiting, self._events_waiting = [reset], 1
        self.end(Ending.CUT_OFF)

    def comment(self) -> None:
        """A sign of life, where nothing else is on its way."""
        if not self._waiting:
            self._waiting.append(COMMENT)
            self._go_on()

    def end(self, ending: Ending) -> None:
        """The first reason counts; a later one may leave less time for what waits."""
        if self.ending is None:
            self.ending = ending
            self._endings[ending] += 1
            self._go_on()
        if self.on_end is not None:
            self.on_end(ending)

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """What to send, some blocks at a time, until the end."""
        while True:
            if self._waiting:
                waiting, self._waiting = self._waiting, []
                self.told += self._events_waiting
                self._events_waiting = 0
                yield b"".join(waiting)
            elif self.ending is not None:
                return
            else:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake

    def _go_on(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)
