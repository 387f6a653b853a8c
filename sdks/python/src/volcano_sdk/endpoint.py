"""Where requests go, in httpcore's terms, and how to say that no answer came from there.

No I/O of its own: a transport brings the connections.
"""

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from volcano_sdk.errors import TransportError
from volcano_sdk.operations import Failure, Request, Try
from volcano_sdk.settings import Settings
from volcano_sdk.version import __version__

IDLE_LANES = 16
KEEP_ALIVE = 60.0
"""Seconds; shorter than what servers grant, so that we close a connection before they do."""
LARGEST_ANSWER = 1 << 20
TIME_IS_OVER = "the time for an answer was over"


class Endpoint:
    """One API URL, and the proxy before it, if there is one."""

    def __init__(self, settings: Settings) -> None:
        self._url = httpx.URL(settings.api_url)
        self._path = self._url.raw_path.rstrip(b"/")
        self._proxy = None if settings.proxy is None else httpx.Proxy(settings.proxy)
        self._ssl_context: ssl.SSLContext | None = None
        self._headers = [
            (b"Host", self._url.netloc),
            (b"User-Agent", f"volcano-sdk-python/{__version__}".encode()),
        ]

    def url(self, request: Request) -> httpcore.URL:
        return httpcore.URL(
            scheme=self._url.raw_scheme,
            host=self._url.raw_host,
            port=self._url.port,
            target=self._path + request.path.encode(),
        )

    def headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        named = {"Accept": "application/json", **request.headers}
        headers = self._headers + [(name.encode(), value.encode()) for name, value in named.items()]
        if request.method != "GET":
            headers.append((b"Content-Length", b"%d" % len(request.body)))
        return headers

    def pool_options(self) -> dict[str, Any]:
        """Arguments of an httpcore pool of one connection.  The TLS context is made once."""
        is_secure = self._url.scheme == "https" or self._proxy is not None
        if is_secure and self._ssl_context is None:
            self._ssl_context = httpx.create_ssl_context()
        proxy = None
        if self._proxy is not None:
            proxy = httpcore.Proxy(
                httpcore.URL(str(self._proxy.url)),
                auth=self._proxy.raw_auth,
                ssl_context=self._ssl_context if self._proxy.url.scheme == "https" else None,
            )
        return {
            "ssl_context": self._ssl_context,
            "proxy": proxy,
            "max_connections": 1,
            "keepalive_expiry": KEEP_ALIVE,
        }


def lower(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """An answer's headers, as `Answer` wants them."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def failure(
    settings: Settings, attempt: Try, sent_at: float, what: str, *, reached: bool
) -> Failure:
    """No answer, in a sentence that says who did not give it."""
    through = ""
    if settings.proxy_name is not None:
        through = (
            f" through the proxy {settings.proxy_name}, which the environment names"
            " (trust_env=False ignores it)"
        )
    verb = "got no answer from" if reached else "could not reach"
    error = TransportError(
        f"{attempt.request.operation} {verb} {settings.api_url}{through}: {what}",
        request_id=attempt.request.request_id,
    )
    return Failure(sent_at, error, reached)
