"""What a server tells of its locks: the stream's bytes, its events, and what to ask for.  Pure.

    bytes ──> EventParser ──> Message(type, data, id) ──> lock_event ──> LockEvent

The wire form is the HTML standard's event stream; conformance/tables/event_stream.json has it as
data.  docs/semantics.md#events.
"""

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

from volcano_sdk.errors import ServerError
from volcano_sdk.operations import checked_key

LONGEST_EVENT = 1 << 20
MOST_FILTERS = 64
"""Keys and prefixes together that one stream may ask for."""

EventType = Literal["acquired", "released", "force_released", "lapsed", "reset"]
FREEING: frozenset[EventType] = frozenset({"released", "force_released", "lapsed"})
"""Those after which a key may be had."""

_OF_A_LEASE = FREEING | {"acquired"}


@dataclass(frozen=True, slots=True)
class LockEvent:
    """What became of a lock: a hint, only an acquire decides who holds a key.

    `type` is `acquired`, `released`, `force_released`, `lapsed`, or `reset`: events may be missing
    from here on, read again.  Of a `reset` the other fields are None.  `fencing_token` is that of
    the lease which began or ended, `at` the server's instant of it in UTC, `watchers` how many
    streams asked for this very key.
    """

    type: EventType
    key: str | None = None
    fencing_token: int | None = None
    at: datetime | None = None
    watchers: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """An event as the stream has it; `id` is the last that was seen when it ended."""

    type: str
    data: str
    id: str


class EventParser:
    """Bytes in, as they come; whole events out.

    `last_id`: what `Last-Event-ID` would be; given to begin with where a stream goes on.
    `heard`: how many events and comments there were.
    """

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self.heard = 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._after_cr = False
        self._line = ""  # as far as it has come
        self._id = last_id
        self._type = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Message]:
        """The events that end in this chunk.  ServerError: one has no end."""
        text = self._decoder.decode(chunk)
        if not text:
            return []
        if self._after_cr and text[0] == "\n":
            text = text[1:]
        self._after_cr = text.endswith("\r")
        text = self._line + text.replace("\r\n", "\n").replace("\r", "\n")
        *lines, self._line = text.split("\n")
        messages = [message for line in lines if (message := self._take(line)) is not None]
        if len(self._line) + sum(map(len, self._data)) > LONGEST_EVENT:
            raise ServerError("an event of over 1 MiB was begun")
        return messages

    def _take(self, line: str) -> Message | None:
        if not line:
            return self._dispatched()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                self.heard += 1
            case "event":
                self._type = value
            case "data":
                self._data.append(value)
            case "id" if "\0" not in value:
                self._id = value
        return None

    def _dispatched(self) -> Message | None:
        self.last_id = self._id
        kind, self._type = self._type or "message", ""
        data, self._data = self._data, []
        if not data:
            return None
        self.heard += 1
        return Message(kind, "\n".join(data), self.last_id)


def lock_event(message: Message) -> LockEvent | None:
    """What it says of a lock; None where it is of a type that this SDK does not know.

    One that cannot be understood is a `reset`: something has happened, so read again.
    """
    if message.type == "reset":
        return LockEvent("reset")
    if message.type not in _OF_A_LEASE:
        return None
    try:
        return _event_of_a_lease(cast("EventType", message.type), json.loads(message.data))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return LockEvent("reset")


def _event_of_a_lease(kind: EventType, fields: dict[str, Any]) -> LockEvent:
    at = datetime.fromisoformat(fields["at"])
    numbers = [fields["fencing_token"], fields["watchers"]]
    if any(type(number) is not int or not 0 <= number < 2**53 for number in numbers):
        raise ValueError("not a fencing token, or not a number of watchers")
    if at.tzinfo is None:
        raise ValueError("an instant of nowhere")
    return LockEvent(kind, checked_key(fields["key"]), numbers[0], at.astimezone(UTC), numbers[1])


@dataclass(frozen=True, slots=True)
class Filters:
    """What a stream tells of: these keys, and those that begin so.  Both in order, each once."""

    keys: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    def cover(self, key: str) -> bool:
        return key in self.keys or key.startswith(self.prefixes)

    @staticmethod
    def of(keys: Iterable[str]) -> "Filters":
        """Of one stream that tells of all these keys; of many it tells more than that.

        conformance/tables/event_filters.json.
        """
        distinct = sorted(set(keys))
        if len(distinct) <= MOST_FILTERS:
            return Filters(keys=tuple(distinct))
        length = max(map(len, distinct))
        while len(prefixes := {key[:length] for key in distinct}) > MOST_FILTERS:
            length -= 1
        return Filters(prefixes=tuple(sorted(prefixes)))


def checked_filters(key: object, prefix: object) -> Filters:
    """What `watch` was asked for: each a string, several of them, or None.  ValueError."""
    filters = Filters(_checked("key", key), _checked("prefix", prefix))
    if not 1 <= len(filters.keys) + len(filters.prefixes) <= MOST_FILTERS:
        raise ValueError(
            f"watch needs a key or a prefix, at most {MOST_FILTERS} of both together;"
            f" got {len(filters.keys)} keys and {len(filters.prefixes)} prefixes"
        )
    return filters


def _checked(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    several = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
    return tuple(sorted({checked_key(each, name) for each in several}))
