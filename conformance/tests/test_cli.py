"""The command: what it says to a mistake, and how it ends."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from conformance.cli import main
from conformance.reference import ReferenceServer


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--scenario", "nothing/*"], "no scenario is called nothing/*"),
        (["run", "--sdk", "cobol"], "--sdk: there is no cobol; there are"),
        (
            ["server", "--url", "http://127.0.0.1:9", "--service-key", "sk-x"],
            "--url: nothing answers at http://127.0.0.1:9",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_a_status(arguments: list[str], said: str) -> None:
    result = invoked(*arguments)

    assert result.exit_code == 65
    assert result.output.startswith("conformance: ")
    assert said in result.output
    assert len(result.output.splitlines()) == 1


def test_lint_is_content_with_the_suite() -> None:
    result = invoked("lint")

    assert (result.exit_code, result.output) == (0, "the suite is in order\n")


def test_the_server_scenarios_run_against_a_url(tmp_path: Path) -> None:
    server = ReferenceServer()
    files = ["--junit", str(tmp_path / "out.xml"), "--json", str(tmp_path / "out.json")]
    try:
        with server.stage(limited=False) as target:
            result = invoked(
                "server",
                *["--url", target.base_url],
                *["--service-key", str(target.credentials["valid"])],
                *["--scenario", "server/a_free_key*", "--scenario", "server/over_the_quota"],
                *files,
            )
    finally:
        server.close()

    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "2 passed, 0 failed, 1 skipped (server)"
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {row["outcome"] for row in rows} == {"pass", "skip"}
    assert (tmp_path / "out.xml").read_text().startswith("<?xml")


def test_a_wrong_service_key_is_told_at_once() -> None:
    server = ReferenceServer()
    try:
        with server.stage(limited=False) as target:
            result = invoked("server", "--url", target.base_url, "--service-key", "sk-wrong")
    finally:
        server.close()

    assert result.exit_code == 65
    assert "--service-key: the server answers 401" in result.output
    assert "sk-wrong" not in result.output


def test_a_failing_scenario_is_a_status_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volcano_server.lease.GRACE", 0)

    result = invoked("run", "--sdk", "server", "--scenario", "nobody_can_take_a_key_in_its_grace")

    assert result.exit_code == 1
    assert "FAIL server server/nobody_can_take_a_key_in_its_grace" in result.output
