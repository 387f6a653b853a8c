"""Who is told what, when: the hub before a store in memory, by a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from listening import PROJECT, Heard, Listening, brief

from volcano_server import hub as module
from volcano_server.clock import ManualClock
from volcano_server.events import Event, Kind
from volcano_server.hub import CHUNK, COMMENTS, LINGERS, MOST_STREAMS, TooManyStreamsError
from volcano_server.lease import SECOND, Answer, Read, SlotKey
from volcano_server.room import MOST_RECENT
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.store import HeldKeys, StoreUnavailableError
from volcano_server.subscription import MOST_WAITING, Ending
from volcano_server.wire_events import COMMENT

pytestmark = pytest.mark.anyio

NIGHTLY = SlotKey(PROJECT, "nightly")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    listening = Listening()
    yield listening
    await listening.close()


class CountingStore(MemoryStore):
    """Counts what it is asked, and fails while it is told to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.reads: list[SlotKey] = []
        self.chunks: list[tuple[str, str, int]] = []
        self.troubled = False

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        if self.troubled:
            raise StoreUnavailableError("disk full")
        self.reads += [command.slot_key for command in commands]
        return await super().read(commands)

    async def held(self, project: str, prefix: str, after: str, limit: int) -> HeldKeys:
        if self.troubled:
            raise StoreUnavailableError("disk full")
        self.chunks.append((prefix, after, limit))
        return await super().held(project, prefix, after, limit)


# What is told.


async def test_each_change_of_a_key_is_told_after_its_commit(listening: Listening) -> None:
    stream = await listening.open("nightly")

    first = await listening.acquire()
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]
    await listening.release()
    second = await listening.acquire()
    await listening.force_release()

    heard = await listening.heard(stream)
    assert heard == [
        Heard(kind, each.id, "nightly", token, "2027-01-15T08:00:00.000Z", watchers=1)
        for each, (kind, token) in zip(
            heard,
            [
                ("released", first.fencing_token),
                ("acquired", second.fencing_token),
                ("force_released", second.fencing_token),
            ],
            strict=True,
        )
    ]
    numbers = [int(each.id.removeprefix(f"{listening.hub._server}-")) for each in heard]
    assert numbers == sorted(set(numbers))


async def test_what_changes_no_lease_is_not_told(listening: Listening) -> None:
    stream = await listening.open("nightly")
    await listening.release()
    await listening.force_release()
    await listening.acquire()
    await listening.heard(stream)

    await listening.acquire()  # the same lock token
    await listening.renew(ttl=60)
    await listening.release(token="bob")
    await listening.do(Read(NIGHTLY))

    assert await listening.heard(stream) == []


async def test_a_stream_is_told_of_what_it_asked_for_and_once(listening: Listening) -> None:
    both = await listening.open("ticket:1", prefixes=["tick", "ticket:", "t"])
    family = await listening.open(prefixes=["ticket:"])
    other = await listening.open("ticket:2")

    for key in ("ticket:1", "ticket:3", "tack", "night"):
        await listening.acquire(key)

    assert brief(await listening.heard(both)) == [
        ("acquired", key) for key in ("ticket:1", "ticket:3", "tack")
    ]
    assert brief(await listening.heard(family)) == [
        ("acquired", key) for key in ("ticket:1", "ticket:3")
    ]
    assert await listening.heard(other) == []


async def test_another_project_is_not_told(listening: Listening) -> None:
    mine = await listening.open("nightly")
    theirs = await listening.open("nightly", project="bank")

    await listening.acquire(project="bank")

    assert await listening.heard(mine) == []
    assert brief(await listening.heard(theirs)) == [("acquired", "nightly")]


async def test_watchers_are_the_streams_that_asked_for_this_very_key(listening: Listening) -> None:
    streams = [await listening.open("nightly") for _ in range(3)]
    family = await listening.open(prefixes=["n"])

    await listening.acquire()
    await listening.acquire("noon")
    listening.hub.leave(streams[0])
    await listening.release()

    assert [each.watchers for each in await listening.heard(family)] == [3, 0, 2]


async def test_a_batch_is_told_in_its_order(listening: Listening) -> None:
    stream = await listening.open("nightly")

    await asyncio.gather(
        listening.acquire(),
        listening.release(),
        listening.acquire(token="bob"),
        listening.force_release(),
        listening.acquire(token="carol"),
    )

    heard = await listening.heard(stream)
    assert [each.kind for each in heard] == [
        *("acquired", "released", "acquired", "force_released", "acquired")
    ]
    tokens = [each.fencing_token or 0 for each in heard]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 3


async def test_without_a_stream_the_queue_does_not_call(listening: Listening) -> None:
    def is_called() -> bool:
        return listening.queue.on_written is not None

    assert not is_called()
    stream = await listening.open("nightly")
    assert is_called()
    listening.hub.leave(stream)
    await listening.advance(LINGERS / SECOND)

    assert not is_called()
    assert listening.hub._rooms == {}
    assert listening.hub._following.keys() == []


async def test_a_fault_of_the_hub_costs_streams_and_no_answer(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await listening.open("nightly")
    monkeypatch.setattr(listening.hub._following, "told", lambda *_: 1 / 0)

    await listening.acquire()

    assert listening.faults == 1
    assert stream.ending is Ending.CUT_OFF
    assert brief(await listening.heard(stream)) == [("reset", None)]


# Lapses.


async def test_a_lapse_is_told_when_the_grace_is_over_and_not_before(listening: Listening) -> None:
    stream = await listening.open("nightly")
    granted = await listening.acquire(ttl=5)
    await listening.heard(stream)

    await listening.advance(5.999999)
    assert await listening.heard(stream) == []
    await listening.advance(0.000001)

    (lapsed,) = await listening.heard(stream)
    assert (lapsed.kind, lapsed.fencing_token) == ("lapsed", granted.fencing_token)
    assert lapsed.at == "2027-01-15T08:00:06.000Z"
    await listening.advance(1_000)
    assert await listening.heard(stream) == []


async def test_a_renewal_puts_the_lapse_off_and_a_shorter_one_brings_it_forward(
    listening: Listening,
) -> None:
    stream = await listening.open("nightly")
    await listening.acquire(ttl=5)
    await listening.advance(3)
    await listening.renew(ttl=60)
    await listening.advance(10)
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]

    await listening.renew(ttl=5)
    await listening.advance(5.9)
    assert await listening.heard(stream) == []
    await listening.advance(0.1)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]


async def test_a_lease_from_before_the_stream_lapses_too(listening: Listening) -> None:
    for key in ("nightly", "ticket:1", "ticket:2"):
        await listening.acquire(key, ttl=5)
    await listening.release("ticket:2")

    stream = await listening.open("nightly", "hourly", prefixes=["ticket:"])
    await listening.advance(5.9)
    assert await listening.heard(stream) == []
    await listening.advance(0.1)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly"), ("lapsed", "ticket:1")]


async def test_the_next_grant_tells_of_the_lapse_first(listening: Listening) -> None:
    stream = await listening.open("nightly")
    first = await listening.acquire(ttl=5)
    listening.clock.advance(60)  # nothing that is due has had its turn

    second = await listening.acquire(token="bob")

    heard = await listening.heard(stream)
    assert [(each.kind, each.fencing_token) for each in heard] == [
        ("acquired", first.fencing_token),
        ("lapsed", first.fencing_token),
        ("acquired", second.fencing_token),
    ]
    await listening.advance(1)
    assert await listening.heard(stream) == []


async def test_what_was_released_does_not_lapse(listening: Listening) -> None:
    stream = await listening.open("nightly")
    await listening.acquire(ttl=5)
    await listening.release()
    await listening.heard(stream)

    await listening.advance(100)

    assert await listening.heard(stream) == []


async def test_lapses_come_in_the_order_in_which_they_are_due(listening: Listening) -> None:
    stream = await listening.open(prefixes=["k"])
    for key, ttl in (("k2", 20), ("k1", 10), ("k3", 30)):
        await listening.acquire(key, ttl=ttl)
    await listening.heard(stream)

    await listening.advance(3_600)

    assert brief(await listening.heard(stream)) == [
        ("lapsed", "k1"),
        ("lapsed", "k2"),
        ("lapsed", "k3"),
    ]


async def test_a_lapse_that_the_store_cannot_confirm_is_asked_about_again() -> None:
    clock = ManualClock()
    store = CountingStore(clock)
    listening = Listening(store, clock)
    stream = await listening.open("nightly")
    await listening.acquire(ttl=5)
    await listening.heard(stream)

    store.troubled = True
    await listening.advance(6)
    assert await listening.heard(stream) == []
    store.troubled = False
    await listening.advance(1)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]
    await listening.close()


async def test_only_the_store_says_that_a_lease_has_lapsed(listening: Listening) -> None:
    """Where its clock goes slower than the host's, the lapse waits for it."""
    stream = await listening.open("nightly")
    await listening.acquire(ttl=5)
    await listening.heard(stream)
    listening.store._clock._start = type(listening.store._clock._start)(
        "boot-0", 0, listening.store._clock._start.now - SECOND
    )

    await listening.advance(6)
    assert await listening.heard(stream) == []
    await listening.advance(1)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]


async def test_a_million_live_locks_that_nobody_watches_cost_nothing() -> None:
    clock = ManualClock()
    store = CountingStore(clock)
    listening = Listening(store, clock)
    granted = await listening.acquire("k0", ttl=5)
    slot = store._slots[SlotKey(PROJECT, "k0")]
    store._slots.update((SlotKey(PROJECT, f"k{number}"), slot) for number in range(1, 1_000_000))

    stream = await listening.open("k777777")
    await listening.advance(6)

    (lapsed,) = await listening.heard(stream)
    assert (lapsed.kind, lapsed.key) == ("lapsed", "k777777")
    assert lapsed.fencing_token == granted.fencing_token
    assert store.reads == [SlotKey(PROJECT, "k777777")] * 2  # one look at first, one when due
    assert store.chunks == []
    await listening.close()


# A look through a prefix.


async def test_a_prefix_is_looked_through_in_pieces() -> None:
    clock = ManualClock()
    store = CountingStore(clock)
    listening = Listening(store, clock)
    await asyncio.gather(*(listening.acquire(f"k{number:04}", ttl=5) for number in range(2_500)))

    stream = await listening.open(prefixes=["k"])

    assert [limit for _, _, limit in store.chunks] == [CHUNK] * 3
    assert [after for _, after, _ in store.chunks] == ["", "k0999", "k1999"]
    again = await listening.open(prefixes=["k"])
    assert len(store.chunks) == 3  # what is followed already is not looked at
    await listening.advance(6)
    for each in (stream, again):
        assert each.ending is Ending.CUT_OFF  # nobody reads 2 500 events here
    assert listening.hub.published["lapsed"] == 2_500
    await listening.close()


async def test_what_a_look_has_found_is_learned_before_the_next_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once would stop the loop: for a second where a hundred thousand are held."""
    clock = ManualClock()
    store = CountingStore(clock)
    listening = Listening(store, clock)
    for number in range(5):
        await listening.acquire(f"k{number}")
    monkeypatch.setattr(module, "CHUNK", 2)
    learned: list[int] = []
    monkeypatch.setattr(
        listening.hub._following, "learn", lambda *_: learned.append(len(store.chunks))
    )

    await listening.open(prefixes=["k"])

    assert learned == [1, 1, 2, 2, 3]
    await listening.close()


async def test_a_store_that_cannot_look_opens_no_stream() -> None:
    clock = ManualClock()
    store = CountingStore(clock)
    listening = Listening(store, clock)
    await listening.acquire(ttl=5)
    store.troubled = True

    with pytest.raises(StoreUnavailableError):
        await listening.open("nightly", "hourly")
    with pytest.raises(StoreUnavailableError):
        await listening.open(prefixes=["n"])

    assert len(listening.hub) == 0
    store.troubled = False
    stream = await listening.open("nightly", prefixes=["n"])
    await listening.advance(6)
    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]
    await listening.close()


async def test_what_happens_during_the_look_is_told(listening: Listening) -> None:
    opening = asyncio.ensure_future(listening.open("nightly"))
    await asyncio.sleep(0)
    await listening.acquire()
    await listening.release()

    assert brief(await listening.heard(await opening)) == [
        ("acquired", "nightly"),
        ("released", "nightly"),
    ]


# Comments.


async def test_a_comment_comes_at_once_and_every_15_s(listening: Listening) -> None:
    stream = await listening.open("nightly")
    blocks = stream.blocks()
    assert await anext(blocks) == COMMENT

    for _ in range(3):
        await listening.advance(14.9)
        assert stream._waiting == []
        await listening.advance(0.1)
        assert await anext(blocks) == COMMENT

    await blocks.aclose()


async def test_a_stream_that_is_over_gets_no_comment(listening: Listening) -> None:
    stream = await listening.open("nightly")
    await listening.heard(stream)
    listening.hub.leave(stream)

    await listening.advance(COMMENTS / SECOND)

    assert stream._waiting == []


# Going on.


async def test_a_reader_that_comes_back_goes_on_where_it_was(listening: Listening) -> None:
    stream = await listening.open("nightly", prefixes=["t"])
    await listening.acquire()
    (first,) = await listening.heard(stream)
    listening.hub.leave(stream)
    await listening.release()
    await listening.acquire("ticket")
    await listening.acquire("other")

    again = await listening.open("nightly", prefixes=["t"], after=first.id)
    await listening.acquire()

    assert brief(await listening.heard(again)) == [
        ("released", "nightly"),
        ("acquired", "ticket"),
        ("acquired", "nightly"),
    ]
    narrower = await listening.open("nightly", after=first.id)
    assert brief(await listening.heard(narrower)) == [
        ("released", "nightly"),
        ("acquired", "nightly"),
    ]


UNKNOWN = (
    *("", "42", "é", "0a1b2c3d-1"),
    *(f"{{server}}-{rest}" for rest in ("", "x", "-1", "3", "²", "1-1", "9" * 5_000)),
)


@pytest.mark.parametrize("unknown", UNKNOWN)
async def test_an_id_that_is_not_known_is_answered_with_reset(
    listening: Listening, unknown: str
) -> None:
    stream = await listening.open("nightly")
    await listening.acquire()
    (known,) = await listening.heard(stream)

    again = await listening.open("nightly", after=unknown.format(server=listening.hub._server))

    assert await listening.heard(again) == [Heard("reset", known.id)]  # from here on


async def test_a_filter_that_is_new_is_answered_with_reset(listening: Listening) -> None:
    stream = await listening.open("nightly")
    await listening.acquire()
    (known,) = await listening.heard(stream)

    again = await listening.open("nightly", "hourly", after=known.id)

    (reset,) = await listening.heard(again)
    assert reset.kind == "reset"
    third = await listening.open("nightly", "hourly", after=reset.id)
    assert await listening.heard(third) == []  # followed since then


async def test_what_a_new_filter_has_missed_since_the_last_event_is_a_reset(
    listening: Listening,
) -> None:
    """Nothing was told in between, and yet something happened."""
    stream = await listening.open("nightly")
    await listening.acquire()
    (known,) = await listening.heard(stream)
    await listening.acquire("hourly")

    again = await listening.open("hourly", after=known.id)

    assert brief(await listening.heard(again)) == [("reset", None)]


async def test_a_reset_can_be_gone_on_from(listening: Listening) -> None:
    stream = await listening.open("nightly", after="unknown")
    (reset,) = await listening.heard(stream)
    listening.hub.leave(stream)
    await listening.acquire()

    again = await listening.open("nightly", after=reset.id)

    assert brief(await listening.heard(again)) == [("acquired", "nightly")]


async def test_what_is_too_long_ago_is_answered_with_reset(listening: Listening) -> None:
    stream = await listening.open("nightly", "hourly")
    await listening.acquire()
    (known,) = await listening.heard(stream)
    for _ in range(MOST_RECENT // 2):
        await listening.acquire("hourly")
        await listening.release("hourly")

    again = await listening.open("nightly", after=known.id)
    assert await listening.heard(again) == []  # the latest 10 000 are known
    await listening.release()
    too_late = await listening.open("nightly", after=known.id)

    assert brief(await listening.heard(too_late)) == [("reset", None)]


async def test_more_than_may_wait_is_a_reset_and_not_the_end(listening: Listening) -> None:
    stream = await listening.open("nightly")
    await listening.acquire()
    (known,) = await listening.heard(stream)
    for _ in range(MOST_WAITING // 2):
        await listening.release()
        await listening.acquire()

    all_of_them = await listening.open("nightly", after=known.id)
    await listening.release()
    reset = await listening.open("nightly", after=known.id)

    assert len(all_of_them._waiting) <= 1 + MOST_WAITING
    assert brief(await listening.heard(reset)) == [("reset", None)]
    assert reset.ending is None


async def test_a_filter_lingers_for_a_minute_after_its_last_stream(listening: Listening) -> None:
    stream = await listening.open("nightly", prefixes=["n"])
    await listening.acquire(ttl=120)
    (known,) = await listening.heard(stream)
    listening.hub.leave(stream)

    await listening.advance(59.9)
    again = await listening.open("nightly", prefixes=["n"], after=known.id)
    assert await listening.heard(again) == []
    listening.hub.leave(again)
    await listening.advance(59.9)  # the minute of the first is over, that of the second is not
    third = await listening.open("nightly", after=known.id)
    assert await listening.heard(third) == []
    listening.hub.leave(third)
    await listening.advance(61)

    fourth = await listening.open("nightly", after=known.id)
    assert brief(await listening.heard(fourth)) == [("reset", None)]


async def test_a_lapse_while_nobody_listens_is_there_for_who_comes_back(
    listening: Listening,
) -> None:
    stream = await listening.open("nightly")
    await listening.acquire(ttl=5)
    (known,) = await listening.heard(stream)
    listening.hub.leave(stream)
    await listening.advance(30)

    again = await listening.open("nightly", after=known.id)

    assert brief(await listening.heard(again)) == [("lapsed", "nightly")]


async def test_a_dropped_filter_forgets_only_what_no_other_follows(listening: Listening) -> None:
    family = await listening.open(prefixes=["n"])
    single = await listening.open("nightly")
    await listening.acquire(ttl=300)
    await listening.acquire("noon", ttl=300)
    listening.hub.leave(family)
    await listening.advance(61)

    assert listening.hub._following.keys() == [NIGHTLY]
    await listening.advance(300)
    assert brief(await listening.heard(single))[-1] == ("lapsed", "nightly")


async def test_filters_that_were_left_together_cost_one_look_at_what_is_followed(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look for each would stop the loop for seconds."""
    await listening.open(prefixes=["ticket:"])
    await listening.acquire("ticket:1", ttl=300)
    for number in range(100):
        stream = await listening.open(f"k{number}", prefixes=[f"a{number}", f"b{number}"])
        listening.hub.leave(stream)
        listening.clock.advance(0.001)
    looks = 0
    keys = listening.hub._following.keys

    def counted() -> list[SlotKey]:
        nonlocal looks
        looks += 1
        return keys()

    monkeypatch.setattr(listening.hub._following, "keys", counted)

    await listening.advance(61)

    assert looks == 1
    assert [each.text for each in listening.hub._rooms[PROJECT].filters()] == ["ticket:"]
    assert keys() == [SlotKey(PROJECT, "ticket:1")]


async def test_leases_that_are_over_are_not_kept(listening: Listening) -> None:
    """A family of keys that are used once each must not fill the memory."""
    await listening.open(prefixes=["ticket:"])
    for number in range(100):
        await listening.acquire(f"ticket:{number}")
        await listening.release(f"ticket:{number}")
    assert len(listening.hub._following.keys()) == 100

    await listening.advance(60)

    assert listening.hub._following.keys() == []


# Bounds and ends.


async def test_a_project_has_so_many_streams_and_no_more(listening: Listening) -> None:
    streams = [await listening.open("nightly") for _ in range(MOST_STREAMS)]

    with pytest.raises(TooManyStreamsError):
        await listening.open("nightly")
    await listening.open("nightly", project="bank")
    listening.hub.leave(streams[0])

    await listening.open("nightly")


async def test_a_slow_reader_is_cut_off_and_the_others_go_on(listening: Listening) -> None:
    slow, fast = await listening.open("nightly"), await listening.open("nightly")
    for _ in range(MOST_WAITING // 2 + 1):
        await listening.acquire()
        await listening.release()
        assert len(await listening.heard(fast)) == 2

    assert slow.ending is Ending.CUT_OFF
    assert brief(await listening.heard(slow)) == [("reset", None)]
    listening.hub.leave(slow)
    assert listening.hub.ended == {Ending.CUT_OFF: 1}


async def test_a_cut_off_reader_can_go_on_behind_its_reset(listening: Listening) -> None:
    slow = await listening.open("nightly")
    for _ in range(MOST_WAITING // 2 + 1):
        await listening.acquire()
        await listening.release()
    (reset,) = await listening.heard(slow)
    listening.hub.leave(slow)

    again = await listening.open("nightly", after=reset.id)

    assert brief(await listening.heard(again)) == [("released", "nightly")]


async def test_a_hub_that_closes_ends_its_streams_and_opens_no_others(
    listening: Listening,
) -> None:
    stream = await listening.open("nightly")
    await listening.acquire()

    listening.hub.close()

    assert stream.ending is Ending.STOPPING
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]
    with pytest.raises(StoreUnavailableError):
        await listening.open("nightly")
    listening.hub.leave(stream)
    listening.hub.leave(stream)
    assert listening.hub.ended == {Ending.STOPPING: 1}
    await listening.acquire("hourly")  # locks go on


# Other servers.


async def test_what_another_server_told_is_told_here_once(listening: Listening) -> None:
    stream = await listening.open("nightly")
    begun = Event(Kind.ACQUIRED, NIGHTLY, 7, 1, free_at=31 * SECOND)
    ended = Event(Kind.RELEASED, NIGHTLY, 7, 2)

    for event in (begun, begun, ended, begun, ended):
        listening.hub.hear(event, event.at)
    listening.hub.hear(Event(Kind.ACQUIRED, SlotKey(PROJECT, "hourly"), 7, 1), 1)
    listening.hub.hear(Event(Kind.ACQUIRED, SlotKey("bank", "nightly"), 7, 1), 1)

    assert brief(await listening.heard(stream)) == [
        ("acquired", "nightly"),
        ("released", "nightly"),
    ]


async def test_a_lease_of_unknown_length_is_looked_up(listening: Listening) -> None:
    stream = await listening.open("nightly")
    told, listening.queue.on_written = listening.queue.on_written, None  # as if it were elsewhere
    granted = await listening.acquire(ttl=5)
    listening.queue.on_written = told

    listening.hub.hear(Event(Kind.ACQUIRED, NIGHTLY, granted.fencing_token, 1), 1)
    await listening.advance(5.9)
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]
    await listening.advance(0.1)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]


# Clocks moved by other threads.


async def test_a_clock_moved_by_another_thread_waits_for_what_is_due(listening: Listening) -> None:
    listening.clock.call_when_moved(listening.hub.clock_moved)
    await asyncio.to_thread(listening.clock.advance, 1)  # before there is anything to do
    stream = await listening.open("nightly")
    await listening.acquire(ttl=5)
    await listening.heard(stream)

    await asyncio.to_thread(listening.clock.advance, 6)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]
    assert module._PATIENCE > 0
