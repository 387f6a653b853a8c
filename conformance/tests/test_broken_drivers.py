"""An honest SDK passes, and an SDK with one flaw is caught by the scenario that its file names."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance import suite
from conformance.discovery import Column
from conformance.reference import ReferenceServer
from conformance.scenario import Scenario, load_all
from conformance.suite import Outcome, Plan

HERE = Path(__file__).parent
BROKEN = sorted((HERE / "broken_drivers").glob("*.py"))
SCENARIOS = {scenario.name: scenario for scenario in load_all()}


def caught_by(file: Path) -> str:
    """The value of CAUGHT_BY, read without running the file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CAUGHT_BY":
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"{file.name} names no scenario")


def play(scenario: Scenario, driver: Column) -> suite.Result:
    plan = Plan(ReferenceServer, workers=1, patience=1.5)
    (result, *rest) = suite.run([(scenario, driver)], plan)
    assert [r for r in rest if not r.outcome.is_good] == []
    return result


@pytest.mark.timeout(120)
def test_an_honest_sdk_passes_everything(driver_column: Callable[[str], Column]) -> None:
    honest = driver_column("reference_driver.py")
    pairs = [(scenario, honest) for scenario in SCENARIOS.values() if not scenario.is_for_servers]

    results = suite.run(pairs, Plan(ReferenceServer, workers=3))

    assert [r for r in results if not r.outcome.is_good] == []
    skipped = {r.detail for r in results if r.outcome is Outcome.SKIP}
    assert skipped == {"reference_driver has no contention_is_a_value"}


@pytest.mark.parametrize("file", BROKEN, ids=lambda file: file.stem)
def test_a_flaw_is_caught_by_the_scenario_that_it_names(
    file: Path, driver_column: Callable[[str], Column]
) -> None:
    result = play(SCENARIOS[caught_by(file)], driver_column(f"broken_drivers/{file.name}"))

    assert result.outcome is Outcome.FAIL, result.detail
