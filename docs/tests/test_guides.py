"""The guides to the SDKs have the same headings in the same order, and each names every call."""

import re
from pathlib import Path

import pytest
from pages import ROOT

GUIDES = sorted((ROOT / "docs" / "sdks").glob("*.md"))
CALLS = ("with_lock", "acquire", "renew", "release", "get", "force_release")


def headings(text: str) -> list[str]:
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^##+ (.+)$", outside, re.MULTILINE)


def test_there_is_a_guide_for_every_sdk() -> None:
    sdks = {path.parent.parent.name for path in ROOT.glob("sdks/*/conformance/driver.json")}

    assert sdks == {path.stem for path in GUIDES}
    assert len(sdks) >= 3


@pytest.mark.parametrize("guide", GUIDES, ids=[path.stem for path in GUIDES])
def test_every_guide_has_the_same_headings(guide: Path) -> None:
    first = headings(GUIDES[0].read_text(encoding="utf-8"))

    assert len(first) > 5
    assert first == headings(guide.read_text(encoding="utf-8"))


@pytest.mark.parametrize("guide", GUIDES, ids=[path.stem for path in GUIDES])
@pytest.mark.parametrize("call", CALLS)
def test_every_guide_names_every_call(guide: Path, call: str) -> None:
    words = call.split("_")
    camel = words[0] + "".join(word.title() for word in words[1:])

    assert re.search(rf"`({call}|{camel})\(", guide.read_text(encoding="utf-8"))
