"""The server that a scenario plays against: its URL, who may call it, and what it can do.

Callers and gates reach it the same way, over real HTTP, byte for byte: no client library is
between, since paths such as `%zz` must arrive as they are.
"""

import http.client
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from conformance.stream import EventStream, Source

Headers = list[tuple[str, str]]

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Headers
    body: bytes

    def seen(self) -> dict[str, Any]:
        """For matching: the body's members, and beside them `status`, `headers` and `body`."""
        try:
            body = json.loads(self.body) if self.body else None
        except ValueError:
            body = self.body.decode("latin-1")
        members = body if isinstance(body, dict) else {}
        headers = {name.lower(): value for name, value in self.headers}
        return {**members, "status": self.status, "headers": headers, "body": body}


@dataclass(frozen=True, slots=True)
class Target:
    """`advance` moves the server's own clock; None where only real time does."""

    base_url: str
    credentials: Mapping[str, str | None]  # {"valid": "sk-…", "anon": "ak-…", "none": None}
    capabilities: frozenset[str] = frozenset()
    advance: Callable[[float], None] | None = None
    catch_up: Callable[[], None] | None = None
    """Returns when such a server has written all events that are due."""
    now: Callable[[], str] | None = None
    """What such a clock shows, as an instant on the wire."""
    key_prefix: str = ""
    """Put before every key of a scenario, so that runs against one lasting server do not meet."""
    timeout: float = field(default=10.0)

    def send(self, method: str, path: str, headers: Headers, body: bytes) -> Answer:
        """One exchange on a connection of its own.  `path` goes out as it is."""
        connection = self._connection()
        try:
            self._ask(connection, method, path, headers, body)
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    def listen(self, path: str, headers: Headers) -> tuple[Answer, EventStream | None]:
        """The same for a request that an event stream may answer: then its head, and the stream."""
        connection = self._connection()
        try:
            self._ask(connection, "GET", path, headers, b"")
            connected: socket.socket = connection.sock
            source = Source(connected)
            response = http.client.HTTPResponse(source, method="GET")  # type: ignore[arg-type]
            response.begin()
            kind = response.headers.get_content_type()
            if response.status != 200 or kind != "text/event-stream":
                return Answer(response.status, response.getheaders(), response.read()), None
            connected.settimeout(None)
            connection.sock = None  # it is the stream's now
            return Answer(200, response.getheaders(), b""), EventStream(response, source)
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host = urlsplit(self.base_url)
        make = http.client.HTTPSConnection if host.scheme == "https" else http.client.HTTPConnection
        return make(host.hostname or "", host.port, timeout=self.timeout)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
    ) -> None:
        prefix = urlsplit(self.base_url).path.rstrip("/")
        connection.putrequest(method, prefix + path, skip_accept_encoding=True)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.putheader("Connection", "close")
        connection.endheaders(body)
