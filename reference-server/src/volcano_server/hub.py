"""Tells those who listen what becomes of locks.

    batch queue --told--> Following (what is known of the followed keys) --events--,
    agenda --lapses------>                                                         |
    other servers --hear->                                                         v
    streams <--blocks-- Subscription <--fan out-- Room (one a project: filters, recent events)

Fed after each commit, in commit order.  While nobody listens the queue does not even call: then the
hub costs nothing.  Only the keys that a filter asks for are followed.

Servers that share a store each have a hub, which hears what all of them did, its own server too,
from one feed, in commit order for each key: feed.py.  What nobody left word of a look finds now and
then.  Either may come twice or late: events.py publishes each beginning and end once, in order.
The rule in words: docs/semantics.md#events.
"""

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from volcano_server.agenda import Agenda
from volcano_server.batch import BatchQueue
from volcano_server.clock import HostClock
from volcano_server.events import Event
from volcano_server.feed import Feed
from volcano_server.following import Following
from volcano_server.lease import SECOND, Answer, Held, Read, SlotKey, Write
from volcano_server.problems import Problem
from volcano_server.room import Filter, Room
from volcano_server.stores.store import SharedNews, Store, StoreUnavailableError
from volcano_server.subscription import Ending, Subscription
from volcano_server.wire_events import Filters, reset_block

MOST_STREAMS = 1_000
"""Of one project."""
COMMENTS = 15 * SECOND
LINGERS = 60 * SECOND
"""How long a filter is followed after its last subscription."""
CHUNK = 1_000
"""Slots that a look through a prefix takes at a time."""
_PATIENCE = 5.0


class TooManyStreamsError(Exception):
    pass


class Hub:
    """Used from one event loop.  `on_fault`: called with an exception at hand, for the operator."""

    def __init__(
        self,
        queue: BatchQueue,
        store: Store,
        clock: HostClock,
        *,
        news: SharedNews | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.feed: Feed | None = None
        if news is not None:
            self.feed = Feed(
                news,
                wanted=lambda: bool(self._rooms),
                hear=self.hear,
                lost=self._lost,
                look=self.look_again,
            )
        self.agenda = Agenda(clock)
        self.published: Counter[str] = Counter()  # {"acquired": 17, "lapsed": 1}
        self.sent = 0
        """Events, counted once for each stream that they went to."""
        self.ended: Counter[Ending] = Counter()
        self._on_fault = on_fault
        self._queue = queue
        self._store = store
        catch_up = None if self.feed is None else self.feed.catch_up
        self._following = Following(self.agenda, queue, self._publish, catch_up=catch_up)
        self._rooms: dict[str, Room] = {}
        self._filters: dict[Subscription, list[Filter]] = {}  # of all that are open
        self._drops: set[tuple[str, int]] = set()  # of idle filters: by project and when
        self._server = secrets.token_hex(4)  # part of each id: another server's is none of ours
        self._number = 0  # of the latest event
        self._closed = False
        self._thread: int | None = None  # of the event loop, once there was a stream

    def __len__(self) -> int:
        """How many streams are open."""
        return len(self._filters)

    async def open(self, project: str, filters: Filters, last_event_id: str | None) -> Subscription:
        """A subscription to what happens from now on, or from behind `last_event_id`.

        `leave` has to follow.  Raises TooManyStreamsError, StoreUnavailableError.
        """
        if self._closed:
            raise StoreUnavailableError("The server is stopping.")
        if self.feed is not None:
            await self.feed.catch_up()  # what came before is not for this one
        room = self._rooms.setdefault(project, Room())
        if len(room.subscriptions) >= MOST_STREAMS:
            raise TooManyStreamsError
        self._queue.on_written = self.told
        self._thread = threading.get_ident()
        subscription = Subscription(project, filters, self.ended)
        found = room.filters_of(subscription, self._number + 1)
        if any(each.since > self._number for each in found):
            self._number += 1  # what went before is not known of a new filter
        if last_event_id is not None:
            self._resume(subscription, last_event_id, room, found)
        room.join(subscription, found)
        self._filters[subscription] = found
        self.agenda.note(self.agenda.now() + COMMENTS, self._comment, subscription)
        try:
            await self._look(project, [each for each in found if not each.looked])
        except BaseException:
            self.leave(subscription)
            raise
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """Nobody reads it any more."""
        found = self._filters.pop(subscription, None)
        if found is None:
            return
        subscription.end(Ending.READER_GONE)
        self._rooms[subscription.project].leave(subscription, found)
        if self._closed:
            return
        idle, now = [each for each in found if not each.subscriptions], self.agenda.now()
        for each in idle:
            each.idle_since = now
        # On a whole second: where many leave, one look at what is followed is enough.
        drop = subscription.project, -(-(now + LINGERS) // SECOND) * SECOND
        if idle and drop not in self._drops:
            self._drops.add(drop)
            self.agenda.note(drop[1], self._drop_idle, drop)

    async def catch_up(self) -> None:
        """Tell what is due by now: for tests that have moved the clock."""
        if self.feed is not None:
            with suppress(StoreUnavailableError):  # the requests that meet it say so
                await self.feed.step()
        self.agenda.run()
        await self._following.settled()
        for _ in range(2):
            await asyncio.sleep(0)  # the streams write

    def clock_moved(self) -> None:
        """The same from any thread, and over when this returns unless it is the loop's own."""
        loop = self.agenda.loop
        if loop is None or self._closed:
            return
        caught_up = asyncio.run_coroutine_threadsafe(self.catch_up(), loop)
        if threading.get_ident() != self._thread:
            caught_up.result(_PATIENCE)

    def close(self) -> None:
        """End all streams; there will be no others."""
        self._closed = True
        for subscription in list(self._filters):
            subscription.end(Ending.STOPPING)
        self._queue.on_written = None
        self._following.clear()
        self.agenda.clear()

    # What happened.

    def told(self, commands: Sequence[Write], answers: Sequence[Answer]) -> None:
        """A batch of this server's that is on disk."""
        if self.feed is not None:
            if any(self.follows(command.slot_key) for command in commands):
                self.feed.wake()
            return
        rooms, following = self._rooms, self._following
        try:
            for command, answer in zip(commands, answers, strict=True):
                project, key = command.slot_key
                room = rooms.get(project)
                if room is not None and not isinstance(answer, Problem) and room.follows(key):
                    following.told(command, answer)
        except Exception:  # noqa: BLE001 - it must cost nobody the answer, only the streams
            self._on_fault()
            reset = reset_block(self._id(self._number))
            for subscription in list(self._filters):
                subscription.cut_off(reset)

    def hear(self, event: Event, now: int) -> None:
        """What a server has told, of a key that may be followed here; `now`: the store's time."""
        if self.follows(event.slot_key):
            self._following.hear(event, now)

    def _lost(self) -> None:
        """Events may be missing."""
        self._number += 1
        reset = reset_block(self._id(self._number))
        for room in self._rooms.values():
            room.forget(self._number)
        for subscription in self._filters:
            subscription.tell(reset, reset)

    async def look_again(self) -> None:
        """Find what nobody has left word of.  Raises StoreUnavailableError."""
        assert self.feed is not None
        before = self._following.leases()
        looked_at, found = set(before), dict[SlotKey, Held]()
        for project, room in list(self._rooms.items()):
            for each in room.filters():
                if each.is_prefix:
                    found.update([held async for held in self._held(project, each.text)])
                else:
                    looked_at.add(SlotKey(project, each.text))
        found.update(await self._held_of(list(looked_at - found.keys())))
        await self.feed.catch_up()  # what is left now was told by nobody
        for slot_key, held in found.items():
            if self.follows(slot_key):
                self._following.see(slot_key, held, held.expires_at - held.expires_in)
        after = self._following.leases()
        for slot_key, fencing_token in before.items():
            if slot_key not in found and after.get(slot_key) == fencing_token:
                self._following.see(slot_key, None, self.feed.now)

    def follows(self, slot_key: SlotKey) -> bool:
        room = self._rooms.get(slot_key.project)
        return room is not None and room.follows(slot_key.key)

    def _publish(self, event: Event) -> None:
        self._number += 1
        self.published[event.kind] += 1
        room = self._rooms[event.slot_key.project]
        event_id = self._id(self._number)
        self.sent += room.publish(event, self._number, event_id, reset_block(event_id))

    # Going on after an interruption.

    def _id(self, number: int) -> str:
        return f"{self._server}-{number}"

    def _resume(
        self, subscription: Subscription, event_id: str, room: Room, filters: list[Filter]
    ) -> None:
        now = self._number
        reset = reset_block(self._id(now))
        after = self._number_of(event_id)
        missed = None if after is None else room.missed(after, filters)
        for block in [reset] if missed is None else missed:
            subscription.tell(block, reset)

    def _number_of(self, event_id: str) -> int | None:
        """The number in an id that this server gave out."""
        server, _, number = event_id.partition("-")
        if server == self._server and number.isdecimal() and number.isascii():
            with suppress(ValueError):  # thousands of digits
                return int(number) if int(number) <= self._number else None
        return None

    # What is held when a filter is new.

    async def _look(self, project: str, filters: Sequence[Filter]) -> None:
        """Raises StoreUnavailableError."""
        await asyncio.gather(
            *(self._look_at(project, each) for each in filters if not each.is_prefix)
        )
        for each in filters:
            if each.is_prefix:
                await self._look_through(project, each)

    async def _look_at(self, project: str, new: Filter) -> None:
        slot_key = SlotKey(project, new.text)
        held = await self._queue.submit(Read(slot_key))
        if isinstance(held, Held):
            self._following.learn(slot_key, held)
        new.looked = True

    async def _look_through(self, project: str, new: Filter) -> None:
        async for slot_key, held in self._held(project, new.text):
            self._following.learn(slot_key, held)
        new.looked = True

    async def _held(self, project: str, prefix: str) -> AsyncIterator[tuple[SlotKey, Held]]:
        """Some at a time: a hundred thousand at once would stop the loop for a second."""
        after: str | None = ""
        while after is not None:
            chunk = await self._store.held(project, prefix, after, CHUNK)
            for key, held in chunk.held:
                yield SlotKey(project, key), held
            after = chunk.looked_to

    async def _held_of(self, slot_keys: Sequence[SlotKey]) -> dict[SlotKey, Held]:
        """Asked together: one by one they would hold up the news for as long as it takes."""
        found: dict[SlotKey, Held] = {}
        for first in range(0, len(slot_keys), CHUNK):
            some = slot_keys[first : first + CHUNK]
            answers = await asyncio.gather(*(self._queue.submit(Read(each)) for each in some))
            found.update(
                (slot_key, answer)
                for slot_key, answer in zip(some, answers, strict=True)
                if isinstance(answer, Held)
            )
        return found

    # What is due.

    def _comment(self, subscription: Subscription) -> None:
        if subscription.ending is None:
            subscription.comment()
            self.agenda.note(self.agenda.now() + COMMENTS, self._comment, subscription)

    def _drop_idle(self, drop: tuple[str, int]) -> None:
        """All filters whose time is over: for prefixes every followed key is looked at."""
        self._drops.discard(drop)
        project, _ = drop
        room = self._rooms.get(project)
        if room is None:
            return
        latest = self.agenda.now() - LINGERS
        idle = [
            each for each in room.filters() if not each.subscriptions and each.idle_since <= latest
        ]
        for each in idle:
            room.drop(each)
        followed = (
            self._following.keys()
            if any(each.is_prefix for each in idle)
            else [SlotKey(project, each.text) for each in idle]
        )
        self._following.forget(
            slot_key
            for slot_key in followed
            if slot_key.project == project and not room.follows(slot_key.key)
        )
        if not room:
            del self._rooms[project]
        if not self._rooms:
            self._queue.on_written = None
