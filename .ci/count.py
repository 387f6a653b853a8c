"""Sums what the sessions of one `./dev test` left in .nox/reports.

    count.py DIRECTORY EXIT_STATUS    prints "N passed, N failed, N skipped", exits 1 unless green

`sessions.json` is nox's report and names the sessions; `<session>.xml` holds the counts of those
that count (JUnit XML of pytest, node:test, minitest and the conformance runner).  A session without
counts is one check, passed or failed.  One that failed although all its tests passed is one failure
more, and so is a run that failed although all its sessions passed: nothing that went wrong can come
out green.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

_SET_UP = "environment"  # the session that only prepares: counted when it fails


def count_file(path: Path) -> Counter[str]:
    """`{"passed": 12, "failed": 1, "skipped": 0}` of one JUnit file, whatever its totals claim."""
    counts: Counter[str] = Counter()
    for case in ET.parse(path).iter("testcase"):
        marks = {child.tag for child in case}
        if marks & {"failure", "error"}:
            counts["failed"] += 1
        elif "skipped" in marks:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_session(name: str, outcome: str, directory: Path) -> Counter[str]:
    """`outcome` is nox's word: success, skipped, failed or aborted."""
    path = directory / f"{re.sub(r'[^a-z0-9.-]+', '-', name).strip('-')}.xml"
    counts: Counter[str] = Counter()
    broken = outcome not in {"success", "skipped"}
    if path.exists():
        try:
            counts = count_file(path)
        except ET.ParseError:
            broken = True  # the session died while it wrote
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
    for session in sessions:
        # The name of one with a parameter leaves it out; its signature is "conformance(js)".
        name = session.get("signatures", [session["name"]])[0]
        counts += count_session(name, session["result"], directory)
    if exit_status and not counts["failed"]:
        counts["failed"] += 1
    return counts


def main(directory: str, exit_status: str) -> int:
    counts = count_run(Path(directory), int(exit_status))
    print("{passed} passed, {failed} failed, {skipped} skipped".format_map(counts))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
