"""The transport that calls an app: answers as they come, both sides hearing of the other's end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from volcano_server.in_process import InProcessTransport

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = InProcessTransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://volcano.test") as http:
        yield http


def block(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)


async def test_an_app_sees_the_request_as_a_server_would_show_it() -> None:
    seen: list[tuple[Scope, Message]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, await receive()))
        await send({**START, "status": 201})
        await send(block(b"done", more=False))

    async with client(app) as http:
        answer = await http.post("/a%2Fb?c=%20d", content=b"body", headers={"X-B": "c"})

    assert (answer.status_code, answer.headers["x-a"], answer.content) == (201, "b", b"done")
    ((scope, message),) = seen
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == (
        "POST",
        b"/a%2Fb",
        b"c=%20d",
    )
    assert (b"x-b", b"c") in scope["headers"]
    assert message == {"type": "http.request", "body": b"body", "more_body": False}


async def test_an_answer_comes_while_the_app_goes_on() -> None:
    go_on = asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send(START)
        await send(block(b"one"))
        await go_on.wait()
        await send(block(b"two", more=False))

    async with client(app) as http, http.stream("GET", "/") as answer:
        blocks = answer.aiter_raw()
        assert await anext(blocks) == b"one"
        go_on.set()
        assert [each async for each in blocks] == [b"two"]


async def test_an_app_waits_for_a_reader_that_does_not_read() -> None:
    sent = 0

    async def app(_: Scope, __: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for number in range(100):
            await send(block(b"%d " % number))
            sent += 1
        await send(block(b"", more=False))

    async with client(app) as http, http.stream("GET", "/") as answer:
        for _ in range(50):
            await asyncio.sleep(0)
        assert sent == 8
        assert (await answer.aread()).split() == [b"%d" % number for number in range(100)]


async def test_an_app_hears_of_a_reader_that_leaves_and_is_waited_for() -> None:
    ended = False

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        nonlocal ended
        await receive()
        await send(START)
        for _number in range(20):  # more than there is room for: it waits when its reader goes
            await send(block(b"x"))
        assert (await receive())["type"] == "http.disconnect"
        ended = True

    async with client(app) as http:
        async with http.stream("GET", "/"):
            pass
        assert ended


async def test_what_an_app_raises_is_raised() -> None:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send(START)
        raise ZeroDivisionError

    async with client(app) as http:
        with pytest.raises(ZeroDivisionError):
            await http.get("/early")
        with pytest.raises(ZeroDivisionError):
            await http.get("/late")


async def test_an_app_that_does_not_answer_is_an_error() -> None:
    async def app(_: Scope, __: Receive, ___: Send) -> None:
        pass

    async with client(app) as http:
        with pytest.raises(RuntimeError, match="did not answer"):
            await http.get("/")


async def test_a_caller_that_is_cancelled_is_gone_and_the_app_may_finish() -> None:
    events: list[str] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        events.append(str((await receive())["type"]))
        await send(START)
        await send(block(b"nobody reads this", more=False))
        events.append("finished")

    async with client(app) as http:
        calling = asyncio.ensure_future(http.get("/"))
        for _ in range(20):
            await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: events == ["http.disconnect", "finished"])


def test_a_loop_that_ends_leaves_no_app_behind() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send(START)
        while True:
            await send(block(b"x"))

    async def scene() -> None:
        transport = InProcessTransport(app)
        request = httpx.Request("GET", "http://volcano.test/")
        await transport.handle_async_request(request)
        for _ in range(50):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scene(), 5))
