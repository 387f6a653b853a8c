"""The latest lease of each followed key, and when it lapses.

    told, hear, see --> what is known of a key --> events
                              |  due?  one entry in the agenda for each key
                              '--> ask the store; only a key that it calls free has lapsed

Only followed keys are here, so a million live locks that nobody watches cost nothing.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from volcano_server import events
from volcano_server.agenda import Agenda
from volcano_server.batch import BatchQueue
from volcano_server.events import NOTHING, Event, Followed, Known
from volcano_server.lease import GRACE, SECOND, Answer, Granted, Held, Read, SlotKey, Write

_KEPT = 60 * SECOND
"""How long a lease that is over is remembered, so that what comes late is known to be late."""
_AGAIN = SECOND
_TOGETHER = 500
"""Keys that the store is asked about at a time."""


@dataclass(slots=True)
class _Followed:
    """`due`: when to look at it again, by the agenda's clock; `noted`: what the agenda says."""

    known: Known
    due: int
    noted: int | None = None


class Following:
    """Used from one event loop.  `publish` gets the events, in their order for each key.

    `catch_up`: hear what other servers have told by now, so that a look finds only what they have
    not.  Raises StoreUnavailableError.
    """

    def __init__(
        self,
        agenda: Agenda,
        queue: BatchQueue,
        publish: Callable[[Event], None],
        *,
        catch_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._agenda = agenda
        self._queue = queue
        self._publish = publish
        self._catch_up = catch_up
        # By key: SlotKey("shop", "nightly") -> _Followed(Known(7, 1_800_000_031_000_000), ...)
        self._followed: dict[SlotKey, _Followed] = {}
        self._on_due = self._due  # one object for all entries, of which there may be a million
        self._to_check: deque[tuple[SlotKey, int]] = deque()  # with the lease's fencing token
        self._checking: asyncio.Task[None] | None = None

    def told(self, command: Write, answer: Answer) -> None:
        """One command that is on disk."""
        left = answer.expires_in + GRACE if isinstance(answer, Granted) else 0
        slot_key = command.slot_key
        self._went(slot_key, events.told(self._known(slot_key), command, answer), left)

    def hear(self, event: Event, now: int) -> None:
        """What another server's store told; `now`: its time.  An unknown `free_at` is looked up."""
        left = max(0, event.free_at - now)
        self._went(event.slot_key, events.heard(self._known(event.slot_key), event), left)

    def see(self, slot_key: SlotKey, held: Held | None, at: int) -> None:
        """What a look at the key found now."""
        left = held.expires_in + GRACE if held else 0
        self._went(slot_key, events.seen(self._known(slot_key), slot_key, held, at), left)

    def learn(self, slot_key: SlotKey, held: Held) -> None:
        """What the first look at the key found."""
        after = events.learned(self._known(slot_key), held)
        self._went(slot_key, (after, ()), held.expires_in + GRACE)

    def forget(self, slot_keys: Iterable[SlotKey]) -> None:
        for slot_key in slot_keys:
            self._followed.pop(slot_key, None)

    def leases(self) -> dict[SlotKey, int]:
        """The fencing tokens of those that are not over."""
        return {
            slot_key: followed.known.fencing_token
            for slot_key, followed in self._followed.items()
            if followed.known.free_at is not None
        }

    def keys(self) -> list[SlotKey]:
        return list(self._followed)

    def clear(self) -> None:
        self._followed.clear()
        self._to_check.clear()

    async def settled(self) -> None:
        """When no look at the store is under way any more."""
        while self._checking is not None:
            await asyncio.wait([self._checking])

    def _known(self, slot_key: SlotKey) -> Known:
        followed = self._followed.get(slot_key)
        return NOTHING if followed is None else followed.known

    def _went(self, slot_key: SlotKey, went: Followed, left: int) -> None:
        """`left`: µs until the key is free, if it is not now."""
        known, happened = went
        followed = self._followed.get(slot_key)
        if followed is None:
            if known is NOTHING:
                return
            followed = self._followed[slot_key] = _Followed(known, 0)
        elif followed.known is known:
            return
        followed.known = known
        followed.due = self._agenda.now() + (_KEPT if known.free_at is None else left)
        # Mostly it only moves on, with a renewal: the entry that comes too early finds that out.
        if followed.noted is None or followed.due < followed.noted:
            self._note(slot_key, followed)
        for event in happened:
            self._publish(event)

    def _note(self, slot_key: SlotKey, followed: _Followed) -> None:
        followed.noted = followed.due
        self._agenda.note(followed.due, self._on_due, slot_key)

    def _due(self, slot_key: SlotKey) -> None:
        followed, now = self._followed.get(slot_key), self._agenda.now()
        if followed is None or followed.noted is None or followed.noted > now:
            return  # an entry that another one has made obsolete
        followed.noted = None
        if followed.due > now:
            self._note(slot_key, followed)
        elif followed.known.free_at is None:
            del self._followed[slot_key]
        else:
            self._to_check.append((slot_key, followed.known.fencing_token))
            if self._checking is None:
                self._checking = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        """Ask the store about the keys that should be free by now."""
        try:
            while self._to_check:
                number = min(_TOGETHER, len(self._to_check))
                some = [self._to_check.popleft() for _ in range(number)]
                found = await asyncio.gather(*(self._read(slot_key) for slot_key, _ in some))
                if not await self._caught_up():
                    found = [None] * number
                for (slot_key, lease), answer in zip(some, found, strict=True):
                    self._checked(slot_key, lease, answer)
        finally:
            self._checking = None

    async def _read(self, slot_key: SlotKey) -> Answer | None:
        try:
            return await self._queue.submit(Read(slot_key))
        except Exception:  # noqa: BLE001 - the requests that meet it say so; here it is tried again
            return None

    async def _caught_up(self) -> bool:
        if self._catch_up is not None:
            try:
                await self._catch_up()
            except Exception:  # noqa: BLE001 - as in `_read`
                return False
        return True

    def _checked(self, slot_key: SlotKey, fencing_token: int, answer: Answer | None) -> None:
        followed = self._followed.get(slot_key)
        if followed is None or followed.known.fencing_token != fencing_token:
            return
        free_at = followed.known.free_at
        if free_at is None:
            return
        if answer is not None:
            self.see(slot_key, answer if isinstance(answer, Held) else None, free_at)
        if followed.noted is None:
            followed.due = self._agenda.now() + _AGAIN
            self._note(slot_key, followed)
