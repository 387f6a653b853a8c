"""Runs a page's programs: each in a process and an empty folder of its own, beside one server."""

import json
import os
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from pages import ROOT, Program

JS = ROOT / "sdks" / "js"
RUBY = ROOT / "sdks" / "ruby"
PATIENCE = 40.0
"""Seconds that a program may take."""


class MissingError(Exception):
    """What a program needs is not here.  The text says what."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.  `trouble` is what it wrote to stderr."""

    status: int
    printed: str
    trouble: str


@contextmanager
def server() -> Iterator[Mapping[str, str]]:
    """`volcano-server dev`, as the environment that its banner asks for."""
    command = [sys.executable, "-m", "volcano_server", "dev", "--ephemeral", "--port", "0"]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        assert ready, f"the server said nothing for {PATIENCE} s"
        facts = json.loads(process.stdout.readline())
        names = {"API_URL": "url", "SERVICE_KEY": "service_key", "ANON_KEY": "anon_key"}
        yield {f"VOLCANO_{name}": facts[fact] for name, fact in names.items()}
    finally:
        process.terminate()
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


def empty(environment: Mapping[str, str]) -> None:
    """Free all locks of the server."""
    request = Request(environment["VOLCANO_API_URL"] + "/_test/reset", method="POST")
    request.add_header("Authorization", f"Bearer {environment['VOLCANO_SERVICE_KEY']}")
    with urlopen(request, timeout=PATIENCE):
        pass


def run(program: Program, folder: Path, environment: Mapping[str, str]) -> Ended:
    """Raises MissingError where this machine cannot."""
    if program.language == "sql":
        return _run_sql(program.source)
    file = folder / f"{Path(program.page).stem}.{_ENDINGS[program.language]}"
    file.write_text(program.source, encoding="utf-8")
    return _run(_command(program.language, file), folder, environment)


_ENDINGS = {"python": "py", "js": "mjs", "ts": "mts", "ruby": "rb", "sh": "sh"}


def _command(language: str, file: Path) -> list[str]:
    match language:
        case "python":
            # A block of tests is run as its reader runs it.
            source = file.read_text(encoding="utf-8")
            is_test = re.search(r"^(async )?def test_", source, re.MULTILINE)
            runner = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if is_test else []
            return [sys.executable, "-W", "error", *runner, str(file)]
        case "sh":
            return ["sh", "-eu", str(file)]
        case "ruby":
            return [_found("ruby"), "-w", "-I", str(_written(RUBY / "lib")), str(file)]
        case "js":
            _link_sdk(file.parent)
            return [_found("node"), str(file)]
        case _:  # ts
            _link_sdk(file.parent)
            return ["sh", "-eu", "-c", _TYPESCRIPT, "sh", str(_written(_TSC)), str(file)]


_TSC = JS / "node_modules" / ".bin" / "tsc"
_TYPESCRIPT = """
"$1" --strict --target es2022 --module nodenext --skipLibCheck --types node "$2"
node "${2%.mts}.mjs"
"""


def _link_sdk(folder: Path) -> None:
    _written(JS / "build" / "index.mjs")
    modules = folder / "node_modules"
    (modules / "@volcano.dev").mkdir(parents=True)
    (modules / "@volcano.dev" / "sdk").symlink_to(JS, target_is_directory=True)
    (modules / "@types").symlink_to(JS / "node_modules" / "@types", target_is_directory=True)


def _found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise MissingError(f"{name} is not on PATH")
    return path


def _written(path: Path) -> Path:
    if not path.exists():
        raise MissingError(f"{path.relative_to(ROOT)} is not there; ./dev test docs makes it")
    return path


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> Ended:
    """In a session of its own, so that nothing that the program started outlives it."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={"PATH": tools, "HOME": str(folder), "LANG": "C.UTF-8", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, trouble = process.communicate(timeout=PATIENCE)
        return Ended(process.returncode, printed, trouble)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, trouble = process.communicate()
        return Ended(124, printed, f"{trouble}\nnot over after {PATIENCE} s")
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing is left of it


def _run_sql(source: str) -> Ended:
    """In SQLite.  Prints rows as the sqlite3 shell does: `1|sent|7`."""
    rows: list[str] = []
    statement = ""
    database = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for number, line in enumerate(source.splitlines(), 1):
            statement += line + "\n"
            if not sqlite3.complete_statement(statement):
                continue
            try:
                found = database.execute(statement).fetchall()
            except sqlite3.Error as error:
                return Ended(1, "\n".join(rows), f"line {number}: {error}")
            rows += ["|".join("" if each is None else str(each) for each in row) for row in found]
            statement = ""
    finally:
        database.close()
    rest = f"no ; at the end of: {statement.strip()}" if statement.strip() else ""
    return Ended(1 if rest else 0, "\n".join(rows), rest)
