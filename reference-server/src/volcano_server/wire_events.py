"""The wire form of event streams: the query that opens one, the blocks that it is made of.  Pure.

    in   key=nightly&prefix=ticket%3A       -> Filters
    out  : a comment, for whoever counts the seconds
         event: released
         id: 5d2c81f0-42
         data: {"key":"nightly","fencing_token":1795982151821663,"at":"2026-...Z","watchers":3}

docs/semantics.md#events.
"""

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from volcano_server import wire
from volcano_server.events import Event

MOST_FILTERS = 64

COMMENT = b":\n\n"
_WANTED = f"send key=K and prefix=P, 1 to {MOST_FILTERS} of them together"


@dataclass(frozen=True, slots=True)
class Filters:
    """What a stream asks for: these very keys, and every key that begins so."""

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]


def parse_filters(query: bytes) -> Filters:
    """The filters in a raw query, each once.  Raises InvalidRequestError."""
    found: dict[bytes, dict[str, None]] = {b"key": {}, b"prefix": {}}
    parameters = query.split(b"&") if query else []
    if not 1 <= len(parameters) <= MOST_FILTERS:
        raise wire.InvalidRequestError(f"key, prefix: {len(parameters)} of them came; {_WANTED}.")
    for parameter in parameters:
        raw_name, _, raw_value = parameter.partition(b"=")
        name = unquote_to_bytes(raw_name)
        if name not in found:
            raise wire.InvalidRequestError(
                f"{wire.shown(name)}: there is no such parameter here; {_WANTED}."
            )
        found[name][wire.parse_key(raw_value, name.decode(), "value")] = None
    return Filters(tuple(found[b"key"]), tuple(found[b"prefix"]))


def event_block(event: Event, event_id: str, watchers: int) -> bytes:
    return (
        f"event: {event.kind}\n"
        f"id: {event_id}\n"
        f'data: {{"key":"{event.slot_key.key}","fencing_token":{event.fencing_token},'
        f'"at":"{wire.timestamp(event.at)}","watchers":{watchers}}}\n\n'
    ).encode()


def reset_block(event_id: str) -> bytes:
    """Events may be missing: read again."""
    return f"event: reset\nid: {event_id}\ndata: {{}}\n\n".encode()
