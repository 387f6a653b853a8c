"""What servers over one database tell each other of events, as text.  Pure.

    Happened    {"from": "5d2c81f0", "events": [
                    ["released", "shop", "nightly", 1795982151821663, 1795982160000000, 0], ...]}
    Wish        {"from": "5d2c81f0", "number": 17, "projects": ["shop"], "asks": false,
                    "missed": false}

There is no lock token in any.  A text is what one NOTIFY takes, so what is longer becomes several
(events) or says less (a wish: for all projects).  What is not understood, a later version's perhaps,
is left out; so is what no server of ours says, since whoever may connect to the database may speak.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from volcano_server.events import Event, Kind
from volcano_server.lease import SlotKey
from volcano_server.wire import KEY

LONGEST = 7_900
"""Bytes; PostgreSQL takes 7 999."""
_ENDLESS = 2**53
_KINDS = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Happened:
    """Events in commit order.  `server`: of which they are."""

    server: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """Which projects' events a server wants to hear; None: all.

    `number` rises by one with each of a server's wishes.  `asks`: the others should say theirs.
    `missed`: events of this server were lost on their way, so the others should look.
    """

    server: str
    number: int
    projects: frozenset[str] | None
    asks: bool = False
    missed: bool = False


def of_events(server: str, events: Sequence[Event]) -> list[str]:
    """Texts that say all of them in their order."""
    rows = [
        (each.kind.value, *each.slot_key, each.fencing_token, each.at, each.free_at)
        for each in events
    ]
    text = _text({"from": server, "events": rows})
    if len(text) <= LONGEST or len(rows) == 1:
        return [text]
    half = len(events) // 2
    return of_events(server, events[:half]) + of_events(server, events[half:])


def of_wish(wish: Wish) -> str:
    projects = None if wish.projects is None else sorted(wish.projects)
    said = {
        "from": wish.server,
        "number": wish.number,
        "projects": projects,
        "asks": wish.asks,
        "missed": wish.missed,
    }
    text = _text(said)
    return text if len(text) <= LONGEST else _text({**said, "projects": None})


def understood(text: str) -> Happened | Wish | None:
    try:
        said = json.loads(text)
    except ValueError:
        return None
    match said:
        case {"from": str(server), "events": [*rows]}:
            found = (_event(row) for row in rows)
            return Happened(server, tuple(each for each in found if each is not None))
        case {
            "from": str(server),
            "number": int(number),
            "projects": None | [*_] as projects,
            "asks": bool(asks),
            "missed": bool(missed),
        }:
            wanted = None if projects is None else frozenset(map(str, projects))
            return Wish(server, number, wanted, asks, missed)
        case _:
            return None


def _event(row: Any) -> Event | None:
    match row:
        case [str(kind), str(project), str(key), int(token), int(at), int(free_at), *_] if (
            kind in _KINDS
            and KEY.fullmatch(key.encode())
            and all(0 <= number < _ENDLESS for number in (token, at, free_at))
        ):
            return Event(_KINDS[kind], SlotKey(project, key), token, at, free_at)
        case _:
            return None


def _text(said: dict[str, Any]) -> str:
    return json.dumps(said, separators=(",", ":"))
