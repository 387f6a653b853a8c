"""`./dev bench`: what is printed, what is kept, and the exit status."""

import importlib.util
from pathlib import Path

import pytest
from measures import report
from measures.rig import Bar, Figure, MissingError, Plan, Result

_spec = importlib.util.spec_from_file_location("bench", Path(__file__).parents[1] / "__main__.py")
assert _spec is not None
assert _spec.loader is not None
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)


def test_the_page_is_what_the_results_say() -> None:
    """`./dev bench page` makes it so."""
    text, pictures = report.page(report.saved(bench.MEASURES))

    assert f"{report._BEGIN}\n{text}\n{report._END}" in report.PAGE.read_text()
    assert pictures == {path.name: path.read_text() for path in report.PICTURES.iterdir()}


def good(_: Plan) -> Result:
    """A bar that is met."""
    return Result([Figure("speed", [3, 1, 2], "m/s")], [Bar("fast", Figure("", [2, 1, 3]), 2)])


def bad(_: Plan) -> Result:
    """A bar that is missed, by more than a quick run forgives."""
    return Result(bars=[Bar("slow", Figure("", [31]), 10, is_ceiling=True)])


def broken(_: Plan) -> Result:
    """A measure that does not work."""
    raise RuntimeError("the load was refused")


def missing(_: Plan) -> Result:
    """A peer that is not here."""
    raise MissingError("etcd (apt-get install etcd-server)")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where results go instead; with a page that has the marks."""
    measures = {"good": good, "bad": bad, "broken": broken, "missing": missing}
    monkeypatch.setattr(bench, "MEASURES", measures)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PICTURES", tmp_path / "pictures" / "measured")
    monkeypatch.setattr(report, "PAGE", tmp_path / "page")
    report.PAGE.write_text(f"before\n{report._BEGIN}\nold\n{report._END}\nafter\n")
    return tmp_path


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    return int(bench.main())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["good"], 0),
        (["bad"], 0),
        (["broken"], 1),
        (["missing"], 0),
        (["check", "good", "missing"], 0),
        (["check", "bad", "good"], 3),
        (["check", "broken", "bad"], 1),
        (["check", "--quick", "good"], 0),
        (["check", "--quick", "bad"], 3),
        (["check", "--quick"], 1),
    ],
)
def test_the_status_tells_met_from_missed_from_broken(
    kept: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: int
) -> None:
    assert expected == status(monkeypatch, *arguments)


def test_a_broken_measure_does_not_keep_the_others_from_running(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status(monkeypatch, "--quick", "broken", "missing", "good")

    said = capsys.readouterr().out
    assert "broken: FAILED: RuntimeError('the load was refused')" in said
    assert "missing: skipped, because there is no etcd" in said
    assert "fast" in said


def test_a_quick_run_keeps_nothing(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    status(monkeypatch, "--quick", "good")

    assert ["page"] == [path.name for path in kept.iterdir()]
    assert "old" in report.PAGE.read_text()


def test_a_run_keeps_its_results_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    status(monkeypatch, "good")

    page = report.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "| fast | 2 (1 – 3) | ≥ 2 | met |" in page
    assert "| speed | 2 (1 – 3) m/s |" in page
    assert (kept / "good.json").exists()
    assert (kept / "pictures" / "measured" / "bars.svg").exists()


def test_the_page_is_written_anew_from_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    status(monkeypatch, "good")
    written = report.PAGE.read_text()
    report.PAGE.write_text(written.replace("| fast |", "| fist |"))

    assert 0 == status(monkeypatch, "page")

    assert written == report.PAGE.read_text()


def test_a_name_that_is_no_measure_is_refused(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        status(monkeypatch, "check", "bogus")


@pytest.mark.parametrize(
    ("median", "bar", "is_ceiling", "quick", "is_met"),
    [
        (2.0, 2.0, True, False, True),
        (2.1, 2.0, True, False, False),
        (6.0, 2.0, True, True, True),
        (6.1, 2.0, True, True, False),
        (2.0, 2.0, False, False, True),
        (1.9, 2.0, False, False, False),
        (0.7, 2.0, False, True, True),
        (0.6, 2.0, False, True, False),
    ],
)
def test_a_quick_run_forgives_a_factor_of_three(
    median: float, bar: float, is_ceiling: bool, quick: bool, is_met: bool
) -> None:
    row = Bar("", Figure("", [median]), bar, is_ceiling=is_ceiling).row()

    assert is_met == report.is_met(row, quick=quick)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (14_324.2, "14,324"), (100, "100"), (99.96, "100"), (80.04, "80"), (80, "80"),
        (49.57, "49.6"), (0.7105, "0.711"), (0.5, "0.5"), (1, "1"), (0.0012, "0.0012"), (0, "0"),
    ],
)  # fmt: skip
def test_a_number_has_three_digits_that_say_something(value: float, text: str) -> None:
    assert text == report._number(value)
