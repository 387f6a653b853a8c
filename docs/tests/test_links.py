"""Every link and anchor leads somewhere: on the pages, and from the sources to the pages."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, Page, broken, files, pages, read, slug

PAGES = pages()
SOURCES = (".py", ".ts", ".mts", ".js", ".mjs", ".rb", ".sql", ".json", ".yaml", ".toml")
_REFERENCE = re.compile(r"(?<![\w/:.-])((?:[\w-]+/)*[\w-]+\.md)(?:#([\w-]+))?")


def references(text: str) -> Iterator[tuple[str, str]]:
    """("docs/semantics.md", "renewal"): what a source names of pages."""
    for match in _REFERENCE.finditer(text):
        yield match[1], match[2] or ""


def dangling(page: str, anchor: str, among: dict[str, Page]) -> bool:
    """True when no page of that name (its last parts are enough) has the anchor."""
    called = [each for name, each in among.items() if f"/{name}".endswith(f"/{page}")]
    return not any(not anchor or anchor in each.anchors for each in called)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_link_leads_somewhere(page: Page) -> None:
    lost = [
        f"{page.name}:{link.line}: {why}"
        for link in page.links
        if (why := broken(link.target, page=page.name, among=PAGES))
    ]

    assert not lost, "\n".join(lost)


def test_every_rule_that_a_source_names_is_on_the_page() -> None:
    """Docstrings, comments and scenarios."""
    lost = []
    named = 0
    for path in files(*SOURCES):
        if path.is_relative_to(Path(__file__).parent) or path.name == "package-lock.json":
            continue
        for page, anchor in references(path.read_text(encoding="utf-8")):
            named += bool(anchor)
            if dangling(page, anchor, PAGES):
                lost.append(f"{path.relative_to(ROOT)}: {page}#{anchor}")

    assert not lost, "\n".join(lost)
    assert named > 10, "the search itself finds nothing"


def test_every_scenario_names_a_rule() -> None:
    for path in files(".json"):
        if "scenarios" in path.parts:
            rule = json.loads(path.read_text(encoding="utf-8"))["rule"]

            assert any(anchor for _, anchor in references(rule)), f"{path}: {rule}"


# ---------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("b.md", "there is no docs/b.md"),
        ("../../elsewhere.md", "leads out"),
        ("#nothing", "docs/a.md has no anchor nothing"),
        ("../README.md#nothing", "README.md has no anchor nothing"),
        ("../README.md#one", None),
        ("../README.md#two-words-1", None),
        ("../noxfile.py", None),
        ("../sdks", None),
        ("#own", None),
        ("https://example.org/x#y", None),
    ],
)
def test_a_link_that_leads_nowhere_is_seen(link: str, why: str | None) -> None:
    readme = read("README.md", '<a id="one"></a>\n# Two words\n## Two words\n')
    page = read("docs/a.md", f"# Own\n\nsee [it]({link})\n")

    [found] = page.links
    said = broken(found.target, page=page.name, among={"README.md": readme, "docs/a.md": page})

    assert 3 == found.line
    assert (why is None and said is None) or (why is not None and why in (said or ""))


def test_links_are_found_wherever_they_stand() -> None:
    text = "| a |\n| --- |\n| [x](in-a-table.md) |\n\n![i](image.png)\n\n[r]\n\n[r]: by-name.md\n"
    text += '\n<a href="html.md">x</a>\n\n```text\n[no](code.md)\n```\n'

    found = {link.target for link in read("page.md", text).links}

    assert {"in-a-table.md", "image.png", "by-name.md", "html.md"} == found


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Force release", "force-release"),
        ("What you may rely on, and not", "what-you-may-rely-on-and-not"),
        ("`with_lock` & co.", "with_lock--co"),
        ("TTL – é", "ttl--é"),
    ],
)
def test_headings_have_github_anchors(heading: str, expected: str) -> None:
    assert (expected,) == read("page.md", f"## {heading}\n").anchors
    assert expected == slug(heading.replace("`", ""))


def test_a_source_that_names_a_missing_rule_is_seen() -> None:
    among = {"docs/semantics.md": read("docs/semantics.md", "# Renewal\n")}

    assert not dangling("docs/semantics.md", "renewal", among)
    assert not dangling("semantics.md", "", among)
    assert dangling("docs/semantics.md", "renew", among)
    assert dangling("docs/fencing.md", "", among)
    assert [("docs/semantics.md", "ttl"), ("fencing.md", "")] == list(
        references("see `docs/semantics.md#ttl`, or fencing.md.")
    )
