"""Results as lines, JUnit, JSON and the page."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from conformance import report
from conformance.report import Fault
from conformance.scenario import BadScenarioError, load_all
from conformance.suite import Outcome, Result

RESULTS = [
    Result("acquire/a_503_is_retried_once", "python", Outcome.PASS, seconds=0.5),
    Result("acquire/a_503_is_retried_once", "ruby", Outcome.FAIL, "wanted <1>\nconversation: \x00"),
    Result("release/is_bounded", "ruby", Outcome.SKIP, "ruby has no patience"),
    Result("server/a_204_has_no_body", "server", Outcome.ERROR, "the driver ended"),
    Result("renew/survives_503", "ruby", Outcome.KNOWN, "slow, issue 7"),
]


def test_the_summary_counts_and_gives_the_reasons_for_skips() -> None:
    lines = report.summary(RESULTS).splitlines()

    assert lines == [
        "  1 skipped, ruby: ruby has no patience",
        "  1 known failures",
        "2 passed, 2 failed, 1 skipped (python, ruby, server)",
    ]


def test_a_failure_is_told_at_once_and_the_rest_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet, verbose = report.teller(verbose=False), report.teller(verbose=True)

    quiet(RESULTS[0])
    assert capsys.readouterr().out == ""
    verbose(RESULTS[0])
    assert capsys.readouterr().out == "pass  python acquire/a_503_is_retried_once\n"
    quiet(RESULTS[1])
    assert "FAIL ruby acquire/a_503_is_retried_once\n  wanted <1>" in capsys.readouterr().out


def test_junit_has_a_suite_per_column_and_is_well_formed() -> None:
    root = ET.fromstring(report.junit(RESULTS))

    ruby = root.find("testsuite[@name='ruby']")
    assert ruby is not None
    counts = {name: ruby.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "0", "skipped": "2"}
    assert root.find("testsuite[@name='server']/testcase/error") is not None


def test_json_results_are_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(report.as_json(RESULTS), encoding="utf-8")

    assert sorted(report.read_results(path), key=str) == sorted(RESULTS, key=str)


def test_what_is_no_result_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"results": [{"outcome": "splendid"}]}')

    with pytest.raises(BadScenarioError, match=r"results\.json is not what"):
        report.read_results(path)


def test_the_page_has_a_row_per_scenario_and_a_column_per_sdk() -> None:
    fault = Fault("HTTP", "a | b", ("release/is_bounded",), ("sdks/x.py::test_y",))

    text = report.page(load_all(), RESULTS, [fault])

    assert "| scenario | rule | python | ruby |" in text
    (row,) = [line for line in text.splitlines() if "acquire/a_503_is_retried_once.json" in line]
    assert row.endswith("| [ambiguous-acquire](semantics.md#ambiguous-acquire) | ✓ | ✗ |")
    assert "- ruby, release/is_bounded: ruby has no patience" in text
    assert "| a \\| b | [release/is_bounded]" in text
    assert "`sdks/x.py::test_y` |" in text
