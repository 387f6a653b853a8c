"""One event stream over HTTP: blocks go out as fast as its reader takes them, until it ends.

    reader gone   at once: whoever hangs up is heard of
    cut off       what waits may still be read, for a while
    stopping      the same, for half a second; where it is refused, too

A reader that does not even take that is disconnected: the answer breaks off, and serving.py does
not wait for what is still in the connection's buffer.
"""

from collections.abc import Iterable

import anyio
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from volcano_server.subscription import Ending, Subscription

_PATIENCE = {
    Ending.READER_GONE: 0.0,
    Ending.CUT_OFF: 10.0,
    Ending.REFUSED: 0.5,
    Ending.STOPPING: 0.5,
}
"""Seconds for what waits when a stream ends."""
_GRACEFUL = 5.0
"""Seconds after which sse-starlette, which looks for uvicorn's stop itself, breaks a stream off."""


async def stream(
    subscription: Subscription,
    headers: Iterable[tuple[bytes, bytes]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Returns when the stream is over, for whatever reason."""
    # Comments come from the hub, by the server's clock; the end, too, before sse-starlette's own.
    response = EventSourceResponse(
        subscription.blocks(), ping=0, sep="\n", shutdown_grace_period=_GRACEFUL
    )
    response.raw_headers.extend(headers)
    with anyio.CancelScope() as patience:

        def ending(why: Ending) -> None:
            patience.deadline = min(patience.deadline, anyio.current_time() + _PATIENCE[why])

        subscription.on_end = ending
        if subscription.ending is not None:
            ending(subscription.ending)
        await response(scope, receive, send)
