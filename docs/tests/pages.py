"""The Markdown pages of the repository, read as what a reader does with them: run, follow, look up.

A page's code blocks are fences that name their language.  A comment just before one is its mark:

    <!-- not run: needs a second machine -->    with the reason, in place of running it
    <!-- continues -->                          runs after the block of this language above it
    <!-- prints -->                             is what the program above printed; … is anything
    <!-- setup
    lines that run before the block and that the reader is spared
    -->

A program is a block with those that continue it.  Each of its lines keeps the number that it has on
the page, so that a traceback points at the page.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]

PROGRAMS = ("python", "js", "ts", "ruby", "sh", "sql")
"""The languages of blocks that run."""

DATA: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "text": str,  # a drawing, an exchange, an output
}
"""The languages of blocks that are looked at only: each with what refuses a wrong one."""

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_MARK = re.compile(r"(not run|continues|prints|setup)(?::|\b)(.*)", re.DOTALL)
_ID = re.compile(r"""<a\s[^>]*?\b(?:id|name)=["']([^"']+)["']""")
_HREF = re.compile(r"""<(?:a|img)\s[^>]*?\b(?:href|src)=["']([^"']+)["']""")


@dataclass(frozen=True, slots=True)
class Lines:
    """A piece of a page: `first` is the page's line (from 1) on which `text` begins."""

    first: int
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.  `marks`: {"not run": "needs a second machine"}; `faults`: sentences."""

    language: str
    code: Lines
    marks: dict[str, str]
    setup: Lines | None
    faults: tuple[str, ...]

    @property
    def runs(self) -> bool:
        return self.language in PROGRAMS and "not run" not in self.marks


@dataclass(frozen=True, slots=True)
class Program:
    """Blocks that run as one.  `prints`: all of its output, None where the page does not say."""

    page: str
    language: str
    pieces: tuple[Lines, ...]
    prints: str | None = None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.pieces[-1].first}"

    @property
    def source(self) -> str:
        """The page with all but the program's lines left blank."""
        last = max(piece.first + piece.text.count("\n") for piece in self.pieces)
        lines = [""] * last
        for piece in self.pieces:
            for offset, line in enumerate(piece.text.splitlines()):
                lines[piece.first - 1 + offset] = line
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Link:
    line: int
    target: str


@dataclass(frozen=True, slots=True)
class Page:
    """`name`: the path from the root, with slashes.  `anchors`: what `#…` may name here."""

    name: str
    blocks: tuple[Block, ...]
    links: tuple[Link, ...]
    anchors: tuple[str, ...]

    @property
    def programs(self) -> list[Program]:
        return list(_programs(self.name, self.blocks))

    @property
    def faults(self) -> list[str]:
        """What is wrong with its blocks, as `line: sentence`."""
        faults = [f"{each.code.first}: {fault}" for each in self.blocks for fault in each.faults]
        ids = [each for each in self.anchors if self.anchors.count(each) > 1]
        return faults + [f"the anchor {each} is there twice" for each in sorted(set(ids))]


@cache
def pages() -> dict[str, Page]:
    """All pages by name, but for those of other people's packages."""
    names = sorted(str(path.relative_to(ROOT).as_posix()) for path in files(".md"))
    return {name: read(name, (ROOT / name).read_text(encoding="utf-8")) for name in names}


def files(*endings: str) -> Iterator[Path]:
    """The repository's files with one of these endings."""
    left_out = {"node_modules", "vendor", "build", "dist", "__pycache__"}
    for folder, below, names in os.walk(ROOT):
        # Hidden folders are tools' (.venv, .nox, .git); .ci is ours and has no page.
        below[:] = [each for each in below if each not in left_out and not each.startswith(".")]
        yield from (Path(folder, name) for name in names if name.endswith(endings))


def read(name: str, text: str) -> Page:
    """The page that `text` is."""
    tokens = _MARKDOWN.parse(text)
    return Page(name, tuple(_blocks(tokens)), tuple(_links(tokens)), tuple(_anchors(tokens)))


# ---------------------------------------------------------------- code


def _blocks(tokens: list[Token]) -> Iterator[Block]:
    comments: list[Lines] = []
    for token in tokens:
        start = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            comments += _comments(start, token.content)
        elif token.type in ("fence", "code_block"):
            first = start + 1 if token.type == "fence" else start
            yield _block(token.info.strip(), Lines(first, token.content), comments)
            comments = []
        else:
            comments = []


def _comments(start: int, html: str) -> list[Lines]:
    found = []
    for match in _COMMENT.finditer(html):
        body = match[1]
        # The lines of a setup begin below its first one.
        first = start + html.count("\n", 0, match.start()) + 1
        found.append(Lines(first, body))
    return found


def _block(language: str, code: Lines, comments: list[Lines]) -> Block:
    marks: dict[str, str] = {}
    setup = None
    faults = []
    for comment in comments:
        match = _MARK.fullmatch(comment.text.strip())
        if match is None:
            faults.append(f"<!--{comment.text}--> before a code block is no mark that we know")
            continue
        marks[match[1]] = match[2].strip()
        if match[1] == "setup":
            setup = Lines(comment.first, comment.text.partition("\n")[2])
    faults += _faults(language, code.text, marks)
    return Block(language, code, marks, setup, tuple(faults))


def _faults(language: str, code: str, marks: dict[str, str]) -> Iterator[str]:
    if not language:
        yield "a code block without a language: fence it and name one (text for a drawing)"
    elif "not run" in marks:
        if len(marks["not run"].split()) < 2:
            yield "<!-- not run: … --> gives no reason"
        if len(marks) > 1:
            yield "a block that is not run has another mark"
    elif language in DATA:
        if "prints" not in marks:
            yield from _data_faults(language, code, marks)
    elif language not in PROGRAMS:
        known = ", ".join([*PROGRAMS, *DATA])
        yield f"{language} cannot be run: name one of {known}, or mark it <!-- not run: why -->"
    elif "prints" in marks:
        yield f"the output of a program is text or data, not {language}"


def _data_faults(language: str, code: str, marks: dict[str, str]) -> Iterator[str]:
    if marks:
        yield f"a block of {language} runs in no program: {', '.join(marks)}"
    try:
        DATA[language](code)
    except (ValueError, yaml.YAMLError) as error:
        yield f"this is not {language}: {error}"


def _programs(page: str, blocks: tuple[Block, ...]) -> Iterator[Program]:
    """Raises ValueError where a mark has nothing to refer to."""
    programs: list[dict[str, Any]] = []
    latest: dict[str, dict[str, Any]] = {}
    before: Block | None = None
    for block in blocks:
        if block.runs:
            pieces = [block.setup, block.code] if block.setup else [block.code]
            if "continues" in block.marks:
                if block.language not in latest:
                    raise ValueError(f"{page}:{block.code.first} continues nothing")
                latest[block.language]["pieces"] += pieces
            else:
                latest[block.language] = {"pieces": pieces, "prints": None}
                programs.append({"language": block.language, "of": latest[block.language]})
        elif "prints" in block.marks:
            if before is None or not before.runs:
                raise ValueError(f"{page}:{block.code.first} is printed by no program above it")
            said = latest[before.language]
            said["prints"] = (said["prints"] or "") + block.code.text
        before = block
    for each in programs:
        of = each["of"]
        yield Program(page, each["language"], tuple(of["pieces"]), of["prints"])


def is_printed(expected: str, printed: str) -> bool:
    """True when the output is what the page says, line ends at the end aside."""
    pattern = ".*?".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


# ---------------------------------------------------------------- links and anchors


def _links(tokens: list[Token]) -> Iterator[Link]:
    line = 0
    for token in tokens:
        line = token.map[0] + 1 if token.map else line
        if token.type == "html_block":
            yield from (Link(line, href) for href in _HREF.findall(token.content))
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield Link(line, str(child.attrGet("href") or child.attrGet("src") or ""))
            elif child.type == "html_inline":
                yield from (Link(line, href) for href in _HREF.findall(child.content))


def _anchors(tokens: list[Token]) -> Iterator[str]:
    """Explicit ones, and those that GitHub makes of headings."""
    explicit: list[str] = []
    slugs: list[str] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        html = [token] if token.type == "html_block" else token.children or []
        for each in html:
            explicit += _ID.findall(each.content) if each.type.startswith("html_") else []
        if before is not None and before.type == "heading_open":
            slugs.append(slug("".join(each.content for each in token.children or [])))
    yield from explicit
    seen: dict[str, int] = {}
    for each_slug in slugs:
        count = seen.get(each_slug, 0)
        seen[each_slug] = count + 1
        name = f"{each_slug}-{count}" if count else each_slug
        if name not in explicit:  # an explicit one above a heading may repeat its name
            yield name


def slug(heading: str) -> str:
    """GitHub's anchor for a heading: lower case, without punctuation, blanks as hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken(link: str, *, page: str, among: dict[str, Page]) -> str | None:
    """Why a link on `page` leads nowhere, or None.  Addresses of other hosts are not asked."""
    if re.match(r"(https?|mailto):", link):
        return None
    path, _, anchor = unquote(link).partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    target = Path(os.path.normpath(target))
    if not target.is_relative_to(ROOT):
        return f"{link} leads out of the repository"
    name = str(target.relative_to(ROOT).as_posix())
    if name not in among and not target.exists():
        return f"{link}: there is no {name}"
    if anchor and name in among and anchor not in among[name].anchors:
        return f"{link}: {name} has no anchor {anchor}"
    return None
