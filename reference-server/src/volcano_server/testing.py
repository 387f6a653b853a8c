"""A lock server inside your own tests.

    from volcano_server.testing import running_server

    with running_server() as server:                  # on a port, in a thread
        client = VolcanoClient(api_url=server.url, service_key=server.service_key)
        server.clock.advance(31)                      # time passes for the server alone

    async with server_in_process() as server:         # no port: an ASGI transport for httpx
        http = httpx.AsyncClient(transport=server.transport(), base_url=server.url)

With `from volcano_server.testing import volcano_server` in conftest.py a test asks for the fixture
`volcano_server`: a server on a port, new for each test.
"""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.applications import Starlette

from volcano_server.access import Access, Caller
from volcano_server.app import create_app
from volcano_server.clock import ManualClock
from volcano_server.serving import JsonServer, bind, url_of
from volcano_server.settings import Settings
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.store import Store

PROJECT = "test"
SERVICE_KEY = "sk-test-service-key"
ANON_KEY = "ak-test-anon-key"
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class VolcanoServer:
    """A running server.  `clock` is the server's; it stands still unless moved."""

    url: str
    clock: ManualClock
    app: Starlette
    project: str = PROJECT
    service_key: str = SERVICE_KEY
    anon_key: str = ANON_KEY

    def transport(self) -> Any:
        """An httpx transport that calls the app on the present event loop (asyncio)."""
        from volcano_server.in_process import InProcessTransport

        return InProcessTransport(self.app)


def _new_app(clock: ManualClock, store: Store | None, quota: int, settings: Settings) -> Starlette:
    access = Access(
        {
            SERVICE_KEY: Caller(PROJECT, "test-service", quota=quota),
            ANON_KEY: Caller(PROJECT, "test-anon", kind="anon", quota=quota),
        }
    )
    return create_app(store or MemoryStore(clock), access, clock, settings)


_SETTINGS = Settings(test_controls=True)


@asynccontextmanager
async def server_in_process(
    *,
    clock: ManualClock | None = None,
    store: Store | None = None,
    quota: int = 0,
    settings: Settings = _SETTINGS,
) -> AsyncIterator[VolcanoServer]:
    """A server on the present event loop (asyncio), reached through `transport()`.

    `store` has to be made with `clock`; without one leases are kept in memory.
    `quota` is in requests a minute, 0 for no limit.
    """
    clock = clock or ManualClock()
    app = _new_app(clock, store, quota, settings)
    async with app.router.lifespan_context(app):
        yield VolcanoServer("http://volcano.test", clock, app)


@contextmanager
def running_server(
    *,
    clock: ManualClock | None = None,
    store: Store | None = None,
    quota: int = 0,
    settings: Settings = _SETTINGS,
    port: int = 0,
) -> Iterator[VolcanoServer]:
    """A server on a port of 127.0.0.1, in a thread with an event loop of its own.

    The arguments are those of `server_in_process`; `port` 0 takes any free one.  What keeps the
    store from being opened is raised here.
    """
    clock = clock or ManualClock()
    app = _new_app(clock, store, quota, settings)
    listener = bind("127.0.0.1", port)
    started = threading.Event()
    server = JsonServer(app, on_ready=started.set)

    def serve() -> None:
        try:
            server.run(sockets=[listener])
        except SystemExit:
            pass  # what it could not start for is in the app's state
        finally:
            started.set()

    thread = threading.Thread(target=serve, name="volcano-server", daemon=True)
    thread.start()
    try:
        if not started.wait(_PATIENCE):
            raise TimeoutError(f"the server did not start within {_PATIENCE} s")
        error = getattr(app.state, "startup_error", None)
        if error is not None:
            raise error
        yield VolcanoServer(url_of(listener), clock, app)
    finally:
        server.should_exit = True
        thread.join(_PATIENCE)
        listener.close()


@pytest.fixture
def volcano_server() -> Iterator[VolcanoServer]:
    """A server on a port, with an empty store in memory, no quota and a clock that stands still."""
    with running_server() as server:
        yield server
