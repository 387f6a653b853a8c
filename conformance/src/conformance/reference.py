"""The reference server as a target: in this process, on a port, with a clock that stands still.

One server serves scenario after scenario.  Each gets projects and credentials of its own, so that
nothing of an earlier one is left for it; time only ever goes on.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from conformance.scenario import SERVER_CAPABILITIES
from conformance.target import Target
from volcano_server.access import Access, Caller, digest
from volcano_server.app import create_app
from volcano_server.clock import ManualClock
from volcano_server.serving import JsonServer, bind, url_of
from volcano_server.settings import Settings
from volcano_server.stores.memory import MemoryStore

QUOTA = 40
"""Requests a minute in the scenario about it: few enough to be counted out."""


class GrowingAccess(Access):
    """Credentials can be added while the server runs."""

    def admit(self, key: str, caller: Caller) -> None:
        self._callers = {**self._callers, digest(key.encode()): caller}


class ReferenceServer:
    def __init__(self) -> None:
        self._clock = ManualClock()
        self._access = GrowingAccess()
        self._key = f"sk-{secrets.token_hex(8)}"  # of nobody's project: it moves the clock
        self._access.admit(self._key, Caller(self._key, "clock", quota=0))
        self._listener = bind("127.0.0.1", 0)
        settings = Settings(test_controls=True)
        app = create_app(MemoryStore(self._clock), self._access, self._clock, settings)
        started = threading.Event()
        self._server = JsonServer(app, on_ready=started.set)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        if not started.wait(10):
            raise TimeoutError("the reference server did not start within 10 s")

    @contextmanager
    def stage(self, *, limited: bool) -> Iterator[Target]:
        """A target for one scenario; `limited`: with a quota."""
        name, quota = secrets.token_hex(8), QUOTA if limited else 0
        credentials: dict[str, str | None] = {"none": None}

        def admit(kind: str, key: str, caller: Caller) -> None:
            credentials[kind] = key
            self._access.admit(key, caller)

        admit("valid", f"sk-{name}-valid", Caller(name, "valid", quota=quota))
        admit("anon", f"ak-{name}-anon", Caller(name, "anon", kind="anon", quota=quota))
        weak = Caller(name, "weak", permissions=frozenset({"tables.read"}), quota=quota)
        admit("no_permission", f"sk-{name}-weak", weak)
        admit("other_project", f"sk-{name}-other", Caller(f"{name}-other", "other", quota=quota))
        # A revoked key is one that the server no longer finds.
        credentials["revoked"] = f"sk-{name}-revoked"
        credentials["unknown"] = f"sk-{name}-unknown"
        yield Target(
            base_url=url_of(self._listener),
            credentials=credentials,
            capabilities=SERVER_CAPABILITIES - {"unlimited" if limited else "quota"},
            advance=self._clock.advance,
            catch_up=self._catch_up,
            now=self._now,
        )

    def _catch_up(self) -> None:
        """What fell due, a lapse for example, has been told of, and written, when this returns."""
        target = Target(url_of(self._listener), {})
        headers = [("Authorization", f"Bearer {self._key}")]
        answer = target.send("POST", "/_test/clock", headers, b'{"advance_seconds": 0}')
        if answer.status != 200:
            raise OSError(f"the reference server does not catch up: {answer}")
        # What was told before the answer is written while a further request is taken in.
        target.send("GET", "/", [], b"")

    def _now(self) -> str:
        now = datetime.fromtimestamp(self._clock.wall() // 1000 / 1000, UTC)
        return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._listener.close()
