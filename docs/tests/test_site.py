"""The built site: every link, anchor, picture and script on every page of it leads somewhere."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin

import pytest
import yaml
from layout import REFERENCE
from pages import ROOT
from pages import pages as all_pages

SITE = ROOT / "build" / "site"
NAMED_BY_HOSTS = "404.html"  # its links are absolute, from whatever root it is served under

pytestmark = pytest.mark.skipif(
    not SITE.exists(), reason="build/site is not there; ./dev test docs makes it"
)


@dataclass
class Found(HTMLParser):
    """`ids`: what `#…` may name.  `links`: href and src, as they are written."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value is not None:
                self.links.append(value)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def found_in(html: str) -> Found:
    found = Found()
    found.feed(html)
    return found


@cache
def site() -> dict[str, Found]:
    """By the path below the site's root: {"docs/start/index.html": …}."""
    return {
        path.relative_to(SITE).as_posix(): found_in(path.read_text(encoding="utf-8"))
        for path in sorted(SITE.rglob("*.html"))
        if path.name != NAMED_BY_HOSTS
    }


def lost(page: str, among: dict[str, Found], files: Path) -> Iterator[str]:
    """The links of a page of the site that lead nowhere."""
    for link in among[page].links:
        if re.match(r"(https?|mailto|data|javascript):", link):
            continue
        path, _, anchor = urljoin(f"/{page}", link).lstrip("/").partition("#")
        path = unquote(path.partition("?")[0])
        if path == "" or path.endswith("/"):
            path += "index.html"
        if path not in among and not (files / path).is_file():
            yield f"{page}: {link}: there is no {path}"
        elif anchor and path in among and unquote(anchor) not in among[path].ids:
            yield f"{page}: {link}: {path} has no anchor {anchor}"


def test_every_link_on_the_site_leads_somewhere() -> None:
    nowhere = [each for page in site() for each in lost(page, site(), SITE)]

    assert not nowhere, "\n".join(nowhere)
    assert sum(len(page.links) for page in site().values()) > 1000, "the search finds nothing"


def test_the_site_fetches_nothing_from_another_host() -> None:
    """Scripts, styles, fonts and pictures; links that a reader follows are another matter."""
    fetched = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"(https?:[^\"]*)|<link\b[^>]*>")
    strangers = [
        f"{path.relative_to(SITE)}: {match[0]}"
        for path in SITE.rglob("*.html")
        for match in fetched.finditer(path.read_text(encoding="utf-8"))
        if match[1] or ("stylesheet" in match[0] and "http" in match[0])
    ]

    assert [] == strangers


def test_the_menu_names_every_page_of_docs() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = set(_leaves(menu))
    pages = {name for name in all_pages() if name.startswith("docs/")}

    assert {"README.md"} <= named
    assert set() == pages - named
    assert [] == [name for name in named if name not in all_pages() and Path(name) != REFERENCE]


def _leaves(menu: object) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    elif isinstance(menu, list):
        for each in menu:
            yield from _leaves(each)
    elif isinstance(menu, dict):
        yield from _leaves(list(menu.values()))


def test_marks_for_the_tests_are_not_shown() -> None:
    """A comment or a tab that the site does not understand would stand there as text."""
    shown = [
        f"{name}: {word}"
        for name, page in site().items()
        for word in ("<!--", "/// ")
        if name != "CONTRIBUTING/index.html" and word in "".join(page.text)
    ]

    assert [] == shown


# ---------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("../b/", None),
        ("../b/#there", None),
        ("#own", None),
        ("..", None),
        ("https://example.org/", None),
        ("../c/", "there is no c/index.html"),
        ("../b/#gone", "b/index.html has no anchor gone"),
        ("#gone", "a/index.html has no anchor gone"),
        ("../picture.svg", "there is no picture.svg"),
    ],
)
def test_a_link_that_leads_nowhere_is_seen(link: str, why: str | None, tmp_path: Path) -> None:
    among = {
        "index.html": found_in(""),
        "a/index.html": found_in(f'<h1 id="own">A</h1><a href="{link}">x</a>'),
        "b/index.html": found_in('<a name="there"></a>'),
    }

    said = list(lost("a/index.html", among, tmp_path))

    assert ([] == said) if why is None else (1 == len(said) and said[0].endswith(why))
