"""What lint says of a scenario, of all of them, and of the lists."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import lint
from conformance.scenario import Actor, Scenario, Step, load_all

WITH_LOCK: Step = {"who": "alice", "does": "with_lock", "with": {"key": "a", "ttl": 30}}
ENTERED: Step = {"who": "alice", "sees": "entered"}
FINISH: Step = {"who": "alice", "does": "finish", "with": {"return": 1}}
RELEASE: Step = {"who": "alice", "sends": "release"}
RETURNED: Step = {"who": "alice", "sees": "returned"}
WHOLE = [WITH_LOCK, ENTERED, FINISH, RELEASE, RETURNED]


def scenario(*steps: Step, requires: frozenset[str] | None = None, **changes: Any) -> Scenario:
    given = Scenario(
        name="guard/example",
        title="An example",
        rule="semantics.md#loss",
        requires=frozenset({"with_lock"}) if requires is None else requires,
        actors=(Actor("alice"),),
        steps=steps,
        rounds=(steps,),
        table=None,
        alone=False,
        real=False,
    )
    return replace(given, **changes)


def test_a_whole_scenario_is_in_order() -> None:
    assert list(lint.of_one(scenario(*WHOLE))) == []


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([WITH_LOCK, ENTERED, FINISH, RELEASE], "nobody sees its end"),
        ([WITH_LOCK, ENTERED, FINISH, RETURNED], "whose release nobody saw"),
        ([WITH_LOCK, ENTERED, RELEASE, RETURNED], "a body that nobody finished"),
        ([WITH_LOCK, FINISH, RELEASE, RETURNED], "a body that was not seen to start"),
        ([*WHOLE, RETURNED], "a call that was not begun"),
        ([ENTERED, *WHOLE], "a body start that nobody asked for"),
        ([*WHOLE, {"who": "alcie", "sends": "renew"}], "alcie is no actor"),
        ([*WHOLE, {"who": "alice", "does": "crash"}, ENTERED], "alice is gone"),
        (
            [*WHOLE, {"who": "clock", "does": "advance", "with": {"until": "bob", "seconds": 1}}],
            "waits for a request of bob",
        ),
        (
            [*WHOLE[:4], {"who": "alice", "sees": "raised", "with": {"message": "boom"}}],
            "without saying which",
        ),
        ([*WHOLE[:3], {**RELEASE, "with": {"token": "$T"}}, RETURNED], "$T is used once"),
    ],
)
def test_a_scenario_that_is_not_of_one_piece(steps: list[Step], said: str) -> None:
    assert any(said in complaint for complaint in lint.of_one(scenario(*steps)))


def test_a_name_used_once_may_have_to_differ_from_another() -> None:
    steps = [
        WITH_LOCK,
        {"who": "alice", "sends": "acquire", "with": {"request_id": "$R"}},
        *WHOLE[1:3],
        {**RELEASE, "with": {"request_id": "$S"}},
        RETURNED,
    ]

    assert list(lint.of_one(scenario(*steps))) == []


def test_an_actor_who_never_acts_is_told() -> None:
    idle = scenario(*WHOLE, actors=(Actor("alice"), Actor("bob")))

    assert list(lint.of_one(idle)) == ["bob never does anything"]


def test_requirements_are_those_that_are_used() -> None:
    assert "does not say that it requires with_lock" in list(
        lint.of_one(scenario(*WHOLE, requires=frozenset()))
    )
    assert "requires cancel and does not use it" in list(
        lint.of_one(scenario(*WHOLE, requires=frozenset({"with_lock", "cancel"})))
    )


def test_the_real_suite_covers_what_it_must() -> None:
    assert lint.complaints() == []


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("server/the_route_is_checked_first", "no scenario sees 404 not_found"),
        ("acquire/two_projects_do_not_meet", None),
    ],
)
def test_what_nothing_covers_any_more_is_told(left_out: str, said: str | None) -> None:
    anchors = {s.rule.removeprefix("semantics.md#") for s in load_all()} | set(lint.NOT_PLAYED)
    rest = [s for s in load_all() if s.name != left_out]

    complaints = list(lint.of_all(rest, anchors))

    assert any(said in c for c in complaints) if said else complaints == []


def test_a_rule_without_a_scenario_and_a_scenario_without_a_rule_are_told() -> None:
    scenarios = load_all()
    anchors = {s.rule.removeprefix("semantics.md#") for s in scenarios} | set(lint.NOT_PLAYED)

    complaints = list(lint.of_all(scenarios, (anchors - {"cancel"}) | {"new-rule"}))

    assert any("no anchor 'semantics.md#cancel'" in c for c in complaints)
    assert "docs/semantics.md: no scenario names #new-rule" in complaints


def test_faults_name_what_is_there(tmp_path: Path) -> None:
    home = tmp_path / "conformance"
    home.mkdir()
    (tmp_path / "test_x.py").write_text("def test_there() -> None: ...")
    (home / "faults.json").write_text(
        '{"groups": [{"group": "g", "faults": [{"fault": "nowhere"},'
        ' {"fault": "b", "scenarios": ["renew/none"]},'
        ' {"fault": "c", "tests": ["gone.py", "test_x.py::test_there", "test_x.py::test_not"]}]}]}'
    )

    assert list(lint.of_faults({"renew/some"}, home)) == [
        "faults.json: 'nowhere' is tested nowhere",
        "faults.json: there is no scenario renew/none",
        "faults.json: there is no gone.py",
        "faults.json: test_x.py has no test_not",
    ]
