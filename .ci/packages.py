"""Looks into the built packages: packages.py DIRECTORY ROOM...

Each must exist as one sdist and one wheel; the wheel must hold the licence and every file under
the room's src that git does not ignore, and nothing else.
"""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path


def faults(directory: Path, room: Path) -> list[str]:
    """Sentences about what is wrong with one package; none when it is right."""
    project = tomllib.loads((room / "pyproject.toml").read_text())["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    wheel, sdist = directory / f"{stem}-py3-none-any.whl", directory / f"{stem}.tar.gz"
    missing = [f"{path.name} was not built" for path in (wheel, sdist) if not path.exists()]
    if missing:
        return missing
    sources = {path.removeprefix("src/") for path in sources_of(room, "src")}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.removeprefix(f"{stem}/") for name in archive.getnames()}
    licence = f"{stem}.dist-info/licenses/LICENSE"
    found = [f"{wheel.name} lacks {name}" for name in sorted({*sources, licence} - in_wheel)]
    strangers = {name for name in in_wheel if not name.startswith(f"{stem}.dist-info/")} - sources
    found += [f"{wheel.name} holds {name}, which is no source" for name in sorted(strangers)]
    needed = {f"src/{name}" for name in sources} | {"LICENSE", "README.md", "CHANGELOG.md"}
    found += [f"{sdist.name} lacks {name}" for name in sorted(needed - in_sdist)]
    if not any(name.endswith("/py.typed") for name in sources):
        found.append(f"{room} has no py.typed")
    if (room / "LICENSE").read_bytes() != Path("LICENSE").read_bytes():
        found.append(f"{room}/LICENSE differs from the repository's")
    return found


def sources_of(room: Path, below: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", below]
    listing = subprocess.run(command, cwd=room, capture_output=True, text=True, check=True)
    return listing.stdout.splitlines()


def main(directory: str, *rooms: str) -> int:
    found = [fault for room in rooms for fault in faults(Path(directory), Path(room))]
    for fault in found:
        print(fault, file=sys.stderr)
    if not found:
        print(f"{len(rooms)} packages, each as wheel and sdist, hold what they should")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
