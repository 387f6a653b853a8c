"""Sums what the sessions of one `./dev test` left in .nox/reports.

    count.py DIRECTORY EXIT_STATUS    prints "N passed, N failed, N skipped", exits 1 unless green

`sessions.json` is nox's report and names the sessions.  `<session>.xml` holds the counts of those
that count (JUnit XML of pytest, node:test, minitest and the conformance runner);
`<session>-<pass>.xml` those of a further pass over its tests, such as Ruby's over the built gem.  A
test is one case however many passes ran it, and failed if any of them did.

A session without counts is one check, passed or failed.  One that failed although all its tests
passed is one failure more, and so is a run that failed although all its sessions passed: nothing
that went wrong can come out green.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

_SET_UP = "environment"  # the session that only prepares: counted when it fails
_WORST_FIRST = ("failed", "passed", "skipped")  # a skip says only that another pass has to tell

Case = tuple[str, str, int]
"""A test: its class, its name, and the how manieth of that name it is in its file."""


def cases(path: Path) -> Iterator[tuple[Case, str]]:
    """Each test of a JUnit file, whatever its totals claim: `("Lease", "test_a", 0), "failed"`."""
    seen: Counter[tuple[str, str]] = Counter()
    for case in ET.parse(path).iter("testcase"):
        name = (case.get("classname", ""), case.get("name", ""))
        marks = {child.tag for child in case}
        failed = marks & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in marks else "passed"
        yield (*name, seen[name]), outcome
        seen[name] += 1


def count_files(paths: Iterable[Path]) -> tuple[Counter[str], bool]:
    """Each case once, by its worst outcome; and whether a file is only half written."""
    found: dict[Case, str] = {}
    broken = False
    for path in paths:
        try:
            for case, outcome in cases(path):
                found[case] = min(found.get(case, outcome), outcome, key=_WORST_FIRST.index)
        except ET.ParseError:
            broken = True  # the session died while it wrote
    return Counter(found.values()), broken


def files_of(stems: Iterable[str], directory: Path) -> dict[str, list[Path]]:
    """By session: `ruby-installed.xml` is ruby's, unless a session is called ruby-installed."""
    files: dict[str, list[Path]] = {stem: [] for stem in stems}
    for path in sorted(directory.glob("*.xml")):
        owners = [stem for stem in files if f"{path.stem}-".startswith(f"{stem}-")]
        if owners:
            files[max(owners, key=len)].append(path)
    return files


def count_session(name: str, outcome: str, files: Iterable[Path]) -> Counter[str]:
    """`outcome` is nox's word: success, skipped, failed or aborted."""
    counts, is_torn = count_files(files)
    broken = is_torn or outcome not in {"success", "skipped"}
    if counts.total() == 0:
        if name == _SET_UP and not broken:
            return counts
        return Counter({"failed" if broken else {"success": "passed"}.get(outcome, outcome): 1})
    if broken and not counts["failed"]:
        counts["failed"] += 1
    return counts


def count_run(directory: Path, exit_status: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    try:
        sessions = json.loads((directory / "sessions.json").read_text())["sessions"]
    except (OSError, ValueError):
        sessions = []  # nox never got as far as its report
        exit_status = exit_status or 1
    # The name of one with a parameter leaves it out; its signature is "conformance(js)".
    names = [session.get("signatures", [session["name"]])[0] for session in sessions]
    stems = [re.sub(r"[^a-z0-9.-]+", "-", name).strip("-") for name in names]
    files = files_of(stems, directory)
    for session, name, stem in zip(sessions, names, stems, strict=True):
        counts += count_session(name, session["result"], files[stem])
    if exit_status and not counts["failed"]:
        counts["failed"] += 1
    return counts


def main(directory: str, exit_status: str) -> int:
    counts = count_run(Path(directory), int(exit_status))
    print("{passed} passed, {failed} failed, {skipped} skipped".format_map(counts))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
