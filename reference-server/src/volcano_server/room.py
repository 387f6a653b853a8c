"""What the streams of one project asked for, and what was told of it lately.

    key     --> filter --> the subscriptions that asked for it
    prefix  --> filter -->   (of prefixes: one look for each length that there is)

A filter outlives its last subscription for a while, so that a reader who comes back can go on where
it was: docs/semantics.md#events.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from volcano_server.events import Event
from volcano_server.subscription import MOST_WAITING, Subscription
from volcano_server.wire_events import event_block

MOST_RECENT = 10_000


@dataclass(slots=True, eq=False)
class Filter:
    """`since`: a number between those of the events before and after it began to be followed."""

    text: str
    is_prefix: bool
    since: int
    subscriptions: set[Subscription] = field(default_factory=set)
    looked: bool = False
    """The store was asked what is held there."""
    idle_since: int = 0
    """When its last subscription left, by the agenda's clock."""

    def matches(self, key: str) -> bool:
        return key.startswith(self.text) if self.is_prefix else key == self.text


class Told(NamedTuple):
    number: int
    key: str
    block: bytes


class Room:
    """Numbers are those of events, rising; the hub gives them out."""

    def __init__(self) -> None:
        self.subscriptions: set[Subscription] = set()
        self._by_key: dict[str, Filter] = {}
        self._by_prefix: dict[int, dict[str, Filter]] = {}  # by length: {3: {"abc": ...}}
        self._recent: deque[Told] = deque(maxlen=MOST_RECENT)
        self._forgotten = 0  # the number of the latest event that is not among the recent ones

    def __bool__(self) -> bool:
        """Whether anything is followed here."""
        return bool(self._by_key or self._by_prefix)

    def follows(self, key: str) -> bool:
        if key in self._by_key:
            return True
        return any(key[:length] in them for length, them in self._by_prefix.items())

    def filters_of(self, subscription: Subscription, now: int) -> list[Filter]:
        """Those that it asked for; a new one is followed from the number `now`, no event's, on."""
        wanted = subscription.filters
        found = []
        for key in wanted.keys:
            new = Filter(key, is_prefix=False, since=now)
            found.append(self._by_key.setdefault(key, new))
        for prefix in wanted.prefixes:
            new = Filter(prefix, is_prefix=True, since=now)
            found.append(self._by_prefix.setdefault(len(prefix), {}).setdefault(prefix, new))
        return found

    def join(self, subscription: Subscription, filters: list[Filter]) -> None:
        self.subscriptions.add(subscription)
        for each in filters:
            each.subscriptions.add(subscription)

    def leave(self, subscription: Subscription, filters: list[Filter]) -> None:
        self.subscriptions.discard(subscription)
        for each in filters:
            each.subscriptions.discard(subscription)

    def filters(self) -> list[Filter]:
        """All that are followed."""
        prefixes = (each for alike in self._by_prefix.values() for each in alike.values())
        return [*self._by_key.values(), *prefixes]

    def forget(self, now: int) -> None:
        """What came up to the number `now` cannot be told again."""
        self._recent.clear()
        self._forgotten = now

    def drop(self, dropped: Filter) -> None:
        """It is not followed any more."""
        if not dropped.is_prefix:
            del self._by_key[dropped.text]
            return
        alike = self._by_prefix[len(dropped.text)]
        del alike[dropped.text]
        if not alike:
            del self._by_prefix[len(dropped.text)]

    def missed(self, after: int, filters: list[Filter]) -> list[bytes] | None:
        """The blocks of what came after the number `after`; None if that is not known, or a lot."""
        if after < self._forgotten or any(after < each.since for each in filters):
            return None
        blocks = [
            told.block
            for told in self._recent
            if told.number > after and any(each.matches(told.key) for each in filters)
        ]
        return blocks if len(blocks) <= MOST_WAITING else None

    def publish(self, event: Event, number: int, event_id: str, reset: bytes) -> int:
        """Tell all who asked for its key; how many they are."""
        key = event.slot_key.key
        by_key = self._by_key.get(key)
        block = event_block(event, event_id, len(by_key.subscriptions) if by_key else 0)
        if len(self._recent) == MOST_RECENT:
            self._forgotten = self._recent[0].number
        self._recent.append(Told(number, key, block))
        readers = self._readers(key)
        for reader in readers:
            reader.tell(block, reset)
        return len(readers)

    def _readers(self, key: str) -> set[Subscription]:
        """Each once, however many of its filters match."""
        found = [each.subscriptions for each in self._matching(key)]
        return found[0] if len(found) == 1 else set().union(*found)

    def _matching(self, key: str) -> Iterator[Filter]:
        if key in self._by_key:
            yield self._by_key[key]
        for length, them in self._by_prefix.items():
            if (prefix := key[:length]) in them:
                yield them[prefix]
