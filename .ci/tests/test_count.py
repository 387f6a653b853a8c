"""Nothing that went wrong comes out green."""

import importlib.util
import json
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("count", Path(__file__).parents[1] / "count.py")
assert _spec is not None
assert _spec.loader is not None
count = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(count)

PASS = '<testcase name="a"/>'
FAIL = '<testcase name="b"><failure/></testcase>'
ERROR = '<testcase name="c"><error/></testcase>'
SKIP = '<testcase name="d"><skipped/></testcase>'
MORE = '<testcase classname="More" name="a"/>'
BAD = '<testcase name="a"><failure/></testcase>'
SKIP_A = '<testcase name="a"><skipped/></testcase>'


def write_run(directory: Path, sessions: dict[str, str], counts: dict[str, str]) -> None:
    """`sessions`: name -> nox's word for it; `counts`: file stem -> its test cases."""
    entries = [
        {"name": name.partition("(")[0], "signatures": [name], "result": result}
        for name, result in sessions.items()
    ]
    (directory / "sessions.json").write_text(json.dumps({"sessions": entries}))
    for stem, cases in counts.items():
        suite = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        (directory / f"{stem}.xml").write_text(suite)


def summary(
    capsys: pytest.CaptureFixture[str], directory: Path, exit_status: int = 0
) -> tuple[str, int]:
    status = count.main(str(directory), str(exit_status))
    return capsys.readouterr().out, status


def test_the_counts_of_all_sessions_are_summed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = {"environment": "success", "server": "success", "conformance(js)": "success"}
    write_run(tmp_path, sessions, {"server": PASS + PASS + SKIP, "conformance-js": PASS + PASS})

    assert summary(capsys, tmp_path) == ("4 passed, 0 failed, 1 skipped\n", 0)


def test_a_session_without_counts_is_one_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"lint": "success", "ruby": "skipped"}, {})

    assert summary(capsys, tmp_path) == ("1 passed, 0 failed, 1 skipped\n", 0)


@pytest.mark.parametrize("outcome", ["failed", "aborted"])
def test_a_session_that_failed_without_counts_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str
) -> None:
    write_run(tmp_path, {"lint": "success", "server": outcome}, {})

    assert summary(capsys, tmp_path, 1) == ("1 passed, 1 failed, 0 skipped\n", 1)


def test_a_test_that_several_passes_run_is_one_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ruby's tests: against lib, with types checked, and against the built gem."""
    counts = {"ruby": PASS + PASS + SKIP, "ruby-installed": PASS + SKIP, "ruby-signatures": MORE}
    write_run(tmp_path, {"ruby": "success"}, counts)

    assert summary(capsys, tmp_path) == ("3 passed, 0 failed, 1 skipped\n", 0)


@pytest.mark.parametrize(
    ("first", "further"), [(PASS, BAD), (BAD, PASS), (BAD, BAD), (SKIP_A, BAD), (BAD, SKIP_A)]
)
def test_a_case_that_fails_in_any_pass_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: str, further: str
) -> None:
    counts = {"ruby": first + MORE, "ruby-installed": further + MORE}
    write_run(tmp_path, {"ruby": "success"}, counts)

    assert summary(capsys, tmp_path) == ("1 passed, 1 failed, 0 skipped\n", 1)


def test_a_case_that_one_pass_skips_has_passed_in_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"ruby": "success"}, {"ruby": SKIP_A, "ruby-installed": PASS})

    assert summary(capsys, tmp_path) == ("1 passed, 0 failed, 0 skipped\n", 0)


def test_cases_of_one_name_in_one_file_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"js": "success"}, {"js": PASS + PASS + PASS})

    assert summary(capsys, tmp_path) == ("3 passed, 0 failed, 0 skipped\n", 0)


def test_what_another_session_left_is_counted_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = {"js": "success", "js-types": "success"}
    write_run(
        tmp_path, sessions, {"js": PASS * 2, "js-types": PASS * 2, "js-types-strict": PASS + MORE}
    )

    assert summary(capsys, tmp_path) == ("5 passed, 0 failed, 0 skipped\n", 0)


def test_half_a_report_of_a_further_pass_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"ruby": "success"}, {"ruby": PASS})
    (tmp_path / "ruby-installed.xml").write_text("<testsuites><testcase")

    assert summary(capsys, tmp_path) == ("1 passed, 1 failed, 0 skipped\n", 1)


def test_failures_and_errors_count_once_each_and_their_session_not_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"server": "failed"}, {"server": PASS + FAIL + ERROR})

    assert summary(capsys, tmp_path, 1) == ("1 passed, 2 failed, 0 skipped\n", 1)


def test_a_session_that_failed_although_its_tests_passed_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coverage gate, or a crash after the last test."""
    write_run(tmp_path, {"server": "failed"}, {"server": PASS})

    assert summary(capsys, tmp_path, 1) == ("1 passed, 1 failed, 0 skipped\n", 1)


def test_a_failed_test_is_a_failure_even_where_the_session_says_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"js": "success"}, {"js": PASS + FAIL})

    assert summary(capsys, tmp_path) == ("1 passed, 1 failed, 0 skipped\n", 1)


def test_half_a_report_of_a_session_that_died_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"js": "failed"}, {})
    (tmp_path / "js.xml").write_text("<testsuites><testcase")

    assert summary(capsys, tmp_path, 1) == ("0 passed, 1 failed, 0 skipped\n", 1)


def test_an_environment_that_could_not_be_made_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"environment": "failed", "server": "aborted"}, {})

    assert summary(capsys, tmp_path, 1) == ("0 passed, 2 failed, 0 skipped\n", 1)


@pytest.mark.parametrize("exit_status", [0, 1, 130])
def test_a_run_that_left_no_report_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exit_status: int
) -> None:
    assert summary(capsys, tmp_path, exit_status) == ("0 passed, 1 failed, 0 skipped\n", 1)


def test_a_run_that_failed_although_its_sessions_passed_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"lint": "success"}, {})

    assert summary(capsys, tmp_path, 1) == ("1 passed, 1 failed, 0 skipped\n", 1)


def test_a_run_in_which_nothing_passed_is_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, {"ruby": "skipped"}, {})

    assert summary(capsys, tmp_path) == ("0 passed, 0 failed, 1 skipped\n", 1)
