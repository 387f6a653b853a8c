"""An httpx transport that calls an ASGI app and hands its answer on as it comes.

httpx's own collects an answer until it is whole, which an event stream never is.

    request --> the app, in a task of its own
    answer  <-- head, then blocks: a few may wait for their reader, as in a connection's buffer
    close   --> the app hears that its client is gone, and is waited for
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Scope

_BUFFERED = 8


class InProcessTransport(httpx.AsyncBaseTransport):
    """For one event loop (asyncio).  What the app raises is raised to the caller."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _Exchange(await request.aread())
        exchange.begin(self._app, _scope(request))
        try:
            status, headers = await exchange.head
        except BaseException:
            exchange.hang_up()
            raise
        return httpx.Response(status, headers=headers, stream=exchange)


class _Exchange(httpx.AsyncByteStream):
    """One request and its answer, which is also the stream of the answer's body."""

    def __init__(self, body: bytes) -> None:
        self.head: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()
        self._body: bytes | None = body  # until the app has taken it
        self._blocks: asyncio.Queue[bytes | None] = asyncio.Queue(_BUFFERED)  # None: the end
        self._hung_up = asyncio.Event()
        self._task: asyncio.Task[None]

    def begin(self, app: ASGIApp, scope: Scope) -> None:
        self._task = asyncio.get_running_loop().create_task(self._call(app, scope))
        self._task.add_done_callback(self._ended)

    def hang_up(self) -> None:
        self._hung_up.set()
        while not self._blocks.empty():
            self._blocks.get_nowait()  # the app may wait for room there

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (block := await self._blocks.get()) is not None:
            yield block
        await self._task

    async def aclose(self) -> None:
        self.hang_up()
        await asyncio.wait([self._task])

    async def _call(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        except asyncio.CancelledError:
            self._hung_up.set()  # the loop ends: nobody waits for the rest
            raise
        finally:
            await self._hand_on(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if not self.head.done():
            self.head.set_exception(fault or RuntimeError("the app did not answer"))

    async def _receive(self) -> Message:
        if self._body is None:
            await self._hung_up.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self.head.done():  # its caller was cancelled
                self.head.set_result((message["status"], message.get("headers", [])))
        elif message.get("body"):
            await self._hand_on(message["body"])

    async def _hand_on(self, block: bytes | None) -> None:
        if not self._hung_up.is_set():
            await self._blocks.put(block)


def _scope(request: httpx.Request) -> Scope:
    target, _, query = request.url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": target,
        "query_string": query,
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
        "root_path": "",
    }
