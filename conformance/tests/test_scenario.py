"""Reading scenarios: what is wrong is said by file and place; tables become rounds."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.scenario import BadScenarioError, Scenario, chosen, load, load_all

STEPS = [
    {"who": "alice", "does": "get", "with": {"key": "nightly"}},
    {"who": "alice", "sees": "returned", "with": {"value": {"held": False}}},
]


def written(home: Path, **changes: Any) -> Path:
    data = {
        "title": "A scenario for the loader's own tests",
        "rule": "semantics.md#read",
        "actors": ["alice"],
        "steps": STEPS,
        **changes,
    }
    path = home / "scenarios" / "guard" / "example.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    return path


def test_a_scenario_is_named_by_its_place(tmp_path: Path) -> None:
    scenario = load(written(tmp_path), tmp_path)

    assert scenario.name == "guard/example"
    assert [actor.name for actor in scenario.actors] == ["alice"]
    assert scenario.rounds == (scenario.steps,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"title": "short"}, "example.json['title']"),
        ({"rule": "somewhere"}, "example.json['rule']"),
        ({"requires": ["magic"]}, "example.json['requires'][0]: 'magic'"),
        ({"surprise": 1}, "'surprise' was unexpected"),
        ({"steps": []}, "example.json['steps']"),
        ({"steps": [{"who": "alice", "does": "dance"}]}, "example.json['steps'][0]"),
        ({"steps": [{"who": "alice", "sends": "renew", "then": "explode"}]}, "['steps'][0]"),
        ({"steps": [{"who": "alice", "does": "finish", "with": {}}]}, "['steps'][0]"),
        ({"for_each": {"table": "nothing"}}, "there is no table nothing.json"),
    ],
)
def test_what_is_wrong_is_said_by_place(tmp_path: Path, changes: Any, said: str) -> None:
    path = written(tmp_path, **changes)

    with pytest.raises(BadScenarioError) as caught:
        load(path, tmp_path)

    assert said in str(caught.value)


def test_what_is_no_json_is_said_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text("{")

    with pytest.raises(BadScenarioError, match=r"example\.json is not JSON"):
        load(path, tmp_path)


def test_a_table_makes_a_round_of_each_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    rows = [{"key": "a", "valid": True}, {"key": "b", "valid": False}, {"valid": True}]
    (tmp_path / "tables" / "keys.json").write_text(json.dumps({"rows": rows}))
    steps = [{"who": "alice", "does": "get", "with": {"key": "$row.key"}}, STEPS[1]]
    source = {"table": "keys", "where": {"valid": True}, "having": ["key"]}

    scenario = load(written(tmp_path, steps=steps, for_each=source), tmp_path)

    assert [steps[0]["with"]["key"] for steps in scenario.rounds] == ["a"]


def test_a_table_without_a_fitting_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "keys.json").write_text('{"rows": []}')
    path = written(tmp_path, for_each={"table": "keys"})

    with pytest.raises(BadScenarioError, match=r"no row of keys\.json"):
        load(path, tmp_path)


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        ([], {"renew/survives_503", "server/a_204_has_no_body"}),
        (["renew/*"], {"renew/survives_503"}),
        (["survives_503"], {"renew/survives_503"}),
        (["renew/survives_503.json"], {"renew/survives_503"}),
        (["nothing"], set()),
    ],
)
def test_scenarios_are_chosen_by_name_or_its_last_part(globs: list[str], names: set[str]) -> None:
    two = {"renew/survives_503", "server/a_204_has_no_body"}
    scenarios = [scenario for scenario in load_all() if scenario.name in two]

    assert {scenario.name for scenario in chosen(scenarios, globs)} == names


def test_real_time_is_what_the_clock_and_pauses_take(tmp_path: Path) -> None:
    steps = [
        *STEPS,
        {"who": "clock", "does": "advance", "with": {"seconds": 2.5}},
        {"who": "alice", "does": "block", "with": {"seconds": 4}},
    ]
    scenario: Scenario = load(written(tmp_path, steps=steps), tmp_path)

    assert scenario.seconds() == 6.5


def test_there_are_enough_scenarios_and_each_room_has_some() -> None:
    scenarios = load_all()

    assert len(scenarios) >= 300
    assert {scenario.name.split("/")[0] for scenario in scenarios} == {
        "acquire",
        "renew",
        "release",
        "takeover",
        "guard",
        "wait",
        "watch",
        "server",
    }
