"""Which SDKs there are: every `sdks/*/conformance/driver.json` (protocol.md#driverjson)."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance import HOME
from conformance.driver import Driver, validator
from conformance.scenario import BadScenarioError, read_json

ROOT = HOME.parent


@dataclass(frozen=True, slots=True)
class Column:
    """One driver of one SDK: a column of the matrix."""

    name: str
    language: str
    argv: tuple[str, ...]
    cwd: Path
    environment: dict[str, str] = field(default_factory=dict)
    known_failures: dict[str, str] = field(default_factory=dict)  # {"renew/late": "why, link"}

    def start(self, patience: float) -> Driver:
        return Driver(self.argv, self.cwd, self.environment, patience)


@dataclass(frozen=True, slots=True)
class Sdk:
    language: str
    missing: tuple[str, ...]  # programs that are needed and not on PATH
    build: tuple[tuple[str, ...], ...]
    cwd: Path
    columns: tuple[Column, ...]

    def prepare(self) -> None:
        """Runs its build commands.  Raises BadScenarioError with what one of them said."""
        for argv in self.build:
            done = subprocess.run(  # noqa: S603 - the SDK's own build, from its driver.json
                argv, cwd=self.cwd, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                said = (done.stdout + done.stderr).strip()
                raise BadScenarioError(f"{self.language}: {' '.join(argv)} failed:\n{said}")


def find_sdks(root: Path = ROOT) -> list[Sdk]:
    return [read_sdk(path, root) for path in sorted(root.glob("sdks/*/conformance/driver.json"))]


def read_sdk(path: Path, root: Path = ROOT) -> Sdk:
    data = read_json(path)
    for error in validator("protocol.schema.json", "driver_json").iter_errors(data):
        raise BadScenarioError(f"{path}: {error.message}")
    here = path.parent

    def fill(argv: Sequence[str]) -> tuple[str, ...]:
        places = {"{python}": sys.executable, "{here}": str(here), "{root}": str(root)}
        return tuple(
            re.sub(r"\{(python|here|root)\}", lambda m: places[m[0]], word) for word in argv
        )

    cwd = (here / data.get("cwd", ".")).resolve()
    environment = {name: fill([value])[0] for name, value in data.get("environment", {}).items()}
    names = [column["name"] for column in data["columns"]]
    known = _known_failures(here / "known_failures.txt", names)
    return Sdk(
        language=data["language"],
        missing=tuple(name for name in data.get("needs", []) if shutil.which(name) is None),
        build=tuple(fill(argv) for argv in data.get("build", [])),
        cwd=cwd,
        columns=tuple(
            Column(
                name=column["name"],
                language=data["language"],
                argv=fill(column["argv"]),
                cwd=cwd,
                environment=environment,
                known_failures=known[column["name"]],
            )
            for column in data["columns"]
        ),
    )


_KNOWN = re.compile(r"(?P<name>[a-z0-9_/]+)(?:\s+\[(?P<column>[a-z0-9-]+)\])?\s+#\s*(?P<why>\S.*)")


def _known_failures(path: Path, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    known: dict[str, dict[str, str]] = {column: {} for column in columns}
    if not path.exists():
        return known
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match = _KNOWN.fullmatch(line.strip())
        if match is None or (match["column"] or columns[0]) not in known:
            raise BadScenarioError(
                f"{path}:{number}: {line!r} is not of the form `scenario [column]  # why, link`"
            )
        for column in [match["column"]] if match["column"] else columns:
            known[column][match["name"]] = match["why"]
    return known
