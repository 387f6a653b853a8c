"""The conformance scenarios for servers, played against three replicas behind a round-robin proxy.

In virtual time: the replicas share a PostgreSQL whose clock the scenarios move.  The same in real
time, over real processes: `conformance server --url …`, as docs/operations.md says.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from balancer import balanced
from postgres import Cluster, DatabaseClock

from conformance.reference import GrowingAccess
from conformance.scenario import SERVER_CAPABILITIES, Scenario, load_all
from conformance.suite import Outcome, Plan, run
from conformance.target import Target
from volcano_server.access import Caller
from volcano_server.app import create_app
from volcano_server.database import Database
from volcano_server.serving import JsonServer, bind, url_of
from volcano_server.stores.postgresql import PostgresqlStore

pytestmark = pytest.mark.timeout(120, method="thread")


PER_REPLICA = frozenset(
    [
        "server/events_count_the_watchers",  # each replica counts its own streams
        "server/events_go_on_where_they_stopped",  # an id is known to the replica that gave it
        "server/events_go_on_with_a_lapse",
    ]
)


NAP = 20.0
"""Seconds that a replica may sleep without missing what others have told: feed.py."""


class Replica:
    """A server in a thread."""

    def __init__(self, url: str, clock: DatabaseClock, access: GrowingAccess) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.port = urlsplit(url_of(self._listener)).port or 0
        store = PostgresqlStore(Database.parse(url), clock)
        started = threading.Event()
        app = create_app(store, access, clock, counts=store)
        self._server = JsonServer(app, on_ready=started.set)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        assert started.wait(10)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._listener.close()


class Replicas:
    """A server for the runner: three that are one.  Each scenario has a project of its own."""

    def __init__(self, url: str, number: int = 3) -> None:
        self._clock = DatabaseClock(url)
        self._access = GrowingAccess()
        self._left = ExitStack()
        self._left.callback(self._clock.close)
        replicas = [Replica(url, self._clock, self._access) for _ in range(number)]
        for replica in replicas:
            self._left.callback(replica.close)
        self._url = self._left.enter_context(balanced(replicas))

    @contextmanager
    def stage(self, *, limited: bool) -> Iterator[Target]:
        assert not limited
        name = secrets.token_hex(8)
        callers = {
            "valid": Caller(name, "valid", quota=0),
            "anon": Caller(name, "anon", kind="anon", quota=0),
            "no_permission": Caller(name, "weak", permissions=frozenset(), quota=0),
            "other_project": Caller(f"{name}-other", "other", quota=0),
        }
        keys = {kind: f"sk-{name}-{kind}" for kind in (*callers, "revoked", "unknown")}
        for kind, caller in callers.items():
            self._access.admit(keys[kind], caller)
        yield Target(
            base_url=self._url,
            credentials={"none": None, **keys},
            capabilities=SERVER_CAPABILITIES,
            advance=self._advance,
        )

    def _advance(self, seconds: float) -> None:
        """In pieces: a replica that slept for longer would tell its readers that it did."""
        while NAP < seconds < 1_000:  # no stream is open through the days of some scenarios
            self._clock.advance(NAP)
            seconds -= NAP
        self._clock.advance(seconds)

    def close(self) -> None:
        self._left.close()


def test_three_replicas_pass_what_every_server_must_do(cluster: Cluster) -> None:
    # A quota over replicas is exact to within an exchange of counts: test_replicas.py.
    scenarios = [
        scenario
        for scenario in load_all()
        if scenario.is_for_servers
        and "quota" not in scenario.requires
        and scenario.name not in PER_REPLICA
    ]

    passed = play(scenarios, lambda: Replicas(cluster.database()))

    assert len(passed) > 75
    assert sum(name.startswith("server/events_") for name in passed) > 20


def test_each_replica_passes_what_holds_for_one_alone(cluster: Cluster) -> None:
    scenarios = [scenario for scenario in load_all() if scenario.name in PER_REPLICA]

    assert play(scenarios, lambda: Replicas(cluster.database(), 1)) == PER_REPLICA


def play(scenarios: list[Scenario], replicas: Callable[[], Replicas]) -> set[str]:
    """The names of those that passed, which are all."""
    plan = replace(Plan(replicas), workers=2, patience=10.0)
    results = run([(scenario, None) for scenario in scenarios], plan)

    wrong = [f"{each.scenario}: {each.detail}" for each in results if not each.outcome.is_good]
    assert wrong == []
    passed = {each.scenario for each in results if each.outcome is Outcome.PASS}
    assert passed == {scenario.name for scenario in scenarios}
    return passed
