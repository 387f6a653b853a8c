"""docs/ttl.md: the table is what its formulas say, and the formulas are what server and SDK do."""

import random
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from pages import ROOT, pages

from volcano_sdk.renewal import renewal_delay
from volcano_server.access import DEFAULT_QUOTA
from volcano_server.lease import GRACE

simulation = import_module("test_outages")  # the Python SDK's, in sdks/python/tests
PAGE = "docs/ttl.md"
SECOND = 1_000_000


def formulas() -> dict[str, Callable[..., Any]]:
    """{"takeover": …, "holders": …}: the functions of the page's program."""
    [program] = [each for each in pages()[PAGE].programs if each.language == "python"]
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(program.source, names)
    return names


def table() -> list[list[float]]:
    """[[5, 6, 1.7, 36, 16], …]: TTL, takeover, outage, renewals a minute, holders."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) s \|(.+)\|$", text, re.MULTILINE)
    return [
        [float(ttl), *(float(cell.strip().removesuffix(" s")) for cell in rest.split("|"))]
        for ttl, rest in rows
    ]


ROWS = table()


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]:g} s" for row in ROWS])
def test_each_row_is_what_the_formulas_say(row: list[float]) -> None:
    ttl, *said = row
    of = formulas()

    expected = [
        of["takeover"](ttl),
        round(of["outage"](ttl), 1),
        of["renewals_per_minute"](ttl),
        of["holders"](ttl),
    ]

    assert expected == pytest.approx(said)


@pytest.mark.parametrize("ttl", [5, 6, 30, 77, 3600, 7_776_000])
def test_the_formulas_are_what_server_and_sdk_do(ttl: int) -> None:
    of = formulas()

    assert of["takeover"](ttl) == ttl + GRACE / SECOND
    assert of["renewals_per_minute"](ttl) == pytest.approx(
        60 / renewal_delay(ttl, remaining=ttl, jitter=0)
    )
    assert of["renewals_per_minute"](ttl) == pytest.approx(180 / ttl)
    assert of["holders"](ttl) == int(DEFAULT_QUOTA * ttl / 180)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]:g} s" for row in ROWS])
def test_no_outage_of_the_pages_length_costs_a_lease(row: list[float]) -> None:
    """The Python SDK's own simulation, with the page's numbers."""
    ttl = int(row[0])
    dice = random.Random(ttl)
    for kinds in (("hang",), ("reset",), ("refused",), ("hang", "reset", "refused")):
        for _ in range(25):
            start = dice.uniform(0, 2 * ttl)
            outage = simulation.Outage(start, start + formulas()["outage"](ttl), kinds, dice)

            assert simulation.held_until(ttl, outage, dice, end=6 * ttl) is None


def test_the_page_has_rows() -> None:
    assert [5, 10, 15, 30, 60, 300, 3600] == [row[0] for row in ROWS]
