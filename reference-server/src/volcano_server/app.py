"""The ASGI application: its routes, and what runs as long as it does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from volcano_server.access import Access, AccessError, Changes
from volcano_server.batch import BatchQueue
from volcano_server.clock import HostClock, Movable
from volcano_server.event_metrics import EventMetrics
from volcano_server.hub import Hub
from volcano_server.logs import Log
from volcano_server.problems import INTERNAL_ERROR
from volcano_server.routes import (
    LockRoutes,
    Metrics,
    on_http_exception,
    operator_routes,
    problem_response,
    test_routes,
)
from volcano_server.service import LockService
from volcano_server.settings import Settings
from volcano_server.stores.store import SharedCounts, SharedNews, Store
from volcano_server.stores.sweeper import keep_swept


def create_app(
    store: Store,
    access: Access,
    clock: HostClock,
    settings: Settings | None = None,
    *,
    log: Log | None = None,
    counts: SharedCounts | None = None,
) -> Starlette:
    """The server as an ASGI app.  Its lifespan opens and closes `store`.

    `clock` is the host's, the same that the store was made with: quota windows follow its wall
    clock.  `counts`: where the replicas that share `store` add up what counts against quotas.
    What fails at start-up is raised through the lifespan and kept as `app.state.startup_error`.
    `app.state.on_stop()` ends the event streams, which otherwise keep a server from stopping.
    """
    settings = settings or Settings()
    log = log or Log(quiet=True)
    queue = BatchQueue(store)
    hub = Hub(
        queue,
        store,
        clock,
        news=store if isinstance(store, SharedNews) else None,
        on_fault=lambda: log.trouble("internal_error", events=True, exc_info=True),
    )
    service = LockService(access, queue, hub, clock, settings)
    metrics = Metrics()
    metrics.registry.register(EventMetrics(hub))

    async def on_fault(request: Request, _: Exception) -> Response:
        log.trouble("internal_error", path=request.url.path, exc_info=True)
        return problem_response(INTERNAL_ERROR, request)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await _open(store, access)
        except Exception as error:
            app.state.startup_error = error
            raise
        chores = [
            asyncio.create_task(_kept_up(chore, log))
            for chore in (
                lambda: _refresh(access, service, log, settings.access_refresh),
                lambda: keep_swept(store, asyncio.sleep),
                lambda: _exchange_counts(service, counts, settings.counts_exchange),
                *([hub.feed.run] if hub.feed is not None else []),
            )
        ]
        stop_listening = (
            clock.call_when_moved(hub.clock_moved) if isinstance(clock, Movable) else lambda: None
        )
        try:
            yield
        finally:
            stop_listening()
            hub.close()
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            await queue.close()
            await store.close()
            access.close()

    app = _LockApp(
        LockRoutes(service, metrics, log),
        routes=[
            *operator_routes(service, metrics, log),
            *(test_routes(service) if settings.test_controls else []),
        ],
        exception_handlers={HTTPException: on_http_exception, Exception: on_fault},
        lifespan=lifespan,
    )
    app.state.on_stop = hub.close
    app.router.redirect_slashes = False  # a redirect is not JSON, and no client follows one
    return app


class _LockApp(Starlette):
    """Asks the lock routes before anything else.

    They answer their own faults, so Starlette's middleware and the search for a route would only
    cost time: a third of what the app takes for a request.
    """

    def __init__(self, locks: LockRoutes, **options: Any) -> None:
        super().__init__(**options)
        self.whole_requests = locks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = self.whole_requests.find(scope)
        if target is None:
            await super().__call__(scope, receive, send)
        else:
            await self.whole_requests.answer(target, scope, receive, send)


async def _open(store: Store, access: Access) -> None:
    """Both, or neither.  The store first: it makes the tables of credentials where it has them."""
    await store.open()
    try:
        await asyncio.to_thread(access.refresh)
    except BaseException:
        await store.close()
        access.close()
        raise


async def _refresh(access: Access, service: LockService, log: Log, pause: float) -> None:
    """Look for changed credentials for as long as the server runs."""
    while True:
        await asyncio.sleep(pause)
        try:
            changes = await asyncio.to_thread(access.refresh)
        except AccessError as error:
            # What was read last goes on to count: a file under repair must not stop every holder.
            log.trouble("credentials_unreadable", reason=str(error))
            continue
        if changes != Changes():
            service.end_streams(changes.removed | changes.changed)
            log.note(
                "credentials_changed",
                added=sorted(changes.added),
                removed=sorted(changes.removed),
                changed=sorted(changes.changed),
            )


async def _exchange_counts(service: LockService, counts: SharedCounts | None, pause: float) -> None:
    while counts is not None:
        await asyncio.sleep(pause)
        await service.exchange_counts(counts)


async def _kept_up(chore: Callable[[], Awaitable[None]], log: Log) -> None:
    """A chore that a fault of ours does not end for the rest of the server's life."""
    while True:
        try:
            await chore()
        except Exception:  # noqa: BLE001 - whatever it was, the operator sees it
            log.trouble("internal_error", chore=True, exc_info=True)
        await asyncio.sleep(1)
