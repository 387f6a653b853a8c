"""A request that came whole is answered without ASGI in between, and its client cannot tell.

Each request is sent twice, to servers that are alike: in one packet, and to an app that cannot do
without ASGI.  Answers, log lines and counts have to be the same.
"""

import asyncio
import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from volcano_server import wire
from volcano_server.access import Access, Caller
from volcano_server.app import create_app
from volcano_server.clock import ManualClock
from volcano_server.lease import Answer, Free, Write
from volcano_server.logs import Log
from volcano_server.service import Outcome, _Waiting
from volcano_server.serving import JsonProtocol, JsonServer
from volcano_server.settings import Settings
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.store import StoreUnavailableError

pytestmark = pytest.mark.anyio

KEY, ANON, MEAGRE, COUNTED = "sk-key", "ak-anon", "sk-meagre", "sk-counted"
ACCESS = {
    KEY: Caller("shop", "key_1", quota=0),
    ANON: Caller("shop", "key_2", kind="anon", quota=0),
    MEAGRE: Caller("shop", "key_3", permissions=frozenset(), quota=0),
    COUNTED: Caller("counted", "key_4", quota=2),
}
REQUEST_ID = "6D0c5a35-93f1-4a53-8f59-0b8e0d5d7b1c"
TOKEN = "0c5a356d-93f1-4a53-8f59-0b8e0d5d7b1c"
OTHER_TOKEN = "93f10000-93f1-4a53-8f59-0b8e0d5d7b1c"
TTL = b'{"ttl_seconds": 30}'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(
    method: str,
    path: str,
    content: bytes = b"",
    *,
    key: str | None = KEY,
    token: str | None = TOKEN,
    request_id: str | None = REQUEST_ID,
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: a"]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    lines += [] if token is None else [f"X-Volcano-Lock-Token: {token}"]
    lines += [] if request_id is None else [f"X-Volcano-Request-Id: {request_id}"]
    lines += [f"Content-Length: {len(content)}"] if content else []
    return "\r\n".join([*lines, "", ""]).encode() + content


class Wire(asyncio.Transport):
    """A connection in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.written += b"(closed)"

    def resume_reading(self) -> None:
        """Nobody reads ahead here."""


class FullDiskStore(MemoryStore):
    """Has no room for the key `full`, and a fault with the key `faulty`."""

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        if commands[0].slot_key.key == "full":
            raise StoreUnavailableError("no room")
        if commands[0].slot_key.key == "faulty":
            raise RuntimeError("a fault of ours")
        return await super().apply(commands, may_commit)


class Server:
    """A server with one connection.  `by_asgi`: it has no other way."""

    def __init__(self, *, by_asgi: bool) -> None:
        clock = ManualClock()
        self._lines = io.StringIO()
        self._app = create_app(
            FullDiskStore(clock),
            Access(ACCESS),
            clock,
            Settings(log_requests=True),
            log=Log(self._lines),
        )
        if not by_asgi:
            self.whole_requests = self._app.whole_requests  # type: ignore[attr-defined]
        self.asked_by_asgi: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked_by_asgi.append(scope["path"])
        await self._app(scope, receive, send)

    def running(self) -> AbstractAsyncContextManager[object]:
        return self._app.router.lifespan_context(self._app)

    async def answers(self, requests: Sequence[bytes]) -> list[bytes]:
        async with self.running():
            return await self.answers_to_one(requests)

    async def answers_to_one(self, requests: Sequence[bytes]) -> list[bytes]:
        """What one connection gets while the server runs."""
        config = JsonServer(self).config
        config.load()
        protocol = JsonProtocol(config, ServerState(), {}, asyncio.get_running_loop())
        connection = Wire()
        protocol.connection_made(connection)
        found = []
        self.asked_by_asgi.clear()
        for each in requests:
            protocol.data_received(each)
            for _ in range(30):
                await asyncio.sleep(0)
            found.append(connection.written)
            connection.written = b""
        protocol.connection_lost(None)
        return found

    def logged(self) -> list[dict[str, object]]:
        """Without what time makes differ, and where in the code a fault was."""
        lines = [json.loads(line) for line in self._lines.getvalue().splitlines()]
        return [
            {name: line[name] for name in line if name not in ("timestamp", "duration_ms")}
            | ({"exception": line["exception"].splitlines()[-1]} if "exception" in line else {})
            for line in lines
        ]


async def twice(*requests: bytes) -> tuple[Server, list[bytes]]:
    """The server that was asked directly, and its answers: the same as the other's."""
    by_asgi, directly = Server(by_asgi=True), Server(by_asgi=False)
    metrics = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"

    *expected, expected_counts = await by_asgi.answers([*requests, metrics])
    *actual, counts = await directly.answers([*requests, metrics])

    assert expected == actual
    assert all(actual)
    assert by_asgi.logged() == directly.logged()
    assert _counts(expected_counts) == _counts(counts)
    directly.asked_by_asgi.remove("/metrics")
    return directly, actual


def _counts(metrics: bytes) -> list[bytes]:
    """Of the requests, without what time makes differ."""
    return re.findall(
        rb"^volcano_lock_requests_total.*|^volcano_\S+_count.*", metrics, re.MULTILINE
    )


@pytest.mark.parametrize("key", ["ticket:1", "ticket%3A1", "%74icket:1", "a", "lease", "a.b_c-9"])
async def test_all_that_an_sdk_sends_for_a_lock_is_answered_directly(key: str) -> None:
    """They percent-encode a key, so most keys do not come as they are."""
    server, answers = await twice(
        request("POST", f"/locks/{key}/lease", TTL),
        request("POST", f"/locks/{key}/lease", TTL, token=OTHER_TOKEN),
        request("GET", f"/locks/{key}"),
        request("PATCH", f"/locks/{key}/lease", TTL),
        request("PATCH", f"/locks/{key}/lease", TTL, token=OTHER_TOKEN),
        request("DELETE", f"/locks/{key}/lease"),
        request("DELETE", f"/locks/{key}"),
        request("GET", f"/locks/{key}"),
    )

    statuses = [int(answer.split()[1]) for answer in answers]
    assert statuses == [201, 409, 200, 200, 409, 204, 204, 200]
    assert [REQUEST_ID.encode() in answer for answer in answers] == [True] * 8
    assert server.asked_by_asgi == []


async def test_the_ways_of_naming_a_key_name_one_key() -> None:
    _, answers = await twice(
        request("POST", "/locks/ticket:1/lease", TTL),
        request("POST", "/locks/ticket%3A1/lease", TTL, token=OTHER_TOKEN),
        request("POST", "/locks/%74icket%3a1/lease", TTL, token=OTHER_TOKEN),
    )

    assert [int(answer.split()[1]) for answer in answers] == [201, 409, 409]


WRONG = {
    "no credential": request("POST", "/locks/a/lease", TTL, key=None),
    "unknown credential": request("POST", "/locks/a/lease", TTL, key="sk-unknown"),
    "anon key": request("POST", "/locks/a/lease", TTL, key=ANON),
    "no permission": request("POST", "/locks/a/lease", TTL, key=MEAGRE),
    "no token": request("POST", "/locks/a/lease", TTL, token=None),
    "no token to release by": request("DELETE", "/locks/a/lease", token=None),
    "wrong token": request("PATCH", "/locks/a/lease", TTL, token="1"),
    "no request id": request("GET", "/locks/a", request_id=None),
    "wrong request id": request("GET", "/locks/a", request_id="1"),
    "wrong key": request("GET", "/locks/a%20b"),
    "key with a slash": request("GET", "/locks/a%2Fb"),
    "key encoded twice": request("GET", "/locks/a%253Ab"),
    "key half encoded": request("GET", "/locks/a%3"),
    "key of no letter": request("GET", "/locks/~"),
    "long key": request("GET", f"/locks/{'a' * 129}"),
    "no body": request("POST", "/locks/a/lease"),
    "wrong body": request("POST", "/locks/a/lease", b"[]"),
    "wrong ttl": request("POST", "/locks/a/lease", b'{"ttl_seconds": 4}'),
    "large body": request("POST", "/locks/a/lease", b" " * 4097),
    "large body that is not wanted": request("GET", "/locks/a", b" " * 4097),
    "large body and wrong key": request("POST", "/locks/-/lease", b" " * 4097),
    "unknown ttl member": request("POST", "/locks/a/lease", b'{"ttl": 30}'),
    "full disk": request("POST", "/locks/full/lease", TTL),
    "fault": request("POST", "/locks/faulty/lease", TTL),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_refused_is_refused_directly_too(wrong: str) -> None:
    server, answers = await twice(WRONG[wrong], request("GET", "/locks/a"))

    assert answers[0].split()[1] >= b"400" or wrong == "large body that is not wanted"
    assert server.asked_by_asgi == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("HEAD", "/locks/a"),
        ("PUT", "/locks/a"),
        ("POST", "/locks/a"),
        ("GET", "/locks/a/lease"),
        ("GET", "/locks/a/b"),
        ("GET", "/locks/a?b"),
        ("GET", "/locks/a+b"),
        ("GET", "/locks/"),
        ("POST", "/locks//lease"),
        ("GET", "/locks/lease/lease/lease"),
    ],
)
async def test_all_else_goes_by_asgi(method: str, path: str) -> None:
    server, _ = await twice(request(method, path), request("GET", "/locks/a"))

    assert server.asked_by_asgi == [path.partition("?")[0]]


async def test_the_quota_is_counted_and_told_the_same() -> None:
    refused_anyway = request("GET", "/locks/-", key=COUNTED)

    _, answers = await twice(
        *[request("GET", "/locks/a%3Ab", key=COUNTED), refused_anyway] * 2,
    )

    assert [int(answer.split()[1]) for answer in answers] == [200, 400, 429, 429]
    assert [
        b"x-ratelimit-remaining: %d\r\n" % left in answers[at]
        for at, left in enumerate((1, 0, 0, 0))
    ] == [True] * 4


async def test_a_fault_before_the_request_is_read_is_answered_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(access: Access, bearer: bytes | None) -> Caller:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Access, "authenticate", faulty)

    server, (answer,) = await twice(request("GET", "/locks/a"))

    assert b'"code": "internal_error"' in answer
    assert {"internal_error", "request"} <= {line["event"] for line in server.logged()}


async def test_a_fault_in_an_answer_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one batch are made one after the other."""
    server = Server(by_asgi=False)
    timestamp = wire.timestamp

    def faulty(instant: int) -> str:
        monkeypatch.setattr(wire, "timestamp", timestamp)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(wire, "timestamp", faulty)
    async with server.running():
        answers = await asyncio.gather(
            *(server.answers_to_one([request("POST", f"/locks/{key}/lease", TTL)]) for key in "abc")
        )

    assert [int(answer.split()[1]) for (answer,) in answers] == [500, 201, 201]
    assert [line["event"] for line in server.logged() if line["level"] == "error"] == [
        "internal_error",
        "request",
    ]


@pytest.mark.parametrize("is_refused", [True, False])
def test_who_was_told_is_not_waiting(is_refused: bool) -> None:
    """The queue asks before it tells: the timer and the store may both have an answer."""
    told: list[Outcome] = []
    waiting = _Waiting(told.append, ACCESS[KEY], None)
    assert not waiting.done()

    if is_refused:
        waiting.set_exception(StoreUnavailableError("overdue"))
    else:
        waiting.set_result([Free()])

    assert waiting.done()
    assert [outcome.caller for outcome in told] == [ACCESS[KEY]]
