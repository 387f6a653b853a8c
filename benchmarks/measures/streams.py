"""The least that a client of the lock server has to do, on asyncio: one request at a time on a
connection that stays open, and event streams.  What the measures of waiting are made with.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from measures.rig import Process

_ANSWER = 30.0
"""Seconds after which an answer will not come any more."""


class Connection:
    """Requests, one after the other, on one connection that is opened when it is needed."""

    def __init__(self, server: Process) -> None:
        self._server = server
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.requests = 0

    async def lease(self, method: str, key: str, token: str) -> tuple[int, Any]:
        """The status and the answer of POST, PATCH or DELETE."""
        body = b"" if method == "DELETE" else b'{"ttl_seconds":60}'
        return await self.request(
            method, f"/locks/{key}/lease", body, **{"X-Volcano-Lock-Token": token}
        )

    async def request(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> tuple[int, Any]:
        self.requests += 1
        if self._link is None:
            self._link = await _connect(self._server)
        reader, writer = self._link
        writer.write(head(self._server, method, path, len(body), headers) + body)
        async with asyncio.timeout(_ANSWER):
            status, fields = await _answer(reader)
            if "transfer-encoding" in fields:
                content = b"".join([part async for part in _chunks(reader)])
            else:
                content = await reader.readexactly(int(fields.get("content-length", 0)))
        return status, json.loads(content) if content else None

    def close(self) -> None:
        if self._link is not None:
            self._link[1].close()


@dataclass(frozen=True)
class Event:
    kind: str
    fencing_token: int
    watchers: int


@asynccontextmanager
async def event_stream(server: Process, key: str) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a key.  The server has taken the filter in when this begins."""
    async with streamed(server, "GET", f"/lock-events?key={key}") as blocks:
        first = await anext(blocks)
        if not first.startswith(b":"):
            raise RuntimeError(f"a stream began with {first!r}")
        yield _events(blocks)


@asynccontextmanager
async def streamed(
    server: Process, method: str, path: str, body: bytes = b""
) -> AsyncIterator[AsyncIterator[bytes]]:
    """An answer without an end: what each chunk of it holds."""
    async with asyncio.timeout(_ANSWER):
        reader, writer = await _connect(server)
        writer.write(head(server, method, path, len(body)) + body)
        status, _ = await _answer(reader)
    try:
        if status != 200:
            raise RuntimeError(f"a stream was answered {status}")
        yield _chunks(reader)
    finally:
        writer.close()


class EventReader(asyncio.Protocol):
    """A stream of events for a crowd: cheaper than the above, for it parses and waits for nothing.

    `on_lost` hears of an end that we did not ask for.
    """

    def __init__(
        self,
        server: Process,
        key: str,
        on_event: Callable[[Event], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = head(server, "GET", f"/lock-events?key={key}")
        self._on_event = on_event
        self._on_lost: Callable[[], None] | None = on_lost
        self._buffer = b""
        self._kind = ""
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def of(
        cls,
        server: Process,
        key: str,
        on_event: Callable[[Event], None],
        on_lost: Callable[[], None],
    ) -> Self:
        """Returns when the server has taken the filter in."""
        address = urlsplit(server.url)
        _, reader = await asyncio.get_running_loop().create_connection(
            lambda: cls(server, key, on_event, on_lost), str(address.hostname), address.port or 80
        )
        await reader.is_open
        return reader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # An event is a chunk of its own or a part of one, so the lines of the chunked encoding
        # stand between events and never in one.
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"event: "):
                self._kind = line[7:].decode()
            elif line.startswith(b"data: "):
                self._on_event(_event(self._kind, line[6:]))
            elif line == b":" and not self.is_open.done():
                self.is_open.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_open.done():
            self.is_open.set_exception(error or RuntimeError(f"a stream ended: {self._buffer!r}"))
        elif self._on_lost is not None:
            self._on_lost()

    def close(self) -> None:
        self._on_lost = None
        if self._transport is not None:
            self._transport.abort()


def _event(kind: str, data: str | bytes) -> Event:
    """A reset has no data."""
    fields = json.loads(data)
    return Event(kind, fields.get("fencing_token", 0), fields.get("watchers", 1))


async def _connect(server: Process) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(server.url)
    return await asyncio.open_connection(address.hostname, address.port)


def head(
    server: Process,
    method: str,
    path: str,
    length: int = 0,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    fields = {
        "Host": urlsplit(server.url).netloc,
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "X-Volcano-Request-Id": str(uuid.uuid4()),
        **(headers or {}),
    }
    if server.service_key:  # etcd knows no such thing
        fields["Authorization"] = f"Bearer {server.service_key}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status, and the headers by their names in lower case."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in head[1:] if line)
    return int(head[0].split()[1]), {name.lower(): value for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """A chunk holds whole events, one or more, and comments."""
    async for chunk in chunks:
        for block in chunk.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if "event" in fields:
                yield _event(fields["event"], fields["data"])
