"""GET /lock-events in process: checks, headers, what is counted and what is logged."""

import asyncio
import io
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from listening import Heard, brief, parse

from volcano_server import event_response, hub
from volcano_server.access import Access, AccessFile, Caller
from volcano_server.app import create_app
from volcano_server.clock import ManualClock
from volcano_server.lease import Acquire, Answer, Read, SlotKey
from volcano_server.logs import Log
from volcano_server.problems import Problem
from volcano_server.settings import Settings
from volcano_server.stores.memory import MemoryStore
from volcano_server.subscription import Ending
from volcano_server.testing import VolcanoServer

pytestmark = pytest.mark.anyio

KEYS = {
    "sk-good": Caller("shop", "key_1", quota=0),
    "sk-counted": Caller("counted", "key_2", quota=2),
    "sk-weak": Caller("shop", "key_3", permissions=frozenset({"other"}), quota=0),
    "ak-anon": Caller("shop", "key_4", kind="anon", quota=0),
}
REQUEST_ID = "6d0c5a35-93f1-4a53-8f59-0b8e0d5d7b1C"
LOCK_TOKEN = str(uuid.uuid4())


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Stream:
    """An open answer; `next` is what comes next, comments left out."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._bytes = answer.aiter_raw()

    async def bytes(self) -> bytes:
        return await asyncio.wait_for(anext(self._bytes), 5)

    async def next(self) -> list[Heard]:
        while not (heard := parse(await self.bytes())):
            pass
        return heard

    async def ends(self) -> list[Heard]:
        """The rest, up to the end."""
        return parse(b"".join([block async for block in self._bytes]))


class World:
    """An app in process, what it logs, and a caller with good headers."""

    def __init__(self, access: Access | None = None, store: MemoryStore | None = None) -> None:
        self.clock = ManualClock()
        self.store = store or MemoryStore(self.clock)
        self.lines = io.StringIO()
        settings = Settings(log_requests=True, test_controls=True, access_refresh=0.01)
        access = access or Access(KEYS)
        self.app = create_app(
            self.store, access, self.clock, settings, log=Log(self.lines, quiet=True)
        )
        transport = VolcanoServer("", self.clock, self.app).transport()
        self.http = httpx.AsyncClient(transport=transport, base_url="http://volcano.test")

    def headers(self, changed: Mapping[str, str | None]) -> dict[str, str]:
        headers = {
            "Authorization": "Bearer sk-good",
            "X-Volcano-Lock-Token": LOCK_TOKEN,
            "X-Volcano-Request-Id": REQUEST_ID,
            **changed,
        }
        return {name: value for name, value in headers.items() if value is not None}

    async def call(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str | None] | None = None,
        **options: Any,
    ) -> httpx.Response:
        return await self.http.request(method, path, headers=self.headers(headers or {}), **options)

    async def acquire(self, key: str = "nightly", ttl: int = 30, **headers: str | None) -> int:
        answer = await self.call("POST", f"/locks/{key}/lease", headers, json={"ttl_seconds": ttl})
        assert answer.status_code == 201
        return int(answer.json()["fencing_token"])

    async def release(self, key: str = "nightly") -> None:
        assert (await self.call("DELETE", f"/locks/{key}/lease")).status_code == 204

    @asynccontextmanager
    async def stream(self, query: str, **headers: str | None) -> AsyncIterator[Stream]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.stream(
            "GET", f"/lock-events?{query}", headers=self.headers(named)
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            yield Stream(answer)

    async def metric(self, name: str) -> float:
        """A number without labels, or with those in the name."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.getvalue().splitlines()]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with world.app.router.lifespan_context(world.app), world.http:
        yield world


async def test_a_stream_says_at_once_that_it_listens_and_then_what_happens(world: World) -> None:
    async with world.stream("key=nightly&prefix=ticket%3A") as stream:
        assert await stream.bytes() == b":\n\n"
        fencing_token = await world.acquire()
        (acquired,) = await stream.next()
        await world.acquire("ticket:1")
        await world.release()

        heard = [*await stream.next(), *await stream.next()]

    assert acquired == Heard(
        "acquired", acquired.id, "nightly", fencing_token, "2027-01-15T08:00:00.000Z", 1
    )
    assert brief(heard) == [("acquired", "ticket:1"), ("released", "nightly")]


async def test_the_head_of_a_stream(world: World) -> None:
    async with world.stream("key=nightly", Authorization="Bearer sk-counted") as stream:
        headers = stream.answer.headers

    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-volcano-request-id"] == REQUEST_ID
    assert "content-length" not in headers
    assert headers["x-ratelimit-limit"] == "2"
    assert headers["x-ratelimit-remaining"] == "1"
    assert headers["x-ratelimit-reset"] == "1800000060"


async def test_opening_a_stream_is_one_operation(world: World) -> None:
    key = {"Authorization": "Bearer sk-counted"}
    async with world.stream("key=nightly", **key):
        last = await world.call("GET", "/locks/nightly", key)
        refused = await world.call("GET", "/lock-events?key=a", key)

    assert last.headers["x-ratelimit-remaining"] == "0"
    assert (refused.status_code, refused.json()["code"]) == (429, "lock_rate_limited")
    assert refused.headers["retry-after"] == "60"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_another_method_is_405(world: World, method: str) -> None:
    answer = await world.call(method, "/lock-events?key=a", {"Authorization": None})

    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET"


async def test_a_head_is_405_and_opens_nothing(world: World) -> None:
    assert (await world.call("HEAD", "/lock-events?key=a")).status_code == 405


@pytest.mark.parametrize("path", ["/lock-events/", "/lock-events/nightly", "/lock-event"])
async def test_another_path_is_404(world: World, path: str) -> None:
    assert (await world.call("GET", f"{path}?key=a")).status_code == 404


@pytest.mark.parametrize(
    ("authorization", "status", "code"),
    [
        (None, 401, "authentication_required"),
        ("Bearer sk-unknown", 401, "invalid_credentials"),
        ("Bearer ak-anon", 403, "permission_denied"),
        ("Bearer sk-weak", 403, "permission_denied"),
    ],
)
async def test_the_credential_comes_before_the_filters(
    world: World, authorization: str | None, status: int, code: str
) -> None:
    answer = await world.call("GET", "/lock-events?wrong", {"Authorization": authorization})

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert "x-ratelimit-limit" not in answer.headers


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", "key, prefix: 0"),
        ("key=a&foo=b", '"foo"'),
        ("key=a%2Fb", 'key: got "a/b"'),
        ("prefix=%20", 'prefix: got " "'),
        ("&".join(["key=a"] * 65), "key, prefix: 65"),
    ],
)
async def test_wrong_filters_are_400_and_named(world: World, query: str, names: str) -> None:
    answer = await world.call(
        "GET", f"/lock-events?{query}", {"Authorization": "Bearer sk-counted"}
    )

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert answer.json()["error"].startswith(names)
    assert answer.headers["x-ratelimit-remaining"] == "1"
    assert answer.headers["x-volcano-request-id"] == REQUEST_ID


async def test_a_request_id_is_needed_and_a_lock_token_is_not_looked_at(world: World) -> None:
    refused = await world.call("GET", "/lock-events?key=a", {"X-Volcano-Request-Id": None})
    assert refused.status_code == 400
    assert "X-Volcano-Request-Id" in refused.json()["error"]

    async with world.stream("key=a", X_Volcano_Lock_Token=None):
        pass


async def test_a_body_over_the_limit_is_413(world: World) -> None:
    answer = await world.call("GET", "/lock-events?key=a", content=b"x" * 5_000)

    assert answer.status_code == 413


async def test_too_many_streams_are_429_and_one_that_closes_makes_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MOST_STREAMS", 2)
    async with world.stream("key=a"), world.stream("key=b") as second:
        refused = await world.call("GET", "/lock-events?key=c")
        await second.answer.aclose()
        async with world.stream("key=c"):
            pass

    assert (refused.status_code, refused.json()["code"]) == (429, "lock_rate_limited")
    assert refused.headers["retry-after"] == "5"
    assert "event streams" in refused.json()["error"]


async def test_the_last_event_id_goes_on_or_is_a_reset(world: World) -> None:
    async with world.stream("key=nightly") as stream:
        await world.acquire()
        (acquired,) = await stream.next()
    await world.release()

    async with world.stream("key=nightly", Last_Event_ID=acquired.id) as stream:
        assert brief(await stream.next()) == [("released", "nightly")]
    async with world.stream("key=nightly", Last_Event_ID="of another server") as stream:
        assert brief(await stream.next()) == [("reset", None)]


async def test_a_moved_test_clock_answers_after_the_lapses(world: World) -> None:
    async with world.stream("key=nightly") as stream:
        await world.acquire(ttl=5)
        await stream.next()

        await world.call("POST", "/_test/clock", json={"advance_seconds": 6})

        assert world.store._clock.now() == 1_800_000_006_000_000
        assert brief(await stream.next()) == [("lapsed", "nightly")]
        assert await world.metric('volcano_lock_events_total{event="lapsed"}') == 1


async def test_a_reset_of_the_tests_frees_and_tells(world: World) -> None:
    async with world.stream("key=nightly") as stream:
        await world.acquire()
        await stream.next()

        await world.call("POST", "/_test/reset")

        assert brief(await stream.next()) == [("force_released", "nightly")]


async def test_a_comment_comes_every_15_s_of_the_servers_clock(world: World) -> None:
    async with world.stream("key=nightly") as stream:
        assert await stream.bytes() == b":\n\n"
        for _ in range(3):
            world.clock.advance(15)
            assert await stream.bytes() == b":\n\n"


async def test_a_reader_that_leaves_is_forgotten(world: World) -> None:
    async with world.stream("key=nightly"):
        assert await world.metric("volcano_lock_event_streams") == 1

    assert await world.metric("volcano_lock_event_streams") == 0
    reason = 'volcano_lock_event_streams_ended_total{reason="reader_gone"}'
    assert await world.metric(reason) == 1


async def test_a_server_that_stops_ends_its_streams(world: World) -> None:
    async with world.stream("key=nightly") as stream:
        await stream.bytes()

        world.app.state.on_stop()

        assert await stream.ends() == []
    refused = await world.call("GET", "/lock-events?key=a")
    assert refused.status_code == 503


@pytest.mark.parametrize("is_cut_off", [False, True], ids=["slow", "cut off already"])
async def test_a_stop_does_not_wait_for_a_reader_that_does_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch, is_cut_off: bool
) -> None:
    monkeypatch.setitem(event_response._PATIENCE, Ending.STOPPING, 0.01)
    monkeypatch.setattr("volcano_server.subscription.MOST_WAITING", 10)
    async with world.stream("key=nightly"):
        for _ in range(20 if is_cut_off else 7):
            await world.acquire()
            await world.release()
        cut_off = 'volcano_lock_event_streams_ended_total{reason="cut_off"} 1.0'
        assert (cut_off in (await world.http.get("/metrics")).text) is is_cut_off

        world.app.state.on_stop()

        while await world.metric("volcano_lock_event_streams"):  # noqa: ASYNC110 - nothing says so
            await asyncio.sleep(0.001)


async def test_a_stream_is_counted_and_logged_at_its_start_and_its_end(world: World) -> None:
    async with world.stream("key=nightly&prefix=n") as stream:
        await world.acquire()
        await world.release()
        heard = await stream.next()
        while len(heard) < 2:
            heard += await stream.next()
    await world.call("GET", "/lock-events?key=a%2Fb")

    lines = [line for line in world.logged() if line["operation"] == "events"]
    opened, ended, refused = lines
    assert opened["outcome"] == "opened"
    assert opened["filters"] == "key=nightly&prefix=n"
    assert (opened["project"], opened["request_id"]) == ("shop", REQUEST_ID)
    assert (ended["outcome"], ended["events"]) == ("reader_gone", 2)
    assert (ended["project"], ended["request_id"]) == ("shop", REQUEST_ID)
    assert (refused["outcome"], refused["status"]) == ("invalid_request", 400)
    assert "sk-good" not in world.lines.getvalue()
    assert LOCK_TOKEN not in world.lines.getvalue()
    opened_count = 'volcano_lock_requests_total{operation="events",outcome="opened"}'
    assert await world.metric(opened_count) == 1
    assert await world.metric('volcano_lock_events_total{event="acquired"}') == 1
    assert await world.metric("volcano_lock_events_sent_total") == 2


class Gate(MemoryStore):
    """Answers reads when `opened`."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked = asyncio.Event()
        self.opened = asyncio.Event()

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        self.asked.set()
        await self.opened.wait()
        return await super().read(commands)


async def test_a_revoked_key_ends_its_streams_and_no_other(tmp_path: Path) -> None:
    file = AccessFile(tmp_path / "locks.access.db")
    file.create_project("shop")
    key, id_ = file.create_key("shop", kind="service")
    other, _ = file.create_key("shop", kind="service")
    world = World(Access(tables=file))
    async with world.app.router.lifespan_context(world.app), world.http:
        async with (
            world.stream("key=nightly", Authorization=f"Bearer {key}") as stream,
            world.stream("key=nightly", Authorization=f"Bearer {other}") as stays,
        ):
            file.revoke_key(id_)
            assert await stream.ends() == []
            await world.acquire(Authorization=f"Bearer {other}")
            assert brief(await stays.next()) == [("acquired", "nightly")]

        refused = await world.call(
            "GET", "/lock-events?key=nightly", {"Authorization": f"Bearer {key}"}
        )
        assert refused.status_code == 401
        assert await world.metric('volcano_lock_event_streams_ended_total{reason="refused"}') == 1


async def test_a_key_that_is_revoked_while_its_stream_opens_gets_none(tmp_path: Path) -> None:
    file = AccessFile(tmp_path / "locks.access.db")
    file.create_project("shop")
    key, id_ = file.create_key("shop", kind="service")
    access = Access(tables=file)
    gate = Gate(ManualClock())
    world = World(access, gate)
    async with world.app.router.lifespan_context(world.app), world.http:
        opening = asyncio.create_task(
            world.call("GET", "/lock-events?key=nightly", {"Authorization": f"Bearer {key}"})
        )
        await gate.asked.wait()
        file.revoke_key(id_)
        bearer = f"Bearer {key}".encode()
        while not isinstance(access.authenticate(bearer), Problem):  # noqa: ASYNC110 - nothing says
            await asyncio.sleep(0.01)
        gate.opened.set()

        assert (await opening).status_code == 401
        assert await world.metric("volcano_lock_event_streams") == 0


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "/lock-events?key=nightly&token=sk-good"),
        ("GET", "/lock-events?sk-good"),
        ("GET", "/locks/nightly?token=sk-good"),
        ("POST", "/locks/nightly/lease?token=sk-good"),
    ],
)
async def test_a_service_key_in_a_query_is_in_no_log(world: World, method: str, url: str) -> None:
    """Where a browser's EventSource would put it."""
    answer = await world.call(method, url, {"Authorization": None})

    (line,) = world.logged()
    assert (answer.status_code, line["status"]) == (401, 401)
    assert "sk-good" not in world.lines.getvalue()


async def test_no_event_shows_a_lock_token(world: World) -> None:
    async with world.stream("prefix=n") as stream:
        await world.acquire()
        shown = b""
        while b"acquired" not in shown:
            shown += await stream.bytes()

    assert LOCK_TOKEN.encode() not in shown


async def test_a_lease_in_the_store_before_the_server_lapses_for_its_readers() -> None:
    world = World()
    await world.store.apply([Acquire(SlotKey("shop", "nightly"), "alice", 5)], lambda: True)

    async with world.app.router.lifespan_context(world.app), world.http:
        async with world.stream("prefix=night") as stream:
            world.clock.advance(6)
            assert brief(await stream.next()) == [("lapsed", "nightly")]
