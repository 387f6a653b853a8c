"""Results as JSON, as tables and pictures in docs/performance.md, and as an exit status."""

import json
import os
import platform
import re
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from measures import plots
from measures.plots import Row
from measures.rig import Plan, Result

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "pictures" / "measured"
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_QUICK_MARGIN = 3.0
"""A quick run on a busy machine proves little: a bar is lost when it is missed by this factor."""


def as_json(name: str, about: str, result: Result, plan: Plan, load: tuple[str, str]) -> Row:
    """What is kept of one measure.  `load`: the load average before and after."""
    return {
        "name": name,
        "about": about,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": plan.quick,
        "cpus": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "load": load,
        "bars": [bar.row() for bar in result.bars],
        "figures": [figure.row() for figure in result.figures],
        "notes": result.notes,
    }


def save(found: Row) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{found['name']}.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def saved(names: Iterable[str]) -> list[Row]:
    paths = [RESULTS / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def is_met(bar: Row, *, quick: bool) -> bool:
    margin = _QUICK_MARGIN if quick else 1.0
    if bar["is_ceiling"]:
        return bool(bar["median"] <= bar["bar"] * margin)
    return bool(bar["median"] >= bar["bar"] / margin)


def lines(found: Row) -> list[str]:
    """For a terminal."""
    text = [f"{found['name']}: {found['about']}"]
    text += [f"  {row['label']:<52} {_spread(row)} {row['unit']}" for row in found["figures"]]
    for bar in found["bars"]:
        word = "met" if is_met(bar, quick=False) else "MISSED"
        text.append(f"  {bar['label']:<52} {_spread(bar)}   bar {_sign(bar)}: {word}")
    return [*text, *(f"  {note}" for note in found["notes"])]


def write_page(results: list[Row]) -> None:
    """The tables of the page, between its two marks, and its pictures; the rest is by hand."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    text, pictures = page(results)
    for name, picture in pictures.items():
        (PICTURES / name).write_text(picture)
    PAGE.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")


def page(results: list[Row]) -> tuple[str, dict[str, str]]:
    """What stands between the marks; the pictures that it shows, by the names of their files."""
    bars = [bar for found in results for bar in found["bars"]]
    pictures = {"bars.svg": plots.bars(bars, _number)}
    parts = ["", _shown("bars.svg", "How far each measure is from its bar"), ""]
    parts += ["| what | measured | bar | |", "| --- | --- | --- | --- |"]
    for bar in bars:
        word = "met" if is_met(bar, quick=False) else "**missed**"
        parts.append(f"| {bar['label']} | {_spread(bar)} | {_sign(bar)} | {word} |")
    for found in results:
        parts += ["", f"### {found['name']}", "", _sentence(found["about"]), ""]
        picture = plots.figures(found, _number)
        if picture is not None:
            file = f"{found['name']}.svg"
            pictures[file] = picture
            parts += [_shown(file, found["about"]), ""]
        if found["figures"]:
            parts += ["| | median (least – most) |", "| --- | --- |"]
            parts += [
                f"| {row['label']} | {_spread(row)} {row['unit']} |" for row in found["figures"]
            ]
            parts.append("")
        parts.append(_conditions(found))
    return "\n".join([*parts, ""]), pictures


def _shown(file: str, about: str) -> str:
    return f"![{about}](pictures/{PICTURES.name}/{file})"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _conditions(found: Row) -> str:
    before, after = found["load"]
    words = [
        f"{found['at'][:16].replace('T', ' ')} UTC",
        f"{found['cpus']} CPUs shared with the load",
        f"load average {before} before and {after} after",
        found["machine"],
        *([] if not found["quick"] else ["a quick run"]),
        *(note.rstrip(".") for note in found["notes"]),
    ]
    return "; ".join(words) + "."


def _sign(bar: Row) -> str:
    return f"{'≤' if bar['is_ceiling'] else '≥'} {bar['bar']:g}"


def _spread(row: Row) -> str:
    if row["rounds"] == 1:
        return _number(row["median"])
    least, most = _number(row["least"]), _number(row["most"])
    return f"{_number(row['median'])} ({least} – {most})"


def _number(value: float) -> str:
    """Three digits that say something: 14,324; 80; 49.6; 0.711."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return re.sub(r"(\.\d*?)0+$", r"\1", f"{value:.3g}").rstrip(".")
