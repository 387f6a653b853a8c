"""Scenarios and tables as they lie on disk: read, checked, ready to be played."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from conformance import HOME
from conformance.driver import validator

Step = dict[str, Any]

SHARED_CAPABILITIES = frozenset(["renew_many", "events"])
"""Additions of ours, which a server has and an SDK uses."""
SERVER_CAPABILITIES = SHARED_CAPABILITIES | {"server_clock", "exact_quota", "quota", "unlimited"}


class BadScenarioError(Exception):
    """A file of the suite is wrong; the text names the file, the place and what is right."""


@dataclass(frozen=True, slots=True)
class Actor:
    name: str
    credential: str = "valid"
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str  # "renew/a_refused_renewal_is_a_loss": the path of its file, without the ending
    title: str
    rule: str
    requires: frozenset[str]
    actors: tuple[Actor, ...]
    steps: tuple[Step, ...]
    rounds: tuple[tuple[Step, ...], ...]
    """The steps, once per row of its table; just once without one."""
    table: str | None
    alone: bool
    real: bool

    @property
    def is_for_servers(self) -> bool:
        """Callers only: it needs no SDK."""
        return not self.actors

    def seconds(self) -> float:
        """How long it takes in real time."""
        return sum(
            float(step["with"]["seconds"])
            for steps in self.rounds
            for step in steps
            if step.get("does") in ("advance", "block")
        )

    def credentials(self) -> set[str]:
        """Whose kind of caller it needs, beside the ordinary one."""
        named = {actor.credential for actor in self.actors}
        named |= {step.get("with", {}).get("credential", "valid") for step in self.steps}
        return named - {"valid", "none", "unknown"}


def load_all(home: Path = HOME) -> list[Scenario]:
    paths = sorted((home / "scenarios").glob("*/*.json"))
    return [load(path, home) for path in paths]


def load(path: Path, home: Path = HOME) -> Scenario:
    data = read_json(path)
    complain_of(data, path)
    actors = tuple(
        Actor(name=actor) if isinstance(actor, str) else Actor(**actor)
        for actor in data.get("actors", [])
    )
    steps: tuple[Step, ...] = tuple(data["steps"])
    rows = _rows(data["for_each"], home, path) if "for_each" in data else [{}]
    try:
        rounds = tuple(tuple(_with_row(step, row) for step in steps) for row in rows)
    except KeyError as missing:
        raise BadScenarioError(f"{path.name}: $row.{missing.args[0]} is in no row") from None
    return Scenario(
        name=f"{path.parent.name}/{path.stem}",
        title=data["title"],
        rule=data["rule"],
        requires=frozenset(data.get("requires", [])),
        actors=actors,
        steps=steps,
        rounds=rounds,
        table=data.get("for_each", {}).get("table"),
        alone=data.get("alone", False),
        real=data.get("real", False),
    )


def complain_of(data: Any, path: Path) -> None:
    """Raises BadScenarioError with the first thing that the schema does not allow."""
    _complain(_outline(), data, path, "")
    for number, step in enumerate(data["steps"]):
        place = f"['steps'][{number}]"
        shape = _shape_of(step)
        if shape is None:
            raise BadScenarioError(f"{path.name}{place}: {step!r} does nothing that is known")
        _complain(validator("scenario.schema.json", shape), step, path, place)


_KINDS = ("sends", "sees", "sleeps", "waits", "event", "hears")
"""The verbs of a step that has no `does`."""


@cache
def _outline() -> Draft202012Validator:
    """All but the steps: to ask `oneOf` of each would be slow, and say little."""
    schema = read_json(HOME / "scenario.schema.json")
    del schema["properties"]["steps"]["items"]
    return Draft202012Validator(schema)


def _complain(schema: Draft202012Validator, value: Any, path: Path, place: str) -> None:
    for error in schema.iter_errors(value):
        inner = "".join(f"[{part!r}]" for part in error.absolute_path)
        raise BadScenarioError(f"{path.name}{place}{inner}: {error.message}")


def _shape_of(step: Any) -> str | None:
    """The schema's name for this kind of step: asking it alone is quick and says what is wrong."""
    if not isinstance(step, dict):
        return None
    if "does" in step:
        until = step["does"] == "advance" and "until" in step.get("with", {})
        verb = "advance_until" if until else step["does"]
    else:
        verb = next((kind for kind in _KINDS if kind in step), None)
        if verb and step[verb] == "nothing":
            verb += "_nothing"
    return verb if verb in _shapes() else None


@cache
def _shapes() -> frozenset[str]:
    return frozenset(read_json(HOME / "scenario.schema.json")["$defs"])


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadScenarioError(f"{path.name} is not JSON: {error}") from None


def chosen(scenarios: Sequence[Scenario], globs: Sequence[str]) -> list[Scenario]:
    """Those whose name, or its last part, fits one of the globs; all of them without globs."""
    return [
        scenario
        for scenario in scenarios
        if not globs
        or any(
            fnmatch(scenario.name, glob.removesuffix(".json"))
            or fnmatch(scenario.name.split("/")[1], glob.removesuffix(".json"))
            for glob in globs
        )
    ]


def _rows(source: dict[str, Any], home: Path, path: Path) -> list[dict[str, Any]]:
    table = home / "tables" / f"{source['table']}.json"
    if not table.exists():
        raise BadScenarioError(f"{path.name}: there is no table {table.name}")
    rows: list[dict[str, Any]] = [
        row
        for row in read_json(table)["rows"]
        if all(row.get(name) == value for name, value in source.get("where", {}).items())
        and all(name in row for name in source.get("having", []))
    ]
    if not rows:
        raise BadScenarioError(f"{path.name}: no row of {table.name} is like {source}")
    return rows


def _with_row(value: Any, row: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _with_row(item, row) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_row(item, row) for item in value]
    if isinstance(value, str) and value.startswith("$row."):
        return row[value.removeprefix("$row.")]
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Every text in it, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
