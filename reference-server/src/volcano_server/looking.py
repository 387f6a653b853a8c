"""A look at the followed keys: what nobody has told is found there.

    read each key, go through each prefix --> what differs from what is known
    wait for what is on its way           --> what differs still goes to the hub

A look finds what is, not what was: an end is told as `released`, or as `lapsed` where the lease's
time was over, and a lease that began and ended between two looks is not told at all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from volcano_server.hub import CHUNK, Hub
from volcano_server.lease import Free, Held, Read, SlotKey
from volcano_server.stores.store import Store


@dataclass(slots=True)
class _Found:
    """`begun`: leases that were not known of; `over`: by key the lease that is, and since when."""

    begun: list[tuple[SlotKey, Held]] = field(default_factory=list)
    over: list[tuple[SlotKey, int, int]] = field(default_factory=list)


async def look(hub: Hub, store: Store, *, patience: float) -> None:
    """Tell the hub what it does not know of.  Raises StoreUnavailableError.

    `patience`: seconds in which what is on its way may still be heard, which says more.
    """
    known = hub.leases()
    found = _Found()
    for project, keys, prefixes in hub.looked():
        for prefix in prefixes:
            missing = await _look_through(hub, store, project, prefix, known, found)
            await _look_at(hub, store, missing, known, found)
        slot_keys = [SlotKey(project, key) for key in keys]
        await _look_at(hub, store, slot_keys, known, found)
    if found.begun or found.over:
        await asyncio.sleep(patience)
    for slot_key, held in found.begun:
        hub.see(slot_key, held, held.expires_at - held.expires_in)
    for slot_key, fencing_token, at in found.over:
        hub.see_over(slot_key, fencing_token, at)


async def _look_at(
    hub: Hub,
    store: Store,
    slot_keys: Sequence[SlotKey],
    known: dict[SlotKey, int],
    found: _Found,
) -> None:
    for start in range(0, len(slot_keys), CHUNK):
        some = slot_keys[start : start + CHUNK]
        answers = await store.read([Read(slot_key) for slot_key in some])
        for slot_key, answer in zip(some, answers, strict=True):
            if isinstance(answer, Held):
                _is_held(hub, slot_key, answer, known, found)
            elif isinstance(answer, Free) and slot_key in known:
                found.over.append((slot_key, known[slot_key], answer.at))


async def _look_through(
    hub: Hub, store: Store, project: str, prefix: str, known: dict[SlotKey, int], found: _Found
) -> list[SlotKey]:
    """Those that were known to be held and are not among the held ones."""
    missing = {
        slot_key
        for slot_key in known
        if slot_key.project == project and slot_key.key.startswith(prefix)
    }
    after: str | None = ""
    while after is not None:
        chunk = await store.held(project, prefix, after, CHUNK)
        for key, held in chunk.held:
            slot_key = SlotKey(project, key)
            missing.discard(slot_key)
            _is_held(hub, slot_key, held, known, found)
        after = chunk.looked_to
    return sorted(missing)


def _is_held(
    hub: Hub, slot_key: SlotKey, held: Held, known: dict[SlotKey, int], found: _Found
) -> None:
    if held.fencing_token > known.get(slot_key, 0):
        found.begun.append((slot_key, held))
    else:
        hub.see(slot_key, held, held.expires_at - held.expires_in)  # it may have been renewed
