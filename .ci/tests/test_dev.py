"""What `./dev` says to somebody who has made no environment yet."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone that has nothing but `dev` and the examples, on a machine without a Python."""
    shutil.copy(ROOT / "dev", tmp_path)
    ignored = shutil.ignore_patterns("node_modules", "__pycache__")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=ignored)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "sed", "dirname", "cat"):
        (tools / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def dev(clone: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [clone / "dev", *arguments],
        env={"PATH": str(clone / "tools")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_examples_are_listed_without_any_set_up(clone: Path, arguments: list[str]) -> None:
    done = dev(clone, "example", *arguments)

    assert (0, "") == (done.returncode, done.stderr)
    for script in (ROOT / "examples").glob("*/show.sh"):
        title = (script.parent / "README.md").read_text().partition("\n")[0].removeprefix("# ")
        assert f"    {script.parent.name} " in done.stdout
        assert title in done.stdout


@pytest.mark.parametrize("name", ["bogus", "../examples/backlog", ".", "", "tests"])
def test_an_example_that_is_not_there_is_named_beside_those_that_are(
    clone: Path, name: str
) -> None:
    done = dev(clone, "example", name)

    assert 64 == done.returncode
    assert f"dev: there is no example {name}\n" in done.stderr
    assert "    backlog " in done.stderr


def test_a_first_run_without_a_network_says_that_it_needs_one(clone: Path) -> None:
    """Here the set-up fails because pip does; whatever pip has said stands above."""
    (clone / "requirements").mkdir()
    (clone / "requirements" / "nox.txt").touch()
    (clone / ".venv" / "bin").mkdir(parents=True)
    python = clone / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\n[ "${2:-}" != pip ] || { echo "no route" >&2; exit 1; }\n')
    python.chmod(0o755)
    for name in ("cksum", "id"):
        (clone / "tools" / name).symlink_to(shutil.which(name) or name)

    done = dev(clone, "example", "backlog")

    assert 69 == done.returncode
    assert done.stderr.startswith("no route\ndev: nox could not be installed. ")
    assert "needs a network" in done.stderr


def test_a_session_that_is_not_there_leads_to_those_that_are(clone: Path) -> None:
    (clone / "requirements").mkdir()
    (clone / "requirements" / "nox.txt").touch()
    tools = clone / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, script in {
        "python": "exit 0",
        "nox": "exit 3",
        "../../tools/cksum": "echo 1",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    for name in ("rm", "mkdir"):
        (clone / "tools" / name).symlink_to(shutil.which(name) or name)
    (clone / ".venv" / "nox.stamp").write_text("1\n")

    done = dev(clone, "test", "bogus")

    assert (3, "dev: ./dev list names the sessions\n") == (done.returncode, done.stderr)
