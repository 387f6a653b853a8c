"""A scenario that lost a step or an expected field does not go on passing unnoticed.

Each case deletes one thing of a scenario.  Then lint complains, or an honest SDK no longer passes
it, or the broken driver that it is to catch slips through, as test_broken_drivers.py would report.
"""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance import HOME, lint, suite
from conformance.discovery import Column
from conformance.reference import ReferenceServer
from conformance.scenario import BadScenarioError, Scenario, load
from conformance.suite import Outcome, Plan

Place = Sequence[str | int]

LINT, HONEST, BROKEN = "lint complains", "an honest SDK fails", "the broken driver slips through"

CASES: list[tuple[str, Place, str, str]] = [
    # a step
    ("renew/after_a_third_of_the_ttl", ["steps", 3], HONEST, ""),
    (
        "acquire/a_slow_answer_is_renewed_before_the_body",
        ["steps", 3],
        BROKEN,
        "starts_before_a_due_renewal",
    ),
    ("acquire/a_free_key_is_held_while_the_body_runs", ["steps", 6], LINT, ""),
    ("release/once_after_a_loss", ["steps", 7], LINT, ""),
    ("guard/a_paused_holder_sees_it_on_the_first_look", ["steps", 4], HONEST, ""),
    ("acquire/twice_lost_is_given_back", ["steps", 3], HONEST, ""),
    ("renew/a_refusal_is_a_loss", ["steps", 6], HONEST, ""),
    # a field
    ("acquire/a_503_is_retried_once", ["steps", 2, "with", "request_id"], LINT, ""),
    (
        "renew/another_fencing_token_is_a_loss",
        ["steps", 4, "then"],
        BROKEN,
        "another_fencing_token_is_fine",
    ),
    ("release/after_the_bodys_error", ["steps", 5, "with", "error"], LINT, ""),
    ("renew/after_a_third_of_the_ttl", ["steps", 3, "takes"], LINT, ""),
    ("acquire/a_free_key_is_held_while_the_body_runs", ["requires"], LINT, ""),
    ("acquire/a_wrong_key_is_never_sent", ["for_each"], LINT, ""),
]


def without(scenario: str, place: Place) -> Any:
    data = json.loads((HOME / "scenarios" / f"{scenario}.json").read_text())
    changed = copy.deepcopy(data)
    target = changed
    for part in place[:-1]:
        target = target[part]
    del target[place[-1]]
    return changed


def said_by_lint(path: Path) -> list[str]:
    try:
        return list(lint.of_one(load(path)))
    except BadScenarioError as error:
        return [str(error)]


def outcome(scenario: Scenario, driver: Column) -> Outcome:
    plan = Plan(ReferenceServer, workers=1, patience=1.5)
    return suite.run([(scenario, driver)], plan)[0].outcome


def make_path(directory: Path, name: str, data: Any) -> Path:
    path = directory / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(("name", "place", "noticed_by", "driver"), CASES)
def test_a_deletion_is_noticed(
    name: str,
    place: Place,
    noticed_by: str,
    driver: str,
    tmp_path: Path,
    driver_column: Callable[[str], Column],
) -> None:
    path = make_path(tmp_path, name, without(name, place))

    said = said_by_lint(path)

    if noticed_by == LINT:
        assert said != []
        return
    assert said == []
    if noticed_by == HONEST:
        assert outcome(load(path), driver_column("reference_driver.py")) is Outcome.FAIL
    else:
        assert outcome(load(path), driver_column(f"broken_drivers/{driver}.py")) is Outcome.PASS
