"""driver.json and known_failures.txt."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.discovery import find_sdks, read_sdk
from conformance.scenario import BadScenarioError


def written(root: Path, **changes: Any) -> Path:
    data = {
        "language": "elixir",
        "cwd": "..",
        "environment": {"HOME_OF_IT": "{root}/x"},
        "columns": [
            {"name": "elixir", "argv": ["{python}", "{here}/driver.exs"]},
            {"name": "elixir-async", "argv": ["elixir", "a{b}c"]},
        ],
        **changes,
    }
    path = root / "sdks" / "elixir" / "conformance" / "driver.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    return path


def test_a_new_language_is_found_by_its_file(tmp_path: Path) -> None:
    path = written(tmp_path)

    (sdk,) = find_sdks(tmp_path)

    first, second = sdk.columns
    assert first.argv == (sys.executable, f"{path.parent}/driver.exs")
    assert second.argv == ("elixir", "a{b}c")
    assert first.cwd == tmp_path / "sdks" / "elixir"
    assert first.environment == {"HOME_OF_IT": f"{tmp_path}/x"}
    assert sdk.missing == ()


def test_programs_that_are_not_there_are_named(tmp_path: Path) -> None:
    sdk = read_sdk(written(tmp_path, needs=["sh", "no-such-program"]), tmp_path)

    assert sdk.missing == ("no-such-program",)


def test_a_build_that_fails_says_what_it_said(tmp_path: Path) -> None:
    sdk = read_sdk(written(tmp_path, build=[["sh", "-c", "echo oh no; exit 1"]]), tmp_path)

    with pytest.raises(BadScenarioError, match="oh no"):
        sdk.prepare()


@pytest.mark.parametrize("changes", [{"columns": []}, {"language": 7}, {"surprise": 1}])
def test_a_wrong_file_is_refused(tmp_path: Path, changes: Any) -> None:
    with pytest.raises(BadScenarioError, match=r"driver\.json"):
        read_sdk(written(tmp_path, **changes), tmp_path)


def test_known_failures_are_of_all_columns_or_of_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    (path.parent / "known_failures.txt").write_text(
        "renew/survives_503  # slow, issue 7\n\nrelease/is_bounded [elixir-async]  # issue 8\n"
    )

    first, second = read_sdk(path, tmp_path).columns

    assert first.known_failures == {"renew/survives_503": "slow, issue 7"}
    assert second.known_failures["release/is_bounded"] == "issue 8"


@pytest.mark.parametrize("line", ["renew/x", "renew/x #", "renew/x [other]  # why", "# why"])
def test_a_known_failure_needs_a_reason_and_a_column_that_is_there(
    tmp_path: Path, line: str
) -> None:
    path = written(tmp_path)
    (path.parent / "known_failures.txt").write_text(line + "\n")

    with pytest.raises(BadScenarioError, match=r"known_failures\.txt:1"):
        read_sdk(path, tmp_path)
