"""`conformance run | server | lint | report`: what is asked for on the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from conformance import HOME, discovery, lint, report, suite
from conformance.discovery import Column, find_sdks
from conformance.play import Mode
from conformance.reference import ReferenceServer
from conformance.scenario import SHARED_CAPABILITIES, BadScenarioError, Scenario, chosen, load_all
from conformance.suite import Plan, RemoteServer, Result

CALLERS_AT_ONCE = 24
"""Server scenarios that are played side by side in real time: they mostly sleep."""

SDKS_AT_ONCE = 6
"""Scenarios with SDKs: a machine that starts more processes at once makes short leases lapse."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="volcano-conformance", prog_name="conformance")
def main() -> None:
    """One suite that every Volcano lock SDK and any lock server must pass."""


_scenario_option = click.option(
    "--scenario", "globs", multiple=True, metavar="GLOB", help="Only these, e.g. 'renew/*'."
)
_junit_option = click.option("--junit", type=click.Path(path_type=Path), help="JUnit XML file.")
_json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="JSON results."
)
_patience_option = click.option(
    "--patience", default=5.0, show_default=True, help="Seconds that turn a hang into a failure."
)
_verbose_option = click.option("-v", "--verbose", is_flag=True, help="A line per scenario.")


@main.command()
@click.option("--sdk", "sdks", multiple=True, metavar="NAME", help="Columns or languages.")
@_scenario_option
@click.option("--mode", type=click.Choice([m.value for m in Mode]), default=Mode.VIRTUAL.value)
@click.option("--workers", type=int, help="Scenarios side by side.")
@_patience_option
@_junit_option
@_json_option
@_verbose_option
def run(
    sdks: Sequence[str],
    globs: Sequence[str],
    mode: str,
    workers: int | None,
    patience: float,
    junit: Path | None,
    json_file: Path | None,
    verbose: bool,  # noqa: FBT001 - click passes flags so
) -> None:
    """Play the scenarios with the SDKs and with the reference server.

    Real mode plays those that are marked for it, in real time, over `volcano-server dev`.
    """
    with _user_mistakes():
        scenarios = _chosen(globs)
        if mode == Mode.REAL.value and not globs:
            scenarios = [scenario for scenario in scenarios if scenario.real]
        columns, skipped = _columns(sdks)
        for_sdks = [s for s in scenarios if not s.is_for_servers]
        pairs: list[tuple[Scenario, Column | None]] = [(s, c) for c in columns for s in for_sdks]
        if not sdks or "server" in sdks:
            pairs += [(s, None) for s in scenarios if s.is_for_servers]
        with _server(Mode(mode)) as make_server:
            plan = Plan(
                make_server,
                Mode(mode),
                workers or (SDKS_AT_ONCE if mode == Mode.REAL.value else (os.cpu_count() or 2) + 1),
                patience,
            )
            results = suite.run(pairs, plan, report.teller(verbose=verbose))
    _finish(results, skipped, junit, json_file)


@main.command()
@click.option("--url", required=True, help="Where the server is, e.g. http://127.0.0.1:8790")
@click.option("--service-key", required=True, help="Of a project that may lose all its locks.")
@click.option("--anon-key", help="Of the same project.")
@click.option("--other-service-key", help="Of another project.")
@click.option("--revoked-key", help="A service key that was revoked.")
@_scenario_option
@click.option("--patience", default=5.0, hidden=True)
@_junit_option
@_json_option
@_verbose_option
def server(  # noqa: PLR0913, PLR0917 - one argument per option
    url: str,
    service_key: str,
    anon_key: str | None,
    other_service_key: str | None,
    revoked_key: str | None,
    globs: Sequence[str],
    patience: float,
    junit: Path | None,
    json_file: Path | None,
    verbose: bool,  # noqa: FBT001 - click passes flags so
) -> None:
    """Play the server scenarios against any server, in real time.

    What needs more than the server offers is skipped, with the reason.
    """
    given = {
        "valid": service_key,
        "anon": anon_key,
        "other_project": other_service_key,
        "revoked": revoked_key,
    }
    credentials = {kind: key for kind, key in given.items() if key}
    with _user_mistakes():
        scenarios = [scenario for scenario in _chosen(globs) if scenario.is_for_servers]
        capabilities = report.probe(url, service_key)
        plan = Plan(
            lambda: RemoteServer(url, dict(credentials), capabilities),
            Mode.REAL,
            CALLERS_AT_ONCE,
            patience,
        )
        results = suite.run([(s, None) for s in scenarios], plan, report.teller(verbose=verbose))
    _finish(results, [], junit, json_file)


@main.command("lint")
def lint_command() -> None:
    """Check the scenarios, the tables and the lists: forms, names, anchors, coverage."""
    with _user_mistakes():
        complaints = lint.complaints()
    for complaint in complaints:
        click.echo(complaint)
    if complaints:
        _stop(f"{len(complaints)} complaints", 1)
    click.echo("the suite is in order")


@main.command("report")
@click.option(
    "--results",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="From run --json; may be given for each of several runs.",
)
@click.option("--check", is_flag=True, help="Only say whether docs/conformance.md is current.")
def report_command(results: Sequence[Path], check: bool) -> None:  # noqa: FBT001 - click passes flags so
    """Write docs/conformance.md: which SDK passes what, and where each known fault is tested."""
    with _user_mistakes():
        played = [each for path in results for each in report.read_results(path)] or _play_all()
        text = report.page(load_all(), played, report.read_faults())
    path = HOME.parent / "docs" / "conformance.md"
    if not check:
        path.write_text(text, encoding="utf-8")
        click.echo(f"{len(played)} results written to docs/conformance.md")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        _stop("docs/conformance.md is not current: run `conformance report`", 1)


def _play_all() -> list[Result]:
    columns, _ = _columns([])
    scenarios = load_all()
    pairs: list[tuple[Scenario, Column | None]] = [
        (s, c) for c in columns for s in scenarios if not s.is_for_servers
    ]
    pairs += [(s, None) for s in scenarios if s.is_for_servers]
    return suite.run(pairs, Plan(ReferenceServer, workers=(os.cpu_count() or 2) + 1))


def _chosen(globs: Sequence[str]) -> list[Scenario]:
    scenarios = chosen(load_all(), globs)
    if not scenarios:
        raise BadScenarioError(f"no scenario is called {' or '.join(globs)}")
    return scenarios


def _columns(names: Sequence[str]) -> tuple[list[Column], list[str]]:
    """The columns to be played, and a sentence for each that cannot be."""
    columns: list[Column] = []
    skipped: list[str] = []
    known = {"server"}
    for sdk in find_sdks():
        known |= {sdk.language, *(column.name for column in sdk.columns)}
        wanted = [c for c in sdk.columns if not names or c.name in names or sdk.language in names]
        if wanted and sdk.missing:
            skipped.append(f"{sdk.language}: skipped, {', '.join(sdk.missing)} is not on PATH")
        elif wanted:
            sdk.prepare()
            columns += wanted
    unknown = set(names) - known
    if unknown:
        raise BadScenarioError(
            f"--sdk: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    return columns, skipped


@contextmanager
def _server(mode: Mode) -> Iterator[Any]:
    """Makes the server that is played against: in this process, or the real program."""
    if mode is Mode.VIRTUAL:
        yield ReferenceServer
        return
    program = [sys.executable, "-m", "volcano_server", "dev"]
    process = subprocess.Popen(  # noqa: S603 - our own server
        [*program, "--json", "--port", "0", "--ephemeral", "--quota", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline() or "{}")
        if "url" not in ready:
            raise BadScenarioError("`volcano-server dev` did not start: see above")
        credentials = {"valid": ready["service_key"], "anon": ready["anon_key"]}
        yield lambda: RemoteServer(
            ready["url"], dict(credentials), ["unlimited", *SHARED_CAPABILITIES]
        )
    finally:
        process.terminate()
        process.wait(20)


def _finish(
    results: list[Result], skipped: list[str], junit: Path | None, json_file: Path | None
) -> None:
    if junit:
        junit.write_text(report.junit(results), encoding="utf-8")
    if json_file:
        json_file.write_text(report.as_json(results), encoding="utf-8")
    for sentence in skipped:
        click.echo(sentence)
    click.echo(report.summary(results))
    if not results or not all(result.outcome.is_good for result in results):
        sys.exit(1)


@contextmanager
def _user_mistakes() -> Iterator[None]:
    try:
        yield
    except BadScenarioError as error:
        _stop(str(error), 65)  # EX_DATAERR


def _stop(sentence: str, status: int) -> NoReturn:
    click.echo(f"conformance: {sentence}", err=True)
    sys.exit(status)


__all__ = ["discovery", "main"]
