"""What all servers over one database did, read again and again while somebody listens here.

    a batch's transaction, anywhere --one row, if anybody watches--> news
    news --each 0.1 s, and at once after a batch of our own--> Feed --hear--> Hub

The order of commits is kept for each key, as the row of a key is locked from before its news get
their number until after the commit.  Between keys a lower number may become visible later than a
higher one: `Place` remembers what is missing, and asks for it until no transaction can still hold
it.  Where news may be lost (another connection, another primary, nobody kept the watch up) the
readers get a `reset`, and the place is found anew.
Why not NOTIFY: docs/decisions/events_on_postgresql.md.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from volcano_server.events import NOTHING, Event, Kind, told
from volcano_server.lease import Answer, Granted, SlotKey, Write
from volcano_server.stores.store import News, SharedNews, StoreUnavailableError

PAUSE = 0.1
"""Seconds between two looks into the news."""
_MISSING = 10.0
"""Seconds after which a number that is not there belongs to no transaction any more."""
_MOST_MISSING = 10_000
_SETTLED = 5.0
_LOOKS = 60.0
"""Seconds between two looks at what is followed itself, for what nobody has left word of."""
_AFTER_TROUBLE = 0.5


def text_of(
    commands: Sequence[Write], answers: Sequence[Answer], expiries: Mapping[SlotKey, int]
) -> str | None:
    """What a batch leaves word of; None where no lease began, ended or got a shorter time.

    `expiries`: of the leases before the batch.  A longer time is found out when the old one is
    over; a shorter one is told as the lease's beginning is, which counts once.
    """
    latest = dict(expiries)
    rows: list[tuple[str | int, ...]] = []
    for command, answer in zip(commands, answers, strict=True):
        said = answer
        if isinstance(answer, Granted):
            if answer.expires_at < latest.get(command.slot_key, 0):
                said = replace(answer, begins=True)
            latest[command.slot_key] = answer.expires_at
        rows += [
            (event.kind.value, *event.slot_key, event.fencing_token, event.at, event.free_at)
            for event in told(NOTHING, command, said)[1]
        ]
    return json.dumps(rows, separators=(",", ":")) if rows else None


def events_in(text: str) -> list[Event]:
    return [
        Event(Kind(kind), SlotKey(project, key), fencing_token, at, free_at)
        for kind, project, key, fencing_token, at, free_at in json.loads(text)
    ]


class Place:
    """How far the news are read: up to `top`, without those in `missing`."""

    def __init__(self, top: int, seen: Iterable[int], now: float) -> None:
        self.top = top
        there = {top, *seen}
        # By number, when to stop asking for it: {41: 1_234.5}
        self._missing = dict.fromkeys(set(range(min(there), top)) - there, now + _MISSING)

    @property
    def missing(self) -> list[int]:
        return list(self._missing)

    def saw(self, numbers: Sequence[int], now: float) -> bool:
        """In their order.  False: too much is missing to wait for it."""
        for number in numbers:
            if number > self.top:
                if number - self.top > _MOST_MISSING:
                    return False
                self._missing.update(dict.fromkeys(range(self.top + 1, number), now + _MISSING))
                self.top = number
            else:
                self._missing.pop(number, None)
        while self._missing and (first := next(iter(self._missing.items())))[1] <= now:
            del self._missing[first[0]]
        return len(self._missing) <= _MOST_MISSING


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
            numbers = None if found is None else [number for number, _ in found.rows]
            if found is None or numbers is None or not self._place.saw(numbers, self._time()):
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
