"""What becomes of a scenario: outcomes, reasons, and the account of a failure."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from pytest_httpserver import HTTPServer

from conformance import suite
from conformance.discovery import Column
from conformance.play import Mode
from conformance.reference import ReferenceServer
from conformance.scenario import Scenario, load_all
from conformance.suite import Outcome, Plan, RemoteServer

SCENARIOS = {scenario.name: scenario for scenario in load_all()}
CAUGHT = SCENARIOS["renew/after_a_third_of_the_ttl"]
PLAN = Plan(ReferenceServer, workers=1, patience=1.5)


@pytest.fixture
def honest(driver_column: Callable[[str], Column]) -> Column:
    return driver_column("reference_driver.py")


@pytest.fixture
def half(driver_column: Callable[[str], Column]) -> Column:
    return driver_column("broken_drivers/half_ttl_cadence.py")


def play(scenario: Scenario, player: Column) -> suite.Result:
    return suite.run([(scenario, player)], PLAN)[0]


def test_a_failure_gives_the_whole_account(half: Column) -> None:
    detail = play(CAUGHT, half).detail

    lines = detail.splitlines()
    assert lines[0] == CAUGHT.title
    assert lines[1] == "rule: semantics.md#renewal"
    assert "step 4: clock does advance" in detail
    assert "wanted: a request of alice within" in detail
    assert '"cmd": "with_lock"' in detail
    assert "the server answers 201" in detail


def test_a_capability_that_is_lacking_is_a_reason_to_skip(honest: Column) -> None:
    result = play(SCENARIOS["acquire/contention_is_a_value"], honest)

    assert (result.outcome, result.detail) == (
        Outcome.SKIP,
        "reference_driver has no contention_is_a_value",
    )


def test_a_driver_that_dies_is_an_error_and_no_failure(honest: Column) -> None:
    dead = replace(honest, argv=("sh", "-c", "echo oh no >&2; exit 3"))

    result = play(CAUGHT, dead)

    assert result.outcome is Outcome.ERROR
    assert "oh no" in result.detail


def test_a_known_failure_must_fail(honest: Column, half: Column) -> None:
    known = {CAUGHT.name: "slow, issue 7"}

    failing = play(CAUGHT, replace(half, known_failures=known))
    passing = play(CAUGHT, replace(honest, known_failures=known))

    assert (failing.outcome, failing.detail) == (Outcome.KNOWN, "slow, issue 7")
    assert passing.outcome is Outcome.FAIL
    assert passing.detail.startswith("it passes, but known_failures.txt says")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("server/nobody_can_take_a_key_in_its_grace", "the server has no server_clock"),
        ("server/an_anon_key_may_do_nothing", "no credential of the kind anon was given"),
        ("server/over_the_quota", "the server has no quota"),
    ],
)
def test_a_server_that_offers_less_is_a_reason_to_skip(name: str, reason: str) -> None:
    plan = Plan(lambda: RemoteServer("http://127.0.0.1:9", {"valid": "sk-x"}), Mode.REAL)

    (result,) = suite.run([(SCENARIOS[name], None)], plan)

    assert (result.outcome, result.detail) == (Outcome.SKIP, reason)


def test_a_server_that_is_not_there_is_an_error() -> None:
    plan = Plan(lambda: RemoteServer("http://127.0.0.1:9", {"valid": "sk-x"}), Mode.REAL)

    (result,) = suite.run([(SCENARIOS["server/a_free_key_reads_as_not_held"], None)], plan)

    assert result.outcome is Outcome.ERROR


def test_the_quota_s_own_scenario_begins_with_a_window_that_others_used_up(
    httpserver: HTTPServer,
) -> None:
    limit = {"X-RateLimit-Limit": "1", "X-RateLimit-Reset": "4102444800"}
    free = {"held": False}
    over = {"error": "Too many.", "code": "lock_rate_limited"}
    spent = {**limit, "X-RateLimit-Remaining": "0"}
    for headers, code, body in [
        ({"Retry-After": "0"}, 429, over),  # the scenario before went so far
        (limit, 200, free),
        ({**spent, "Retry-After": "9"}, 429, over),
        ({**spent, "Retry-After": "9"}, 429, over),
    ]:
        ordered = httpserver.expect_ordered_request(re.compile("/locks/.*"))
        ordered.respond_with_json(body, code, headers)
    server = RemoteServer(httpserver.url_for("/"), {"valid": "sk-x"}, ["quota"])

    (result,) = suite.run(
        [(SCENARIOS["server/over_the_quota"], None)], Plan(lambda: server, Mode.REAL)
    )

    assert (result.outcome, result.detail) == (Outcome.PASS, "")


def test_what_must_be_alone_is_played_last() -> None:
    names = ["server/over_the_quota", "server/a_free_key_reads_as_not_held"]
    heard: list[str] = []

    suite.run(
        [(SCENARIOS[name], None) for name in names],
        PLAN,
        lambda result: heard.append(result.scenario),
    )

    assert heard == list(reversed(names))


def test_every_run_against_a_lasting_server_has_keys_of_its_own() -> None:
    server = RemoteServer("http://127.0.0.1:9/", {"valid": "sk-x"})

    with server.stage(limited=False) as first, server.stage(limited=False) as second:
        assert first.base_url == "http://127.0.0.1:9"
        assert first.key_prefix != second.key_prefix
