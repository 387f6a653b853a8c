"""Results for people and for machines: lines, JUnit, JSON, and the page docs/conformance.md."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import click

from conformance import HOME
from conformance.scenario import BadScenarioError, Scenario, read_json
from conformance.suite import Outcome, Result
from conformance.target import Target

_MARKS = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✗",
    Outcome.ERROR: "✗",
    Outcome.SKIP: "–",
    Outcome.KNOWN: "known",
}


def teller(*, verbose: bool) -> Callable[[Result], None]:
    """Says what came of each as it ends: all of it for a failure, a line for the rest if asked."""

    def tell(result: Result) -> None:
        if not result.outcome.is_good:
            click.echo(f"\n{result.outcome.upper()} {result.column} {result.scenario}")
            click.echo("\n".join(f"  {line}" for line in result.detail.splitlines()))
        elif verbose or result.outcome is Outcome.KNOWN:
            why = f"  ({result.detail})" if result.detail else ""
            click.echo(f"{result.outcome:<5} {result.column} {result.scenario}{why}")

    return tell


def summary(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    columns = sorted({result.column for result in results})
    reasons = Counter(
        f"{result.column}: {result.detail}" for result in results if result.outcome is Outcome.SKIP
    )
    lines = [f"  {count} skipped, {reason}" for reason, count in sorted(reasons.items())]
    if counts[Outcome.KNOWN]:
        lines.append(f"  {counts[Outcome.KNOWN]} known failures")
    failed = counts[Outcome.FAIL] + counts[Outcome.ERROR]
    passed = counts[Outcome.PASS] + counts[Outcome.KNOWN]
    lines.append(
        f"{passed} passed, {failed} failed, {counts[Outcome.SKIP]} skipped"
        f" ({', '.join(columns) or 'nothing to play'})"
    )
    return "\n".join(lines)


def junit(results: Sequence[Result]) -> str:
    root = ET.Element("testsuites", name="conformance")
    for column in sorted({result.column for result in results}):
        own = [result for result in results if result.column == column]
        node = ET.SubElement(
            root,
            "testsuite",
            name=column,
            tests=str(len(own)),
            failures=str(sum(r.outcome is Outcome.FAIL for r in own)),
            errors=str(sum(r.outcome is Outcome.ERROR for r in own)),
            skipped=str(sum(r.outcome in (Outcome.SKIP, Outcome.KNOWN) for r in own)),
        )
        for result in sorted(own, key=lambda r: r.scenario):
            case = ET.SubElement(
                node,
                "testcase",
                classname=column,
                name=result.scenario,
                time=f"{result.seconds:.3f}",
            )
            kind = {
                Outcome.FAIL: "failure",
                Outcome.ERROR: "error",
                Outcome.SKIP: "skipped",
                Outcome.KNOWN: "skipped",
            }.get(result.outcome)
            if kind:
                told = _xml_text(result.detail)
                ET.SubElement(case, kind, message=told.split("\n")[0]).text = told
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml_text(text: str) -> str:
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)


def as_json(results: Sequence[Result]) -> str:
    rows = [asdict(r) for r in sorted(results, key=lambda r: (r.column, r.scenario))]
    return json.dumps({"results": rows}, indent=1, ensure_ascii=False) + "\n"


def read_results(path: Path) -> list[Result]:
    try:
        return [
            Result(**{**row, "outcome": Outcome(row["outcome"])})
            for row in read_json(path)["results"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise BadScenarioError(f"{path.name} is not what `run --json` writes: {error}") from None


def probe(url: str, service_key: str) -> set[str]:
    """What a server shows of itself: whether there is a quota, and which additions of ours."""
    headers = [
        ("Authorization", f"Bearer {service_key}"),
        ("X-Volcano-Request-Id", "00000000-0000-4000-8000-000000000000"),
        ("Content-Type", "application/json"),
    ]
    try:
        target = Target(url.rstrip("/"), {})
        answer = target.send("GET", "/locks/probe", headers, b"")
        additions = {
            "renew_many": target.send("PATCH", "/lock-leases", headers, b"{}"),
            "events": target.send("GET", "/lock-events", headers, b""),
        }
    except (OSError, ValueError) as error:
        raise BadScenarioError(f"--url: nothing answers at {url}: {error}") from None
    if answer.status in (401, 403):
        raise BadScenarioError(f"--service-key: the server answers {answer.status} to it")
    limit = answer.seen()["headers"].get("x-ratelimit-limit")
    found = {"unlimited"} if limit is None else {"quota"}
    return found | {name for name, asked in additions.items() if asked.status not in (404, 405)}


# ---------------------------------------------------------------- docs/conformance.md


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that users of lock libraries met, and where ours is tested."""

    group: str
    line: str
    scenarios: tuple[str, ...]
    tests: tuple[str, ...]


def read_faults(path: Path = HOME / "faults.json") -> list[Fault]:
    return [
        Fault(
            group["group"],
            fault["fault"],
            tuple(fault.get("scenarios", [])),
            tuple(fault.get("tests", [])),
        )
        for group in read_json(path)["groups"]
        for fault in group["faults"]
    ]


def page(scenarios: Sequence[Scenario], results: Sequence[Result], faults: Sequence[Fault]) -> str:
    outcome: dict[tuple[str, str], Result] = {(r.scenario, r.column): r for r in results}
    columns = sorted({r.column for r in results} - {"server"})
    reasons: dict[str, None] = {}
    lines = [
        "# Conformance",
        "",
        "Generated by `conformance report`; do not edit. Which scenario of the",
        "[suite](../conformance/README.md) which SDK passes: ✓ passes, ✗ fails, – does not apply",
        "(the reasons are below), *known* fails and is being worked on.",
        "",
    ]
    for room in dict.fromkeys(s.name.split("/")[0] for s in scenarios):
        own = [s for s in scenarios if s.name.startswith(f"{room}/")]
        shown = ["server"] if own[0].is_for_servers else columns
        lines += [f"## {room}", "", f"| scenario | rule | {' | '.join(shown)} |"]
        lines.append(f"| --- | --- |{' --- |' * len(shown)}")
        for scenario in own:
            cells = []
            for column in shown:
                result = outcome.get((scenario.name, column))
                cells.append(_MARKS[result.outcome] if result else "")
                if result and result.outcome is Outcome.SKIP:
                    reasons[f"{column}, {scenario.name}: {result.detail}"] = None
            anchor = scenario.rule.removeprefix("semantics.md#")
            link = f"[{_cell(scenario.title)}](../conformance/scenarios/{scenario.name}.json)"
            lines.append(f"| {link} | [{anchor}]({scenario.rule}) | {' | '.join(cells)} |")
        lines.append("")
    if reasons:
        lines += ["## What does not apply", "", *(f"- {reason}" for reason in reasons), ""]
    lines += _fault_lines(faults)
    return "\n".join(lines)


def _fault_lines(faults: Sequence[Fault]) -> list[str]:
    lines = [
        "## Faults that lock clients and servers really had",
        "",
        "Each was reported in public by users of other libraries, and stands for its whole kind.",
        "",
    ]
    for group in dict.fromkeys(fault.group for fault in faults):
        lines += [f"### {group}", "", "| fault | where ours is tested |", "| --- | --- |"]
        for fault in faults:
            if fault.group == group:
                where = [f"[{s}](../conformance/scenarios/{s}.json)" for s in fault.scenarios]
                where += [f"`{test}`" for test in fault.tests]
                lines.append(f"| {_cell(fault.line)} | {'<br>'.join(where)} |")
        lines.append("")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
