"""One connection of the async flavour to the server, as one exchange after the other uses it."""

import ssl
from collections.abc import Iterable
from typing import Any

import anyio
import httpcore

from volcano_sdk.endpoint import LARGEST_ANSWER, Endpoint, lower
from volcano_sdk.operations import Answer, Try


class Lane(httpcore.AsyncNetworkBackend):
    """One connection, kept open between exchanges; a stale one is replaced before anything is sent.

    It is the pool's network too, since a pool that is cancelled in the middle of a TLS handshake
    forgets the socket.  `reached`: bytes of the present exchange may have gone out.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._pool = httpcore.AsyncConnectionPool(network_backend=self, **endpoint.pool_options())
        self._network = httpcore.AnyIOBackend()
        self._stream: httpcore.AsyncNetworkStream | None = None
        self.reached = False

    async def open(self, attempt: Try) -> httpcore.Response:
        """Until the headers of the answer have come.  Raises httpcore's errors."""
        self.reached = False
        request = attempt.request
        return await self._pool.handle_async_request(
            httpcore.Request(
                request.method,
                self._endpoint.url(request),
                headers=self._endpoint.headers(request),
                content=request.body,
            )
        )

    async def answer(self, response: httpcore.Response, sent_at: float) -> Answer:
        """The whole of it.  Raises httpcore's errors."""
        body = b""
        with anyio.CancelScope() as reading:  # leaving the loop early would strand its generators
            async for part in response.aiter_stream():
                body += part
                if len(body) > LARGEST_ANSWER:
                    reading.cancel()
        if reading.cancel_called:
            raise httpcore.RemoteProtocolError("the answer is over 1 MiB")
        await response.aclose()
        return Answer(sent_at, response.status, lower(response.headers), body)

    async def close(self) -> None:
        """Close the socket, whatever state the pool is in and whoever is being cancelled."""
        with anyio.CancelScope(shield=True):
            await self._pool.aclose()
            if self._stream is not None:
                await self._stream.aclose()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the seam's own
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """What the pool asks for; never while it has another connection."""
        self._stream = await self._network.connect_tcp(
            host, port, timeout, local_address, socket_options
        )
        return Connection(self, self._stream)


class Connection(httpcore.AsyncNetworkStream):
    """The lane's connection, which tells the lane when bytes of a request go out."""

    def __init__(self, lane: Lane, stream: httpcore.AsyncNetworkStream) -> None:
        self._lane = lane
        self._stream = stream
        self.read = stream.read  # type: ignore[method-assign]
        self.aclose = stream.aclose  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._lane.reached = True
        await self._stream.write(buffer, timeout)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        secure = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return Connection(self._lane, secure)
