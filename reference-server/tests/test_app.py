"""What the app does besides answering: its lifespan, its chores, faults, the operator's routes."""

import asyncio
import io
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from volcano_server.access import Access, AccessFile, Caller
from volcano_server.app import create_app
from volcano_server.clock import ManualClock
from volcano_server.lease import Answer, Read, Write
from volcano_server.logs import Log
from volcano_server.problems import Problem
from volcano_server.settings import Settings
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.store import Store, StoreUnavailableError
from volcano_server.testing import server_in_process

KEY = "sk-for-this-test"
REQUEST_ID = "6d0c5a35-93f1-4a53-8f59-0b8e0d5d7b1c"


def headers(service_key: str = KEY) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {service_key}",
        "X-Volcano-Lock-Token": str(uuid.uuid4()),
        "X-Volcano-Request-Id": REQUEST_ID,
    }


class TroubledStore(MemoryStore):
    """A memory store that fails with `error` while there is one."""

    error: Exception | None = None

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        if self.error is not None:
            raise self.error
        return await super().apply(commands, may_commit)

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        if self.error is not None:
            raise self.error
        return await super().read(commands)


class World:
    """An app in process, what it logs, and a client."""

    def __init__(
        self, store: Store | None = None, access: Access | None = None, **settings: Any
    ) -> None:
        self.clock = ManualClock()
        self.store = store or MemoryStore(self.clock)
        self.lines = io.StringIO()
        self.app = create_app(
            self.store,
            access or Access({KEY: Caller("shop", "key_1", quota=0)}),
            self.clock,
            Settings(**settings),
            log=Log(self.lines),
        )

    def play(self, scene: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            async with self.app.router.lifespan_context(self.app):
                transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://volcano.test"
                ) as http:
                    await scene(http)

        asyncio.run(run())

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.getvalue().splitlines()]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the app does by itself, at most as long as a test may take."""
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)


async def acquire(http: httpx.AsyncClient, key: str = "nightly") -> httpx.Response:
    return await http.post(f"/locks/{key}/lease", json={"ttl_seconds": 30}, headers=headers())


# ---------------------------------------------------------------- trouble


def test_a_store_that_cannot_answer_is_503_and_recovers() -> None:
    store = TroubledStore(ManualClock())
    world = World(store)

    async def scene(http: httpx.AsyncClient) -> None:
        store.error = StoreUnavailableError("disk full at /secret/path")
        refused = [
            await acquire(http),
            await http.get("/locks/nightly", headers=headers()),
            await http.get("/readyz"),
        ]
        store.error = None
        granted = await acquire(http)

        for answer in refused:
            assert answer.status_code == 503
            assert answer.json()["code"] == "lock_service_unavailable"
            assert answer.headers["retry-after"] == "1"
            assert "disk full" not in answer.text
        assert granted.status_code == 201
        assert (await http.get("/readyz")).status_code == 200

    world.play(scene)

    reasons = [line["reason"] for line in world.logged()]
    assert reasons == ["disk full at /secret/path"] * 3


def test_a_store_that_only_reads_is_not_ready() -> None:
    class Standby(MemoryStore):
        async def apply(
            self, commands: Sequence[Write], may_commit: Callable[[], bool]
        ) -> list[Answer]:
            raise StoreUnavailableError("read-only")

    world = World(Standby(ManualClock()))

    async def scene(http: httpx.AsyncClient) -> None:
        assert (await http.get("/locks/nightly", headers=headers())).status_code == 200
        assert (await http.get("/readyz")).status_code == 503

    world.play(scene)

    (line,) = world.logged()
    assert (line["event"], line["reason"]) == ("not_ready", "read-only")


def renewals(*keys: str) -> dict[str, Any]:
    return {"leases": [{"key": key, "token": REQUEST_ID, "ttl_seconds": 60} for key in keys]}


def test_many_renewals_that_the_store_cannot_take_are_503_as_a_whole() -> None:
    """Nothing was acknowledged; each of them was counted, and the answer says so."""
    access = Access({KEY: Caller("shop", "key_1", quota=10)})
    store = TroubledStore(ManualClock())
    world = World(store, access)

    async def scene(http: httpx.AsyncClient) -> None:
        mine = {**headers(), "X-Volcano-Lock-Token": REQUEST_ID}
        await http.post("/locks/a/lease", json={"ttl_seconds": 30}, headers=mine)
        before = (await http.get("/locks/a", headers=mine)).json()
        store.error = StoreUnavailableError("disk full")
        answer = await http.patch("/lock-leases", json=renewals("a", "b", "a"), headers=mine)
        store.error = None
        after = (await http.get("/locks/a", headers=mine)).json()

        assert answer.status_code == 503
        assert answer.json()["code"] == "lock_service_unavailable"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-ratelimit-remaining"] == "5"
        assert after == before

    world.play(scene)

    assert [line["reason"] for line in world.logged()] == ["disk full"]


def test_many_renewals_of_another_project_meet_no_lease_of_this_one() -> None:
    access = Access({KEY: Caller("shop", "key_1"), "sk-bank": Caller("bank", "key_2")})
    world = World(access=access)

    async def scene(http: httpx.AsyncClient) -> None:
        mine = {**headers(), "X-Volcano-Lock-Token": REQUEST_ID}
        await http.post("/locks/a/lease", json={"ttl_seconds": 30}, headers=mine)
        answer = await http.patch("/lock-leases", json=renewals("a"), headers=headers("sk-bank"))
        assert [each["code"] for each in answer.json()["leases"]] == ["lock_ownership_lost"]

    world.play(scene)


def test_the_log_and_the_metrics_say_what_became_of_many_renewals() -> None:
    world = World(log_requests=True)

    async def scene(http: httpx.AsyncClient) -> None:
        mine = {**headers(), "X-Volcano-Lock-Token": REQUEST_ID}
        await http.post("/locks/a/lease", json={"ttl_seconds": 30}, headers=mine)
        token = {**headers(), "X-Volcano-Request-Id": str(uuid.uuid4())}
        await http.patch("/lock-leases", json=renewals("a", "b", "a"), headers=token)
        text = (await http.get("/metrics")).text.splitlines()
        for line in (
            'volcano_lock_requests_total{operation="renew_many",outcome="answered"} 1.0',
            'volcano_lock_renew_many_leases_total{outcome="granted"} 2.0',
            'volcano_lock_renew_many_leases_total{outcome="lock_ownership_lost"} 1.0',
        ):
            assert line in text

    world.play(scene)

    line = world.logged()[-1]
    assert (line["operation"], line["key"], line["outcome"]) == ("renew_many", None, "answered")
    assert line["leases"] == {"granted": 2, "lock_ownership_lost": 1}
    assert REQUEST_ID not in json.dumps(line)


def test_every_counted_answer_says_what_is_left_of_the_quota() -> None:
    store = TroubledStore(ManualClock())
    world = World(store, Access({KEY: Caller("shop", "key_1", quota=9)}), body_patience=0.01)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async def scene(http: httpx.AsyncClient) -> None:
        long = await http.post("/locks/a/lease", content=b"x" * 5000, headers=headers())
        slow = await http.post("/locks/a/lease", content=endless(), headers=headers())
        store.error = StoreUnavailableError("disk full")
        answers = [long, slow, await acquire(http), await acquire(http, "-")]

        assert [answer.status_code for answer in answers] == [413, 503, 503, 400]
        left = [answer.headers["x-ratelimit-remaining"] for answer in answers]
        assert left == ["8", "7", "6", "5"]

    world.play(scene)


def test_the_keys_of_a_project_share_its_quota_and_projects_do_not() -> None:
    callers = {
        "sk-first": Caller("shop", "key_1", quota=2),
        "sk-second": Caller("shop", "key_2", quota=2),
        "sk-other": Caller("bank", "key_3", quota=2),
    }
    world = World(access=Access(callers))

    async def scene(http: httpx.AsyncClient) -> None:
        asked = ["sk-first", "sk-second", "sk-first", "sk-other", "sk-other"]
        answers = [await http.get("/locks/a", headers=headers(key)) for key in asked]

        assert [answer.status_code for answer in answers] == [200, 200, 429, 200, 200]

    world.play(scene)


def test_a_fault_of_the_server_is_a_json_500_and_a_traceback_in_the_log() -> None:
    store = TroubledStore(ManualClock())
    store.error = ZeroDivisionError("a bug")
    world = World(store)

    async def scene(http: httpx.AsyncClient) -> None:
        for answer in (await acquire(http), await http.get("/readyz", headers=headers())):
            assert answer.status_code == 500
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["code"] == "internal_error"
            assert answer.headers["x-volcano-request-id"] == REQUEST_ID
            assert "a bug" not in answer.text
        store.error = None
        assert (await acquire(http)).status_code == 201

    world.play(scene)

    events = [line for line in world.logged() if line["event"] == "internal_error"]
    assert len(events) == 2
    assert all("ZeroDivisionError: a bug" in line["exception"] for line in events)


def test_a_store_that_cannot_be_opened_is_raised_and_kept() -> None:
    class ClosedStore(MemoryStore):
        async def open(self) -> None:
            raise StoreUnavailableError("no way in")

    world = World(ClosedStore(ManualClock()))

    async def scene(_: httpx.AsyncClient) -> None:
        pytest.fail("the app started")

    with pytest.raises(StoreUnavailableError):
        world.play(scene)
    assert str(world.app.state.startup_error) == "no way in"


def test_the_store_is_closed_after_everything_accepted_was_answered() -> None:
    events: list[str] = []
    accepted = asyncio.Event()

    class SlowStore(MemoryStore):
        async def apply(
            self, commands: Sequence[Write], may_commit: Callable[[], bool]
        ) -> list[Answer]:
            events.append("accepted")
            accepted.set()
            await asyncio.sleep(0.05)
            answers = await super().apply(commands, may_commit)
            events.append("applied")
            return answers

        async def close(self) -> None:
            events.append("closed")

    world = World(SlowStore(ManualClock()))

    async def scene(http: httpx.AsyncClient) -> None:
        task = asyncio.create_task(acquire(http))
        await accepted.wait()
        tasks.append(task)

    tasks: list[asyncio.Task[httpx.Response]] = []
    world.play(scene)

    assert events == ["accepted", "applied", "closed"]


# ---------------------------------------------------------------- logs


def test_nothing_is_logged_about_ordinary_requests_unless_asked() -> None:
    world = World()

    async def scene(http: httpx.AsyncClient) -> None:
        await acquire(http)
        await acquire(http)

    world.play(scene)

    assert world.logged() == []


def test_a_line_a_request_says_who_what_and_how_long_and_no_secret() -> None:
    world = World(log_requests=True)
    token = "0b7c1f2e-5a0f-4c55-9d1d-3c1f6f0f2a11"

    async def scene(http: httpx.AsyncClient) -> None:
        mine = {**headers(), "X-Volcano-Lock-Token": token}
        await http.post("/locks/nightly/lease", json={"ttl_seconds": 30}, headers=mine)
        await acquire(http)
        await http.get("/locks/nightly", headers=headers("sk-somebody-else"))
        await http.get("/locks/a%0Ab", headers={**headers(), "X-Volcano-Request-Id": token[:-1]})

    world.play(scene)

    granted, held, unknown, wrong = world.logged()
    assert granted.pop("duration_ms") >= 0
    assert granted.pop("timestamp").endswith("Z")
    assert granted == {
        "event": "request",
        "level": "info",
        "request_id": REQUEST_ID,
        "operation": "acquire",
        "project": "shop",
        "key": "nightly",
        "outcome": "granted",
        "status": 201,
    }
    assert held["outcome"] == "lock_held"
    assert (unknown["outcome"], unknown["project"]) == ("invalid_credentials", None)
    assert (wrong["outcome"], wrong["request_id"]) == ("invalid_request", None)
    for secret in (KEY, token, token[:-1], "sk-somebody-else"):
        assert secret not in world.lines.getvalue()


# ---------------------------------------------------------------- credentials


def test_a_key_made_and_revoked_while_the_server_runs_counts_within_two_seconds(
    tmp_path: Path,
) -> None:
    file = AccessFile(tmp_path / "locks.access.db")
    world = World(access=Access(tables=file))

    async def scene(http: httpx.AsyncClient) -> None:
        async def becomes(key: str, status: int) -> float:
            started = time.monotonic()
            while (await http.get("/locks/a", headers=headers(key))).status_code != status:
                assert time.monotonic() - started < 2
                await asyncio.sleep(0.02)
            return time.monotonic() - started

        file.create_project("shop")
        key, id_ = file.create_key("shop", kind="service")
        await becomes(key, 200)
        file.set_quota("shop", 0)
        await until(lambda: len(world.logged()) == 2)
        file.revoke_key(id_)
        await becomes(key, 401)
        ids.append(id_)
        keys.append(key)

    ids: list[str] = []
    keys: list[str] = []
    world.play(scene)

    said = [(line["added"], line["changed"], line["removed"]) for line in world.logged()]
    assert said == [(ids, [], []), ([], ids, []), ([], [], ids)]
    assert {line["event"] for line in world.logged()} == {"credentials_changed"}
    assert keys[0] not in world.lines.getvalue()


def test_a_file_of_credentials_that_breaks_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    file = AccessFile(tmp_path / "locks.access.db")
    file.create_project("shop")
    key, _ = file.create_key("shop", kind="service")
    access = Access(tables=file)
    world = World(access=access, access_refresh=0.01)

    async def scene(http: httpx.AsyncClient) -> None:
        whole = file.path.read_bytes()
        file.path.write_bytes(b"broken" * 1000)
        await until(lambda: bool(world.logged()))
        assert (await http.get("/locks/a", headers=headers(key))).status_code == 200
        file.path.write_bytes(whole)
        other, _ = file.create_key("shop", kind="service")
        await until(
            lambda: not isinstance(access.authenticate(f"Bearer {other}".encode()), Problem)
        )
        assert (await http.get("/locks/a", headers=headers(other))).status_code == 200

    world.play(scene)

    assert world.logged()[0]["event"] == "credentials_unreadable"


def test_the_server_sweeps_its_store() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    world = World(store)

    async def scene(http: httpx.AsyncClient) -> None:
        await acquire(http)
        clock.advance(2 * 86_400)
        await until(lambda: not store._slots)

    world.play(scene)


def test_a_fault_in_a_chore_is_reported_and_does_not_end_it(tmp_path: Path) -> None:
    file = AccessFile(tmp_path / "locks.access.db")
    file.create_project("shop")
    access = Access(tables=file)
    world = World(access=access, access_refresh=0.01)

    async def scene(_: httpx.AsyncClient) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(AccessFile, "callers", lambda _: 1 / 0)
            key, _id = file.create_key("shop", kind="service")
            await until(lambda: bool(world.logged()))
        await until(lambda: not isinstance(access.authenticate(f"Bearer {key}".encode()), Problem))

    world.play(scene)

    assert [line["event"] for line in world.logged()] == ["internal_error", "credentials_changed"]


# ---------------------------------------------------------------- for operators


def test_health_and_readiness_need_no_credential_and_answer_head() -> None:
    world = World()

    async def scene(http: httpx.AsyncClient) -> None:
        health, ready = await http.get("/healthz"), await http.get("/readyz")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        assert (await http.head("/healthz")).status_code == 200

    world.play(scene)


def test_metrics_count_requests_by_operation_and_outcome() -> None:
    world = World()

    async def scene(http: httpx.AsyncClient) -> None:
        await acquire(http)
        await acquire(http)
        await http.get("/locks/nightly", headers=headers("sk-nobody"))
        text = (await http.get("/metrics")).text
        for line in (
            'volcano_lock_requests_total{operation="acquire",outcome="granted"} 1.0',
            'volcano_lock_requests_total{operation="acquire",outcome="lock_held"} 1.0',
            'volcano_lock_requests_total{operation="read",outcome="invalid_credentials"} 1.0',
            'volcano_lock_request_seconds_count{operation="acquire"} 2.0',
        ):
            assert line in text.splitlines()

    world.play(scene)


def test_two_servers_in_one_process_count_apart() -> None:
    first, second = World(), World()

    async def scene(http: httpx.AsyncClient) -> None:
        await acquire(http)

    async def look(http: httpx.AsyncClient) -> None:
        assert "granted" not in (await http.get("/metrics")).text

    first.play(scene)
    second.play(look)


# ---------------------------------------------------------------- for tests


def test_production_has_no_test_controls() -> None:
    world = World()

    async def scene(http: httpx.AsyncClient) -> None:
        for method, path in (("GET", "/_test/clock"), ("POST", "/_test/reset")):
            answer = await http.request(method, path, headers=headers())
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")

    world.play(scene)


def test_the_test_clock_moves_wall_and_elapsed() -> None:
    world = World(test_controls=True)

    async def scene(http: httpx.AsyncClient) -> None:
        await acquire(http)
        moved = await http.post("/_test/clock", json={"advance_seconds": 31.5}, headers=headers())
        now = await http.get("/_test/clock", headers=headers())
        assert moved.json() == now.json() == {"now": "2027-01-15T08:00:31.500Z"}
        state = await http.get("/locks/nightly", headers=headers())
        assert state.json() == {"held": False}

    world.play(scene)


def test_the_test_reset_frees_every_key_and_forgets_the_quota() -> None:
    access = Access({KEY: Caller("shop", "key_1", quota=3)})
    world = World(access=access, test_controls=True)

    async def scene(http: httpx.AsyncClient) -> None:
        before = [await acquire(http, key) for key in ("a", "b", "c", "d")]
        reset = await http.post("/_test/reset", headers=headers())
        after = [await acquire(http, key) for key in ("a", "b")]

        assert [each.status_code for each in before] == [201, 201, 201, 429]
        assert (reset.status_code, reset.content) == (204, b"")
        assert [each.status_code for each in after] == [201, 201]
        assert after[0].json()["fencing_token"] > before[0].json()["fencing_token"]

    world.play(scene)


def test_the_test_reset_frees_what_many_renewals_named() -> None:
    world = World(test_controls=True)

    async def scene(http: httpx.AsyncClient) -> None:
        mine = {**headers(), "X-Volcano-Lock-Token": REQUEST_ID}
        await http.post("/locks/a/lease", json={"ttl_seconds": 30}, headers=mine)
        answer = await http.patch("/lock-leases", json=renewals("a", "b"), headers=mine)
        assert answer.status_code == 200
        assert (await http.post("/_test/reset", headers=mine)).status_code == 204
        assert (await http.get("/locks/a", headers=mine)).json() == {"held": False}

    world.play(scene)


def test_the_test_controls_need_a_service_key() -> None:
    """Any web page can send a request to a loopback port."""
    access = Access({KEY: Caller("shop", "key_1"), "ak-web": Caller("shop", "key_2", kind="anon")})
    world = World(access=access, test_controls=True)

    async def scene(http: httpx.AsyncClient) -> None:
        for key, status in (("ak-web", 403), ("sk-nobody", 401)):
            for method, path in (
                ("GET", "/_test/clock"),
                ("POST", "/_test/clock"),
                ("POST", "/_test/reset"),
            ):
                answer = await http.request(method, path, headers=headers(key))
                assert answer.status_code == status

    world.play(scene)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"advance_seconds":-1}', b'{"advance_seconds":"1"}', b'{"advance_seconds":NaN}'],
)
def test_the_test_clock_refuses_what_is_no_number_of_seconds(body: bytes) -> None:
    world = World(test_controls=True)

    async def scene(http: httpx.AsyncClient) -> None:
        answer = await http.post("/_test/clock", content=body, headers=headers())
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
        assert world.clock.wall() == ManualClock().wall()

    world.play(scene)


def test_a_server_in_process_needs_no_port() -> None:
    async def scene() -> None:
        async with (
            server_in_process(quota=1) as server,
            httpx.AsyncClient(transport=server.transport(), base_url=server.url) as http,
        ):
            mine = headers(server.service_key)
            body = {"ttl_seconds": 5}
            granted = await http.post("/locks/a/lease", json=body, headers=mine)
            assert granted.status_code == 201
            assert (await http.get("/locks/a", headers=mine)).status_code == 429
            server.clock.advance(60)
            assert (await http.get("/locks/a", headers=mine)).json() == {"held": False}

    asyncio.run(scene())
