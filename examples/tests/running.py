"""Runs the example programs: as their READMEs say, or one by one beside a server with a clock."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from volcano_server.testing import VolcanoServer

EXAMPLES = Path(__file__).resolve().parents[1]
PATIENCE = 25.0
"""Seconds that we wait for something to happen.  Bounds, not durations."""

_LANGUAGES = {"*.mjs": "js", "*.rb": "ruby"}
_COMMANDS = {"js": ["node"], "ruby": ["ruby", "-w"], "python": [sys.executable, "-W", "error"]}


def languages(name: str) -> set[str]:
    """What an example needs beside Python."""
    return {each for glob, each in _LANGUAGES.items() if any((EXAMPLES / name).glob(glob))}


def need(name: str) -> None:
    """Skips when a language that the example needs was left out."""
    left_out = set(os.environ.get("VOLCANO_TEST_WITHOUT", "").split())
    for language in sorted(languages(name) & left_out):
        pytest.skip(f"--without {language}")


def show(name: str) -> list[str]:
    """The lines that `./dev example NAME` prints, after its set-up.  Fails on any complaint."""
    with showing(name) as lines:
        return lines()


@contextmanager
def showing(name: str) -> Iterator[Callable[[], list[str]]]:
    """Begins a show, and gives what waits for its lines: a long one can run beside other tests."""
    need(name)
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "run.py"), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def lines() -> list[str]:
        printed, complaints = process.communicate(timeout=80)
        shown = f"{name}\n{printed}\n{complaints}"
        assert (0, "") == (process.returncode, complaints), shown
        return printed.splitlines()

    try:
        yield lines
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # run.py ends what it has started
            process.communicate()


@contextmanager
def started(
    server: VolcanoServer, name: str, program: str, *arguments: object, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A program of an example as a process whose output can be read.  Killed at the end."""
    need(name)
    language = {"mjs": "js", "rb": "ruby", "py": "python"}[program.rpartition(".")[2]]
    environment = {
        "VOLCANO_API_URL": server.url,
        "VOLCANO_SERVICE_KEY": server.service_key,
        "RUBYLIB": str(EXAMPLES.parent / "sdks" / "ruby" / "lib"),
    }
    executable, *options = _COMMANDS[language]
    process = subprocess.Popen(
        [shutil.which(executable) or executable, *options, program, *map(str, arguments)],
        cwd=EXAMPLES / name,
        env={**os.environ, **environment, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended, with all that it had started
        process.communicate()


def until(happened: Callable[[], object]) -> None:
    """Waits for a condition, with patience."""
    given_up_at = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < given_up_at, "it did not happen"
        time.sleep(0.02)


def line_with(process: "subprocess.Popen[str]", text: str) -> str:
    """The next line of the output that has `text` in it."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line.strip()
    process.wait()
    assert process.stderr is not None
    raise AssertionError(f"ended without {text!r}: {process.stderr.read()}")


def requests(server: VolcanoServer, operation: str, outcome: str = "") -> int:
    """How many lock requests of an operation the server has answered, so or in any way.

    "events" counts the streams that were opened: as often has somebody begun to listen.
    """
    name = f'volcano_lock_requests_total{{operation="{operation}",outcome="{outcome}'
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(name))


def load(name: str, program: str) -> ModuleType:
    """A Python program of an example as a module."""
    path = EXAMPLES / name / f"{program}.py"
    spec = importlib.util.spec_from_file_location(f"{name}.{program}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(lines: Sequence[str], text: str) -> int:
    return sum(text in line for line in lines)
