"""The pictures of the results."""

import re
from xml.etree import ElementTree as ET

import pytest
from measures import plots
from measures.rig import Bar, Figure

SVG = "{http://www.w3.org/2000/svg}"


def measured(*figures: Figure) -> plots.Row:
    return {"name": "n", "about": "a", "figures": [figure.row() for figure in figures]}


def drawn(found: plots.Row) -> ET.Element:
    picture = plots.figures(found, str)
    assert picture is not None
    return ET.fromstring(picture)


def words(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_figures_of_one_unit_are_drawn_to_one_scale() -> None:
    picture = drawn(measured(Figure("a", [1, 2, 4], "ms"), Figure("b", [1], "ms")))

    a, b = [float(rect.get("width", "")) for rect in picture.iter(f"{SVG}rect") if rect.get("x")]
    assert a == pytest.approx(2 * b)
    assert ["ms", "a", "2", "b", "1"] == words(picture)


def test_a_line_goes_from_the_least_to_the_most() -> None:
    picture = drawn(measured(Figure("a", [1, 2, 4], "ms"), Figure("b", [4], "ms")))

    spread = picture.findall(f"{SVG}path")[0].get("d", "")
    first, last = (float(each) for each in re.findall(r"[\d.]+", spread)[::2])
    assert (first - plots._LEFT) * 4 == pytest.approx(last - plots._LEFT)
    assert plots._RIGHT == last


def test_a_unit_of_one_figure_has_no_panel() -> None:
    two = (Figure("a", [1], "ms"), Figure("b", [2], "ms"))

    assert "c" not in words(drawn(measured(*two, Figure("c", [3], "MB"))))
    assert plots.figures(measured(Figure("c", [3], "MB")), str) is None


def test_what_a_label_says_is_no_markup() -> None:
    found = measured(Figure("<a> & b", [1]), Figure("b", [2]))

    assert "<a> & b" in words(drawn(found))


@pytest.mark.parametrize(
    ("median", "is_ceiling", "is_right"),
    [(2, False, True), (0.5, False, False), (0.5, True, True), (2, True, False)],
)
def test_right_of_the_line_a_bar_is_met(median: float, is_ceiling: bool, is_right: bool) -> None:
    bar = Bar("", Figure("", [median]), 1, is_ceiling=is_ceiling)

    picture = ET.fromstring(plots.bars([bar.row()], str))

    line = [
        float(each.get("x", "")) for each in picture.iter(f"{SVG}text") if each.text == "the bar"
    ]
    dot = picture.find(f"{SVG}circle")
    assert dot is not None
    assert is_right == (float(dot.get("cx", "")) > line[0])
    assert is_right == (dot.get("fill") == plots._FILL)


def test_what_is_far_from_its_bar_stands_at_the_edge() -> None:
    rows = [Bar("", Figure("", [value]), 1).row() for value in (1e-9, 1e9)]

    picture = ET.fromstring(plots.bars(rows, str))

    dots = [float(dot.get("cx", "")) for dot in picture.iter(f"{SVG}circle")]
    assert [plots._LEFT, plots._RIGHT] == dots
