"""What can be known of the suite without playing it.

A scenario that lost a step or a field should not go on passing unnoticed.  So each file must be
of one piece: calls that are begun are seen to their end, bodies end and their locks are released,
names say something, actors act.  And together the files must cover what the rules are about.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import HOME
from conformance.match import is_name
from conformance.report import read_faults
from conformance.scenario import BadScenarioError, Scenario, Step, load, read_json, strings_in

NOT_PLAYED = {
    "the-clock-on-sqlite": "a store's own rule: reference-server/tests",
    "the-clock-on-postgresql": "a store's own rule: reference-server/tests",
    "batches": "a store's own rule: reference-server/tests",
    "durability": "needs crashes of the server: reference-server/tests",
    "restarts": "needs restarts of the server: reference-server/tests",
    "lease-rules": "the sections below it are named one by one",
    "guarantees": "follows from the rest",
}
"""Anchors of docs/semantics.md that no scenario needs to name, and why."""

_DIRECT = {"acquire", "renew", "release", "get", "force_release", "close", "watch"}
_NEEDS = {
    "with_lock": "with_lock",
    "cancel": "cancel",
    "close": "close",
    "sleeps": "virtual_clock",
    "wait": "wait",
    **dict.fromkeys(["watch", "waits", "event", "hears"], "events"),
    **dict.fromkeys(["acquire", "renew", "release", "get", "force_release"], "direct_calls"),
}
"""What a step's words need of the SDK; of a caller's, `events` of the server."""
_REFUSALS = {
    (400, "invalid_request"),
    (401, "authentication_required"),
    (401, "invalid_credentials"),
    (403, "permission_denied"),
    (404, "not_found"),
    (405, "method_not_allowed"),
    (409, "lock_held"),
    (409, "lock_ownership_lost"),
    (413, "payload_too_large"),
    (429, "lock_rate_limited"),
}
"""What a server scenario must have seen.  503 cannot be had from outside."""


def complaints(home: Path = HOME) -> list[str]:
    """Sentences, each beginning with the file that it is about."""
    scenarios: list[Scenario] = []
    found: list[str] = []
    for path in sorted((home / "scenarios").glob("*/*.json")):
        try:
            scenarios.append(load(path, home))
        except BadScenarioError as error:
            found.append(f"{path.parent.name}/{error}")
    for scenario in scenarios:
        found += [f"{scenario.name}: {said}" for said in of_one(scenario)]
    found += of_all(scenarios, _anchors(home.parent / "docs" / "semantics.md"))
    found += of_faults({scenario.name for scenario in scenarios}, home)
    return found


# ---------------------------------------------------------------- one scenario


@dataclass
class _Call:
    verb: str
    entered: bool = False
    finished: bool = False
    released: bool = False
    over: bool = False


@dataclass
class _Actor:
    calls: dict[str, _Call] = field(default_factory=dict)
    count: int = 0
    gone: bool = False
    acted: bool = False
    closed: bool = False

    def begin(self, verb: str, name: str | None) -> None:
        self.count += 1
        self.calls[name or str(self.count)] = _Call(verb)

    def find(self, name: str | None, verbs: Iterable[str]) -> _Call | None:
        """The call of this name, or the first that is not over."""
        if name is not None:
            return self.calls.get(name)
        open_ones = [c for c in self.calls.values() if not c.over and c.verb in verbs]
        return open_ones[0] if open_ones else None


def of_one(scenario: Scenario) -> Iterator[str]:
    actors = {actor.name: _Actor() for actor in scenario.actors}
    listening: set[str] = set()  # callers with a stream
    for number, step in enumerate(scenario.steps, 1):
        for said in _of_step(step, actors, listening):
            yield f"step {number}: {said}"
    for name, actor in actors.items():
        yield from (f"{name} {said}" for said in _of_actor(actor))
    yield from _of_names(scenario.steps)
    yield from _of_requirements(scenario)
    uses_rows = any(text.startswith("$row.") for text in strings_in(list(scenario.steps)))
    if scenario.table and not uses_rows:
        yield "has for_each but uses no $row"


def _of_step(step: Step, actors: dict[str, _Actor], listening: set[str]) -> Iterator[str]:
    who = step["who"]
    if who == "clock":
        until = step["with"].get("until")
        if until is not None and until not in actors:
            yield f"waits for a request of {until}, who is no actor"
        return
    if who not in actors:
        yield from _of_caller(step, listening)
        return
    actor = actors[who]
    actor.acted = True
    if actor.gone:
        yield f"{who} is gone"
    yield from _follow(step, actor)


def _of_caller(step: Step, listening: set[str]) -> Iterator[str]:
    who, verb = step["who"], step.get("does")
    if verb == "watch":
        listening.add(who)
    elif "event" in step or verb == "unwatch":
        if who not in listening:
            yield f"{who} has opened no stream"
        if verb == "unwatch":
            listening.discard(who)
    elif verb is None or verb in ("with_lock", "finish", "look", "close", "cancel", "crash"):
        yield f"{who} is no actor, so it cannot do this"
    elif verb == "request" and "gets" not in step:
        yield "a raw request must say what it gets"


def _follow(step: Step, actor: _Actor) -> Iterator[str]:
    verb, call = step.get("does"), step.get("call")
    if verb == "with_lock" or verb in _DIRECT:
        actor.begin(verb, call)
        actor.closed |= verb == "close"
    elif verb == "finish":
        ended = actor.find(call, ["with_lock"])
        if ended is None or not ended.entered:
            yield "finishes a body that was not seen to start"
        else:
            ended.finished = True
    elif verb in ("crash", "exit"):
        actor.gone = True
    elif step.get("sends") == "release":
        for ended in actor.calls.values():
            ended.released |= ended.finished or ended.verb != "with_lock" or not ended.entered
    elif step.get("sees") == "entered":
        started = actor.find(call, ["with_lock"])
        if started is None:
            yield "sees a body start that nobody asked for"
        else:
            started.entered = True
    elif step.get("sees") in ("returned", "raised"):
        yield from _end(step, actor)


def _end(step: Step, actor: _Actor) -> Iterator[str]:
    ended = actor.find(step.get("call"), [*_DIRECT, "with_lock"])
    if ended is None:
        yield "sees the end of a call that was not begun"
        return
    ended.over = True
    if step["sees"] == "raised" and not {"error", "status", "errors"} & set(step.get("with", {})):
        yield "sees an error without saying which"
    if ended.entered and not ended.finished:
        yield "sees the end of a body that nobody finished"
    if ended.entered and not ended.released and not actor.closed:
        yield "sees the end of a lock whose release nobody saw"


def _of_actor(actor: _Actor) -> Iterator[str]:
    if not actor.acted:
        yield "never does anything"
    if actor.gone:
        return
    for name, call in actor.calls.items():
        if not call.over:
            yield f"begins {call.verb} (call {name}) and nobody sees its end"


_WRAPPERS = ("greater_than", "less_than", "number", "not", "one_of", "between", "members")


def _names_in(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Each use of a name, with the field that it stands in."""
    if is_name(value):
        yield value, place
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _names_in(item, place if key in _WRAPPERS else key)
    elif isinstance(value, list):
        for item in value:
            yield from _names_in(item, place)


def _of_names(steps: Iterable[Step]) -> Iterator[str]:
    """A name that is used once says nothing, unless it must differ from another one."""
    uses = list(_names_in(list(steps)))
    counts = Counter(name for name, _ in uses)
    for name, place in uses:
        others = {other for other, where in uses if where == place} - {name}
        if counts[name] == 1 and not others:
            yield f"{name} is used once, so it says nothing"


def _of_requirements(scenario: Scenario) -> Iterator[str]:
    names = {actor.name for actor in scenario.actors}
    needed: set[str] = set()
    for step in scenario.steps:
        words = {step.get("does"), *step, *step.get("with", {})}
        if step.get("waits") == "nothing":
            words.remove("waits")  # true of every SDK
        needs = {_NEEDS[word] for word in words & _NEEDS.keys()}
        if "/lock-events" in str(step.get("with", {}).get("path")):
            needs.add("events")
        needed |= needs if step["who"] in names else needs & {"events"}
    if missing := needed - scenario.requires:
        yield f"does not say that it requires {', '.join(sorted(missing))}"
    superfluous = (scenario.requires & set(_NEEDS.values())) - needed
    if superfluous:
        yield f"requires {', '.join(sorted(superfluous))} and does not use it"


# ---------------------------------------------------------------- all of them


def of_all(scenarios: list[Scenario], anchors: set[str]) -> Iterator[str]:
    titles = Counter(scenario.title for scenario in scenarios)
    for scenario in scenarios:
        if titles[scenario.title] > 1:
            yield f"{scenario.name}: another scenario has its title"
        if scenario.rule.removeprefix("semantics.md#") not in anchors:
            yield f"{scenario.name}: docs/semantics.md has no anchor {scenario.rule!r}"
    named = {scenario.rule.removeprefix("semantics.md#") for scenario in scenarios}
    for anchor in sorted(anchors - named - set(NOT_PLAYED)):
        yield f"docs/semantics.md: no scenario names #{anchor}"
    for anchor in sorted(set(NOT_PLAYED) & named | set(NOT_PLAYED) - anchors):
        yield f"lint.py: NOT_PLAYED names #{anchor}, which is named by a scenario, or no anchor"
    yield from _of_coverage(scenarios)


def _of_coverage(scenarios: list[Scenario]) -> Iterator[str]:
    """Every refusal, every verdict, every way in which an SDK's call can end."""
    gets = [step.get("gets", {}) for s in scenarios if s.is_for_servers for step in s.steps]
    refused = [(got.get("status"), got.get("code")) for got in gets]
    for status, code in sorted(refusal for refusal in _REFUSALS if refusal not in refused):
        yield f"server: no scenario sees {status} {code}"
    steps = [step for s in scenarios if not s.is_for_servers for step in s.steps]
    done = {step.get("does") for step in steps} | {step.get("sends") for step in steps}
    wanted = {"with_lock", "finish", "crash", "block", "look", "cancel", "close", "exit", *_DIRECT}
    for verb in sorted(wanted - done):
        yield f"scenarios: none does {verb}"
    for operation in ("acquire", "renew", "release"):
        verdicts = {
            step.get("then", "deliver") if isinstance(step.get("then", ""), str) else "answer"
            for step in steps
            if step.get("sends") == operation
        }
        for verdict in sorted(
            {"deliver", "lose_request", "lose_response", "hang", "answer"} - verdicts
        ):
            yield f"scenarios: no {operation} meets {verdict}"
    errors = {step.get("with", {}).get("error") for step in steps if step.get("sees") == "raised"}
    for name in sorted(_error_names() - errors - {"NotFoundError", "ValidationError"}):
        yield f"scenarios: none sees {name}"


def _error_names() -> set[str]:
    rows = read_json(HOME / "tables" / "error_names.json")["rows"]
    others = {"LockLostError", "TransportError", "BodyError", "Cancelled", "InvalidArgument"}
    return {row["error"] for row in rows} | others


def of_faults(scenarios: set[str], home: Path = HOME) -> Iterator[str]:
    """The list of known faults: each is tested somewhere, and what it names is there."""
    for fault in read_faults(home / "faults.json"):
        if not fault.scenarios and not fault.tests:
            yield f"faults.json: {fault.line!r} is tested nowhere"
        for name in fault.scenarios:
            if name not in scenarios:
                yield f"faults.json: there is no scenario {name}"
        for test in fault.tests:
            path = home.parent / test.split("::")[0]
            if not path.exists():
                yield f"faults.json: there is no {test.split('::')[0]}"
            elif "::" in test and test.split("::")[1] not in path.read_text(encoding="utf-8"):
                yield f"faults.json: {test.split('::')[0]} has no {test.split('::')[1]}"


def _anchors(semantics: Path) -> set[str]:
    return set(re.findall(r'<a id="([a-z0-9-]+)"></a>', semantics.read_text(encoding="utf-8")))
