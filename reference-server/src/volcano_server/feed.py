"""What all servers over one database did, read again and again while somebody listens here.

    a batch's transaction, anywhere --one row, if anybody watches--> news
    news --each 0.1 s, and at once after a batch of our own--> Feed --hear--> Hub

The order of commits is kept for each key, as the row of a key is locked from before its news get
their number until after the commit.  What becomes visible late between keys: news.py.  Where news
may be lost (another connection, another primary, nobody kept the watch up) the readers get a
`reset`, and the place is found anew.
Why not NOTIFY: docs/decisions/events_on_postgresql.md.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from volcano_server.events import Event
from volcano_server.lease import SECOND
from volcano_server.news import Place, events_in
from volcano_server.stores.store import News, SharedNews, StoreUnavailableError

PAUSE = 0.1
"""Seconds between two looks into the news."""
_SETTLED = 5.0
_LOOKS = 60.0
"""Seconds between two looks at what is followed itself, for what nobody has left word of."""
_AFTER_TROUBLE = 0.5
_KEPT = 50 * SECOND
"""How long news are sure to be there, by the store's clock."""


class Feed:
    """Used from one event loop.  `wanted`: whether anybody listens.

    `hear` gets each event and the store's time; `lost` is called where some may be missing; `look`
    compares what is followed with what is there.
    """

    def __init__(
        self,
        news: SharedNews,
        *,
        wanted: Callable[[], bool],
        hear: Callable[[Event, int], None],
        lost: Callable[[], None],
        look: Callable[[], Awaitable[None]],
        time: Callable[[], float] | None = None,
    ) -> None:
        self.now = 0
        """The store's time when the news were read last: µs."""
        self._news = news
        self._wanted = wanted
        self._hear = hear
        self._lost = lost
        self._look = look
        self._time = time or (lambda: asyncio.get_running_loop().time())
        self._place: Place | None = None
        self._was_read = False
        """Whether somebody has counted on the news since the feed last stopped."""
        self._turn = asyncio.Lock()
        self._tried = 0
        self._done = 0  # the latest try that succeeded
        self._wake = asyncio.Event()
        self._look_at = 0.0

    def wake(self) -> None:
        """There are news: read them now."""
        self._wake.set()

    async def run(self) -> None:
        """For as long as the server runs."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE if self._was_read else None)
            self._wake.clear()
            try:
                await self.step()
            except StoreUnavailableError:  # the requests that meet it say so
                await asyncio.sleep(_AFTER_TROUBLE)

    async def step(self) -> None:
        """What there is to do now.  Raises StoreUnavailableError."""
        async with self._turn:  # nobody must be in the midst of reading on from there
            if not self._wanted():
                self._place, self._was_read = None, False
                return
        await self.catch_up()
        if self._time() >= self._look_at:
            self._look_at = self._time() + _LOOKS
            await self._look()

    async def catch_up(self) -> None:
        """When this returns, all that was committed before it was called has been heard.

        Raises StoreUnavailableError.
        """
        asked = self._tried + 1
        async with self._turn:
            if self._done >= asked:
                return  # another one's look began after this one was asked for
            self._tried += 1
            await self._read()
            self._done = self._tried

    async def _read(self) -> None:
        while True:
            if self._place is None:
                await self._begin()
                return
            found = await self._news.read_news(self._place.top, self._place.missing)
            # Another server that keeps the watch up forgets what this one was too slow to read.
            if (
                found is None
                or found.now > self.now + _KEPT
                or not self._place.saw([number for number, _ in found.rows], self._time())
            ):
                self._place = None
                continue
            self._tell(found)
            if found.is_all:
                return

    async def _begin(self) -> None:
        top, seen, self.now = await self._news.begin_news()
        self._place = Place(top, seen, self._time())
        self._look_at = self._time() + _SETTLED  # a batch may not have known of the watch yet
        if self._was_read:
            self._lost()
        self._was_read = True
        self._wake.set()

    def _tell(self, found: News) -> None:
        self.now = found.now
        for _, text in found.rows:
            for event in events_in(text):
                self._hear(event, found.now)
