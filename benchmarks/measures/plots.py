"""Results as pictures: SVG, drawn from what benchmarks/results keeps.

    label |████████████┼──┤        14,324      a bar is the median, the line the least and the most

Pure: rows in, text out.
"""

from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import groupby
from math import log2
from typing import Any

Row = dict[str, Any]

_WIDTH, _LINE, _TOP = 900, 26, 40
_LEFT, _RIGHT = 460, 780
"""Between them are the bars; labels stand before, numbers after."""
_FILL, _SPREAD, _MISSED, _INK, _FAINT = "#2563eb", "#d97706", "#dc2626", "#1f2937", "#6b7280"
_DOUBLINGS = range(-2, 4)
"""How far from its bar a measure is shown; beyond, it stands at the edge."""


def figures(found: Row, number: Callable[[float], str]) -> str | None:
    """A panel for each unit that two or more figures share; None where there is none."""
    panels = [
        (unit, rows)
        for unit, group in groupby(found["figures"], key=lambda row: str(row["unit"]))
        if len(rows := list(group)) > 1
    ]
    if not panels:
        return None
    parts: list[str] = []
    top = _TOP
    for unit, rows in panels:
        parts.append(_text(_LEFT, top, unit, fill=_FAINT))
        most = max(row["most"] for row in rows)
        for row in rows:
            top += _LINE
            parts += _line(row, top, most, number)
        top += 2 * _LINE
    return _picture(parts, top - _LINE, found["name"], found["about"])


def bars(rows: Iterable[Row], number: Callable[[float], str]) -> str:
    """How far each is from its bar, on a scale of doublings: right of the line it is met."""
    first, *_, last = _DOUBLINGS

    def place(doublings: float) -> float:
        return _x((min(last, max(first, doublings)) - first) / (last - first))

    parts: list[str] = []
    top = _TOP
    for row in rows:
        top += _LINE
        sign = "≤" if row["is_ceiling"] else "≥"
        least, median, most = (_doublings(row, row[each]) for each in ("least", "median", "most"))
        colour = _FILL if median >= 0 else _MISSED
        spread = f"M{place(least):.1f} {top - 4}H{place(most):.1f}"
        parts += [
            _text(20, top, _short(row["label"])),
            f'<path d="{spread}" stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{place(median):.1f}" cy="{top - 4}" r="5" fill="{colour}"/>',
            _text(_RIGHT + 12, top, f"{number(row['median'])} ({sign} {row['bar']:g})"),
        ]
    grid: list[str] = []
    for each in _DOUBLINGS:
        name = "the bar" if each == 0 else f"× {2**each}" if each > 0 else f"÷ {2**-each}"
        grid.append(
            _text(place(each), _TOP, name, anchor="middle", fill=_INK if each == 0 else _FAINT)
        )
        ink = f'stroke="{_INK}"' if each == 0 else f'stroke="{_FAINT}" stroke-dasharray="2 4"'
        grid.append(f'<path d="M{place(each):.1f} {_TOP + 8}V{top + 8}" {ink}/>')
    about = "A dot for each measure, with its spread; right of the line its bar is met."
    return _picture([*grid, *parts], top + _LINE, "Measured over the bars", about)


def _doublings(row: Row, value: float) -> float:
    """0: the bar is just met; 1: twice as good."""
    ratio: float = row["bar"] / value if row["is_ceiling"] else value / row["bar"]
    return log2(ratio)


def _line(row: Row, top: int, most: float, number: Callable[[float], str]) -> Iterator[str]:
    """One figure: a bar to the median, a line from the least to the most."""
    median, first, last = (_x(row[each] / most) for each in ("median", "least", "most"))
    y = top - 4
    yield _text(20, top, _short(row["label"]))
    yield f'<rect x="{_LEFT}" y="{y - 8}" width="{median - _LEFT:.1f}" height="16" fill="{_FILL}"/>'
    yield f'<path d="M{first:.1f} {y}H{last:.1f}" stroke="{_SPREAD}" stroke-width="3"/>'
    yield _text(_RIGHT + 12, top, number(row["median"]))


def _x(share: float) -> float:
    return _LEFT + share * (_RIGHT - _LEFT)


def _short(label: str) -> str:
    """What fits before the bars."""
    return label if len(label) <= 72 else f"{label[:71]}…"


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = _INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _picture(parts: Iterable[str], height: int, title: str, about: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        ' aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="12">'
    )
    body = "\n".join(f"  {part}" for part in parts)
    return f"""{head}
  <title id="t">{escape(title)}</title>
  <desc id="d">{escape(about)}</desc>
  <rect width="{_WIDTH}" height="{height}" rx="8" fill="#fff"/>
{body}
</svg>
"""
