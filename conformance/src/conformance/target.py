"""The server that a scenario plays against: its URL, who may call it, and what it can do.

Callers and gates reach it the same way, over real HTTP, byte for byte: no client library is
between, since paths such as `%zz` must arrive as they are.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

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
    key_suffix: str = ""
    """Put behind every key of a scenario, so that runs against one lasting server do not meet."""
    timeout: float = field(default=10.0)

    def send(self, method: str, path: str, headers: Headers, body: bytes) -> Answer:
        """One exchange on a connection of its own.  `path` goes out as it is."""
        host = urlsplit(self.base_url)
        prefix = host.path.rstrip("/")
        make = http.client.HTTPSConnection if host.scheme == "https" else http.client.HTTPConnection
        connection = make(host.hostname or "", host.port, timeout=self.timeout)
        try:
            connection.putrequest(method, prefix + path, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.putheader("Connection", "close")
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, response.getheaders(), response.read())
        finally:
            connection.close()
