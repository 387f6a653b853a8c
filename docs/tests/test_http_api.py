"""What http-api.md and openapi.yaml name (codes, statuses, headers, routes) is the server's."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pages import ROOT
from pages import pages as all_pages

SERVER = ROOT / "reference-server" / "src" / "volcano_server"
PLUMBING = {"connection", "content-length", "transfer-encoding"}
"""Headers of HTTP itself, which the server handles and the page need not name."""

_HEADER = re.compile(r"\b[A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)+\b")
_METHODS = ("get", "post", "patch", "put", "delete")

# ---------------------------------------------------------------- what the server says


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in SERVER.rglob("*.py"))


def server_problems() -> set[tuple[int, str]]:
    """{(409, "lock_held"), …}: of every `Problem(status, code, …)`."""
    found = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
            status, code = node.args[0], node.args[1]
            assert isinstance(status, ast.Constant), ast.unparse(node)
            assert isinstance(code, ast.Constant), ast.unparse(node)
            found.add((int(str(status.value)), str(code.value)))
    return found


def server_headers() -> set[str]:
    """In lower case: the byte strings and `X-…` strings that look like one."""
    found = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, bytes):
            name = node.value.decode("ascii", "replace")
            if re.fullmatch(r"allow|authorization|[a-z]+(-[a-z]+)+", name):
                found.add(name)
        elif isinstance(node.value, str) and re.fullmatch(r"X(-[A-Z][A-Za-z]*)+", node.value):
            found.add(node.value.lower())
    return found - PLUMBING


# ---------------------------------------------------------------- what a page says


def named_codes(text: str, known: set[str]) -> set[str]:
    """The words that are codes, or begin as one does: `lock_gone` too."""
    families = "|".join(sorted({code.partition("_")[0] for code in known}))
    return set(re.findall(rf"(?<![\w-])(?:{families})_[a-z_]+", text))


def named_headers(text: str) -> set[str]:
    names = {name.lower() for name in _HEADER.findall(text)}
    singles = {each.lower() for each in re.findall(r"`(Allow|Authorization)\b", text)}
    return (names | singles) - PLUMBING


def table_problems(text: str) -> set[tuple[int, str]]:
    """The pairs in tables that have the columns `status` and `code`."""
    found: set[tuple[int, str]] = set()
    columns: list[str] = []
    for row in _rows(MarkdownIt("commonmark").enable("table").parse(text)):
        if row[0].type == "th_open":
            columns = [cell.meta["text"].strip("`") for cell in row]
        elif {"status", "code"} <= set(columns):
            cells = dict(zip(columns, (cell.meta["text"] for cell in row), strict=True))
            statuses = re.findall(r"\d{3}", cells["status"])
            codes = re.findall(r"`([a-z_]+)`", cells["code"])
            pairs = zip(statuses, codes, strict=True) if len(statuses) > 1 else ()
            found |= {(int(status), code) for status, code in pairs}
            found |= {(int(statuses[0]), code) for code in codes if len(statuses) == 1}
    return found


def _rows(tokens: list[Token]) -> Iterator[list[Token]]:
    """Rows of cells, each with its source in meta["text"]."""
    row: list[Token] = []
    for token, after in pairwise(tokens):
        if token.type == "tr_open":
            row = []
        elif token.type in ("th_open", "td_open"):
            token.meta["text"] = after.content
            row.append(token)
        elif token.type == "tr_close":
            yield row


# ---------------------------------------------------------------- together


PAGES = tuple(all_pages())
API, DESCRIPTION = "docs/http-api.md", "docs/openapi.yaml"


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_server_has_codes_and_headers_at_all() -> None:
    assert (409, "lock_held") in server_problems()
    assert {"x-volcano-lock-token", "retry-after", "x-ratelimit-reset"} <= server_headers()


@pytest.mark.parametrize("page", [API, DESCRIPTION])
def test_the_codes_on_the_page_are_the_servers(page: str) -> None:
    codes = {code for _, code in server_problems()}

    assert codes == named_codes(text_of(page), codes)


def test_the_table_gives_each_code_its_status() -> None:
    assert server_problems() == table_problems(text_of(API))


def test_no_page_names_a_code_that_the_server_lacks() -> None:
    codes = {code for _, code in server_problems()}
    named = {name: named_codes(text_of(name), codes) for name in PAGES if name.startswith("docs/")}

    assert {} == {name: lacking for name, found in named.items() if (lacking := found - codes)}


def test_the_headers_on_the_page_are_the_servers() -> None:
    assert server_headers() == named_headers(text_of(API))


def test_the_headers_of_the_description_are_the_servers() -> None:
    description = yaml.safe_load(text_of(DESCRIPTION))
    parameters = description["components"]["parameters"].values()
    named = {each["name"].lower() for each in parameters if each["in"] == "header"}
    for responses in _responses(description):
        named |= {name.lower() for name in responses.get("headers", {})}

    # OpenAPI has words of its own for the first three, and a 405 belongs to no operation.
    elsewhere = {"authorization", "content-type", "www-authenticate", "allow"}
    assert server_headers() - elsewhere == named - elsewhere


def _responses(description: dict[str, object]) -> Iterator[dict[str, dict[str, object]]]:
    """Every object under a `responses`."""
    waiting: list[object] = [description]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            for name, value in each.items():
                if name == "responses":
                    yield from value.values()
                waiting.append(value)


def test_the_routes_on_the_page_are_those_of_the_description() -> None:
    """And those of the description are the server's: its own tests call each."""
    paths = yaml.safe_load(text_of(DESCRIPTION))["paths"]
    missing = [
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method in methods
        if method in _METHODS and f"{method.upper()} {path}" not in text_of(API)
    ]

    assert [] == missing


# ---------------------------------------------------------------- the checks themselves


def test_a_code_that_the_server_lacks_is_seen() -> None:
    known = {"lock_held", "not_found"}

    assert {"lock_gone", "not_found"} == named_codes(
        "`lock_gone`, `not_found`, `ttl_seconds`", known
    )


def test_a_header_is_seen_wherever_it_stands() -> None:
    text = "`X-Volcano-Gone: 1` and Retry-After, `Allow: GET`, Allow me"

    assert {"x-volcano-gone", "retry-after", "allow"} == named_headers(text)


def test_a_row_may_hold_several_codes() -> None:
    text = "| status | code | when |\n| --- | --- | --- |\n| 401 | `a_b`, `c_d` | x |\n"
    text += "| 404, 405 | `e_f`, `g_h` | y |\n\n| name | code |\n| --- | --- |\n| 1 | `i_j` |\n"

    assert {(401, "a_b"), (401, "c_d"), (404, "e_f"), (405, "g_h")} == table_problems(text)
