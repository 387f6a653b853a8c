"""docs/start.md, done as a reader does it: the program saved, and run in two terminals at once."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from pages import ROOT, is_printed, pages
from programs import PATIENCE, server

PAGE = "docs/start.md"
LEFT_OUT = set(os.environ.get("VOLCANO_TEST_WITHOUT", "").split())


@dataclass(frozen=True, slots=True)
class Step:
    """One language's tab: the program, the name that it is saved under, the line that runs it."""

    language: str
    source: str
    name: str
    command: str


def steps() -> list[Step]:
    """A program and the shell block after it, with the name that the page gives the program."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    names = re.findall(r"^Save this as `([^`]+)`", text, re.MULTILINE)
    blocks = pages()[PAGE].blocks
    pairs = [
        (program, command)
        for program, command in pairwise(blocks)
        if program.language in ("python", "js", "ruby")
    ]
    return [
        Step(program.language, program.code.text, name, command.code.text.strip())
        for name, (program, command) in zip(names, pairs, strict=True)
    ]


STEPS = steps()


@pytest.fixture(scope="module")
def environment() -> Iterator[Mapping[str, str]]:
    with server() as variables:
        yield variables


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like the clone after `./dev demo`, to save programs in."""
    for name in (".nox", "sdks"):
        (tmp_path / name).symlink_to(ROOT / name, target_is_directory=True)
    (tmp_path / "examples").mkdir()
    linked = ROOT / "examples" / "node_modules"
    (tmp_path / "examples" / "node_modules").symlink_to(linked, target_is_directory=True)
    return tmp_path


def started(command: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    # `exec`: what is killed below is the program, not a shell around it.
    return subprocess.Popen(
        ["sh", "-euc", f"exec {command}"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_there_is_a_step_for_each_language() -> None:
    assert ["python", "js", "ruby"] == [step.language for step in STEPS]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("step", STEPS, ids=[step.language for step in STEPS])
def test_of_two_terminals_the_second_is_told_at_once(
    step: Step, environment: Mapping[str, str], clone: Path
) -> None:
    if step.language in LEFT_OUT:
        pytest.skip(f"--without {step.language}")
    if not (ROOT / ".nox" / "environment").exists():
        pytest.skip(".nox/environment is not there; ./dev test docs makes it")
    (clone / step.name).write_text(step.source, encoding="utf-8")
    mine, elsewhere = [each.code.text for each in pages()[PAGE].blocks if each.language == "text"]

    first = started(step.command, clone, environment)
    try:
        assert first.stdout is not None
        begun = first.stdout.readline()  # it holds the lock from here on
        second = started(step.command, clone, environment)
        try:
            told, trouble = second.communicate(timeout=PATIENCE)
        finally:
            second.kill()
        is_first_at_it = first.poll() is None
        rest, first_trouble = first.communicate(timeout=PATIENCE)
    finally:
        first.kill()

    assert is_printed(elsewhere, told), trouble
    assert (0, 0) == (first.returncode, second.returncode), first_trouble + trouble
    assert is_printed(mine, begun + rest), first_trouble
    assert is_first_at_it, "the second waited for the first"
