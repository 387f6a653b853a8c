"""How the news of all servers over one database are read: in order, once, and nothing unnoticed."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from listening import PROJECT, Listening, brief

from volcano_server import feed as module
from volcano_server import news
from volcano_server.events import Event, Kind
from volcano_server.feed import Feed
from volcano_server.hub import Hub
from volcano_server.lease import (
    SECOND,
    Acquire,
    Answer,
    ForceRelease,
    Granted,
    Read,
    Released,
    Renew,
    SlotKey,
    Write,
)
from volcano_server.news import Place, events_in, text_of
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.store import News, StoreUnavailableError

pytestmark = pytest.mark.anyio

NIGHTLY = SlotKey(PROJECT, "nightly")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Shared:
    """News as a database has them: numbers are given out before the commit."""

    def __init__(self, store: MemoryStore) -> None:
        self.rows: dict[int, str] = {}  # what is visible
        self.begun = 0
        self.reads = 0
        self.is_lost = False
        self.troubled = False
        self._now = store._clock.now
        self._number = 0

    def take_number(self) -> int:
        self._number += 1
        return self._number

    def commit(self, number: int, *events: Event) -> None:
        commands: list[Write] = []
        answers: list[Answer] = []
        for kind, slot_key, token, at, free_at in (
            (each.kind, each.slot_key, each.fencing_token, each.at, each.free_at) for each in events
        ):
            if kind is Kind.ACQUIRED:
                left = free_at - SECOND - at
                commands.append(Acquire(slot_key, "alice", 30))
                answers.append(Granted(free_at - SECOND, token, left, begins=True))
            else:
                commands.append(ForceRelease(slot_key))
                answers.append(Released(token, at))
        self.rows[number] = text_of(commands, answers, {}) or "[]"

    async def begin_news(self) -> tuple[int, Sequence[int], int]:
        self._check()
        self.begun += 1
        self.is_lost = False
        number = self.take_number()
        self.rows[number] = "[]"
        return number, [each for each in self.rows if each < number], self._now()

    async def read_news(self, top: int, missing: Sequence[int]) -> News | None:
        self._check()
        self.reads += 1
        if self.is_lost:
            return None
        rows = [row for row in sorted(self.rows.items()) if row[0] > top or row[0] in missing]
        return News(rows[:2], self._now(), is_all=len(rows) <= 2)

    def _check(self) -> None:
        if self.troubled:
            raise StoreUnavailableError("no connection")


class SharedListening(Listening):
    """A hub that hears only through the news, as a server does that shares its store."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared(self.store)
        self.hub = Hub(self.queue, self.store, self.clock, news=self.shared)
        feed = self.hub.feed
        assert feed is not None
        feed._time = lambda: self.clock.elapsed() / SECOND
        self.feed: Feed = feed

    async def acquire_and_tell(self, *, ttl: int) -> Granted:
        """The lease, and the news of it."""
        granted = await self.acquire(ttl=ttl)
        token, until = granted.fencing_token, granted.expires_at
        begun = until - granted.expires_in
        event = Event(Kind.ACQUIRED, NIGHTLY, token, begun, until + SECOND)
        self.shared.commit(self.shared.take_number(), event)
        return granted


@pytest.fixture
async def listening() -> AsyncIterator[SharedListening]:
    listening = SharedListening()
    yield listening
    await listening.close()


def acquired(token: int, key: str = "nightly") -> Event:
    return Event(Kind.ACQUIRED, SlotKey(PROJECT, key), token, 10, 10 + 31 * SECOND)


def released(token: int, key: str = "nightly") -> Event:
    return Event(Kind.FORCE_RELEASED, SlotKey(PROJECT, key), token, 20)


def test_a_text_says_which_leases_began_and_ended_and_no_token_of_theirs() -> None:
    grant = Granted(30 * SECOND, 7, 30 * SECOND, begins=True)
    renewal = Granted(31 * SECOND, 7, 30 * SECOND)
    commands: list[Write] = [
        Acquire(NIGHTLY, "secret", 30), Renew(NIGHTLY, "secret", 30), ForceRelease(NIGHTLY)
    ]  # fmt: skip

    text = text_of(commands, [grant, renewal, Released(7, 5)], {})

    assert text is not None
    assert "secret" not in text
    assert events_in(text) == [
        Event(Kind.ACQUIRED, NIGHTLY, 7, 0, 31 * SECOND),
        Event(Kind.FORCE_RELEASED, NIGHTLY, 7, 5),
    ]
    assert text_of(commands[1:2], [renewal], {NIGHTLY: 31 * SECOND}) is None


async def test_a_renewal_that_brings_the_end_forward_is_told_and_no_event(
    listening: SharedListening,
) -> None:
    stream = await listening.open("nightly")
    granted = await listening.acquire(ttl=30)
    renewed = await listening.renew(ttl=5)
    texts = (
        text_of([Acquire(NIGHTLY, "alice", 30)], [granted], {}),
        text_of([Renew(NIGHTLY, "alice", 5)], [renewed], {NIGHTLY: granted.expires_at}),
    )
    for text in texts:
        assert text is not None
        listening.shared.rows[listening.shared.take_number()] = text
    await listening.feed.step()
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]

    await listening.advance(6)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]


def test_numbers_that_are_not_there_are_asked_for_until_no_transaction_can_have_them() -> None:
    place = Place(10, [7, 9], now=0.0)

    assert place.missing == [8]
    assert place.saw([11, 14], now=5.0)
    assert place.missing == [8, 12, 13]
    assert place.saw([12], now=9.9)
    assert place.missing == [8, 13]
    assert place.saw([], now=10.0)
    assert place.missing == [13]
    assert place.saw([], now=15.0)
    assert (place.top, place.missing) == (14, [])


def test_a_jump_of_the_numbers_is_not_waited_for() -> None:
    assert not Place(10, [], now=0.0).saw([11 + news._MOST_MISSING], now=0.0)
    assert Place(10, [], now=0.0).saw([10 + news._MOST_MISSING], now=0.0)


async def test_what_any_server_did_is_told_once_and_in_order(listening: SharedListening) -> None:
    stream = await listening.open("nightly")
    for event in (acquired(7), released(7), acquired(8), released(8), acquired(9)):
        listening.shared.commit(listening.shared.take_number(), event)

    await listening.feed.step()
    await listening.feed.step()

    assert [(each.kind, each.fencing_token) for each in await listening.heard(stream)] == [
        ("acquired", 7), ("force_released", 7),
        ("acquired", 8), ("force_released", 8),
        ("acquired", 9),
    ]  # fmt: skip


async def test_a_lower_number_that_is_committed_later_is_not_skipped(
    listening: SharedListening,
) -> None:
    stream = await listening.open(prefixes=["n", "h"])
    early, late = listening.shared.take_number(), listening.shared.take_number()
    listening.shared.commit(late, acquired(8, "hourly"))
    await listening.feed.step()
    listening.shared.commit(early, acquired(7))
    await listening.feed.step()

    assert brief(await listening.heard(stream)) == [("acquired", "hourly"), ("acquired", "nightly")]


async def test_one_that_was_under_way_when_the_watch_began_is_heard(
    listening: SharedListening,
) -> None:
    listening.shared.commit(listening.shared.take_number())
    early = listening.shared.take_number()
    stream = await listening.open("nightly")
    listening.shared.commit(early, acquired(7))
    await listening.feed.step()

    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]


async def test_what_was_before_a_stream_is_not_for_it(listening: SharedListening) -> None:
    await listening.open("hourly")
    listening.shared.commit(listening.shared.take_number(), acquired(7), released(7))

    stream = await listening.open("nightly")
    await listening.feed.step()

    assert await listening.heard(stream) == []


async def test_where_news_may_be_lost_readers_are_told(listening: SharedListening) -> None:
    stream = await listening.open("nightly")
    listening.shared.is_lost = True
    listening.shared.commit(listening.shared.take_number(), acquired(7))

    await listening.feed.step()
    listening.shared.commit(listening.shared.take_number(), released(7), acquired(8))
    await listening.feed.step()

    assert brief(await listening.heard(stream)) == [
        ("reset", None),
        ("force_released", "nightly"),
        ("acquired", "nightly"),
    ]
    assert listening.shared.begun == 2


async def test_a_server_that_stood_still_while_news_were_forgotten_tells_its_readers(
    listening: SharedListening,
) -> None:
    """Frozen for a minute, with a connection that lived on; another server kept the watch up."""
    stream = await listening.open("nightly")
    listening.shared.commit(listening.shared.take_number(), acquired(7))
    await listening.feed.step()
    await listening.heard(stream)
    listening.shared.commit(listening.shared.take_number(), released(7))
    listening.shared.rows.clear()
    listening.feed._look_at = float("inf")

    listening.clock.advance(61)
    await listening.feed.step()

    assert brief(await listening.heard(stream)) == [("reset", None)]


async def test_a_stream_that_opens_while_the_feed_stops_is_not_disturbed(
    listening: SharedListening, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening.hub.leave(await listening.open("nightly"))
    await listening.advance(61)
    read, answers = listening.shared.read_news, asyncio.Event()

    async def read_slowly(top: int, missing: Sequence[int]) -> News | None:
        await answers.wait()
        return await read(top, missing)

    monkeypatch.setattr(listening.shared, "read_news", read_slowly)
    opening = asyncio.create_task(listening.open("nightly"))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(listening.feed.step())
    await asyncio.sleep(0)
    answers.set()
    stream = await opening
    await stopping

    listening.shared.commit(listening.shared.take_number(), acquired(7))
    await listening.feed.step()
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]


async def test_a_reader_that_comes_back_from_before_a_loss_gets_a_reset(
    listening: SharedListening,
) -> None:
    stream = await listening.open("nightly")
    listening.shared.commit(listening.shared.take_number(), acquired(7))
    await listening.feed.step()
    (event,) = await listening.heard(stream)
    listening.hub.leave(stream)
    listening.shared.is_lost = True
    await listening.feed.step()

    back = await listening.open("nightly", after=event.id)

    assert brief(await listening.heard(back)) == [("reset", None)]


async def test_without_readers_nothing_is_asked(listening: SharedListening) -> None:
    await listening.feed.step()
    assert (listening.shared.begun, listening.shared.reads) == (0, 0)
    listening.hub.leave(await listening.open("nightly"))
    for _ in range(2):
        await listening.advance(30.5)
    await listening.feed.step()
    reads = listening.shared.reads
    await listening.feed.step()
    assert listening.shared.reads == reads

    stream = await listening.open("nightly")
    await listening.feed.step()

    assert listening.shared.begun == 2
    assert await listening.heard(stream) == []  # no reset: it was nobody's loss


async def test_while_the_database_is_away_no_stream_is_opened(listening: SharedListening) -> None:
    listening.shared.troubled = True
    with pytest.raises(StoreUnavailableError):
        await listening.open("nightly")
    listening.shared.troubled = False
    await listening.open("nightly")


async def test_a_lapse_is_told_by_the_store_s_time_however_late_the_news_came(
    listening: SharedListening,
) -> None:
    stream = await listening.open("nightly")
    await listening.acquire_and_tell(ttl=5)
    listening.clock.advance(4)  # before the first look at what is followed
    await listening.feed.step()
    await listening.advance(1.9)
    assert brief(await listening.heard(stream)) == [("acquired", "nightly")]

    await listening.advance(0.1)

    assert brief(await listening.heard(stream)) == [("lapsed", "nightly")]


async def test_a_release_that_is_read_only_when_the_lease_is_due_is_no_lapse(
    listening: SharedListening,
) -> None:
    stream = await listening.open("nightly")
    granted = await listening.acquire_and_tell(ttl=5)
    await listening.feed.step()
    await listening.force_release()
    listening.shared.commit(listening.shared.take_number(), released(granted.fencing_token))

    await listening.advance(6)

    assert brief(await listening.heard(stream)) == [
        ("acquired", "nightly"),
        ("force_released", "nightly"),
    ]


async def test_a_look_finds_what_nobody_left_word_of(listening: SharedListening) -> None:
    """A server of an earlier version, or a batch that did not know of the watch yet."""
    stream = await listening.open("nightly", prefixes=["hour"])
    await listening.acquire("nightly")
    await listening.acquire("hourly")
    await listening.feed.step()
    assert await listening.heard(stream) == []

    listening.clock.advance(module._SETTLED)
    await listening.feed.step()
    assert brief(sorted(await listening.heard(stream), key=lambda heard: heard.key or "")) == [
        ("acquired", "hourly"),
        ("acquired", "nightly"),
    ]

    await listening.release("nightly")
    listening.clock.advance(module._LOOKS / 4)
    await listening.feed.step()
    assert await listening.heard(stream) == []
    await listening.release("hourly")
    await listening.hub.look_again()
    assert sorted(brief(await listening.heard(stream))) == [
        ("released", "hourly"),
        ("released", "nightly"),
    ]


async def test_a_look_asks_for_many_keys_together(
    listening: SharedListening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they would hold up the news of other servers for as long as it takes."""
    await listening.open(*(f"k{number}" for number in range(50)))
    await listening.feed.step()
    sizes: list[int] = []
    read = listening.store.read

    async def counted(commands: Sequence[Read]) -> list[Answer]:
        sizes.append(len(commands))
        return await read(commands)

    monkeypatch.setattr(listening.store, "read", counted)

    await listening.hub.look_again()

    assert sizes == [50]


async def test_what_was_told_before_a_look_is_told_as_it_was(listening: SharedListening) -> None:
    stream = await listening.open("nightly")
    earlier = acquired(7)
    granted = await listening.acquire()
    begun = granted.expires_at - granted.expires_in
    event = Event(Kind.ACQUIRED, NIGHTLY, granted.fencing_token, begun, granted.expires_at + SECOND)
    listening.shared.commit(listening.shared.take_number(), earlier, released(7), event)

    await listening.hub.look_again()

    assert brief(await listening.heard(stream)) == [
        ("acquired", "nightly"),
        ("force_released", "nightly"),
        ("acquired", "nightly"),
    ]
