"""What a batch leaves word of for other servers, and how far such news are read.  Pure.

    [["released", "shop", "nightly", 1795982151821663, 1795982160000000, 0], ...]
      kind, project, key, fencing token, at, free at

There is no lock token in it.  News have numbers, given out before their commit: a lower one may
become visible later than a higher one, and one that was rolled back never does.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from volcano_server.events import NOTHING, Event, Kind, told
from volcano_server.lease import Answer, Granted, SlotKey, Write

_MISSING = 10.0
"""Seconds after which a number that is not there belongs to no transaction any more."""
_MOST_MISSING = 10_000


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
