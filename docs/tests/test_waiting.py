"""docs/waiting.md: its formula is what the SDK does, its limits are the server's."""

import re
from typing import Any

import pytest
from pages import ROOT, pages

from volcano_sdk import waiting
from volcano_server import subscription, wire_events
from volcano_server.hub import MOST_STREAMS

PAGE = "docs/waiting.md"


def spread(watchers: int) -> float:
    """Seconds, by the function of the page's program."""
    [program] = [each for each in pages()[PAGE].programs if "def spread" in each.source]
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(program.source, names)
    return float(names["spread"](watchers)) / 1000


@pytest.mark.parametrize("watchers", [1, 2, 10, 100, 501, 502, 1000])
def test_the_spread_is_the_sdks(watchers: int) -> None:
    assert spread(watchers) == pytest.approx(waiting.spread(watchers, jitter=1.0))
    assert waiting.spread(watchers, jitter=-1.0) == 0.0


def test_the_limits_are_the_servers() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| (keys and|streams of|events that)[^|]*\| ([\d ]+)", text))
    said = {name: int(number.replace(" ", "")) for name, number in rows.items()}

    assert said == {
        "keys and": wire_events.MOST_FILTERS,
        "streams of": MOST_STREAMS,
        "events that": subscription.MOST_WAITING,
    }
