"""docs/errors.md names every code of the server, and every error of the SDKs' tree."""

import json
import re

import pytest
from pages import ROOT
from test_http_api import named_codes, server_problems, table_problems

import volcano_sdk
from volcano_sdk.errors import VolcanoError, from_status

PAGE = ROOT / "docs" / "errors.md"
TEXT = PAGE.read_text(encoding="utf-8")


def said() -> dict[tuple[int, str], str]:
    """{(409, "lock_held"): "ConflictError", …}: the rows of the first table."""
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| (\w+) \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
    assert all(meaning.strip() and advice.strip() for *_, meaning, advice in rows)
    return {(int(status), code): name for status, code, name, *_ in rows}


def python_tree() -> set[str]:
    errors = (getattr(volcano_sdk, name) for name in volcano_sdk.__all__)
    return {
        each.__name__
        for each in errors
        if isinstance(each, type) and issubclass(each, VolcanoError)
    }


def js_tree() -> set[str]:
    text = (ROOT / "sdks" / "js" / "source" / "errors.ts").read_text(encoding="utf-8")
    return set(re.findall(r"^export class (\w+)", text, re.MULTILINE))


def ruby_tree() -> set[str]:
    """Ruby's base is Volcano::Error; the page names it as the others do."""
    text = (ROOT / "sdks" / "ruby" / "lib" / "volcano" / "errors.rb").read_text(encoding="utf-8")
    below = re.findall(r"^ +class (\w+) < (?:Authentication)?Error\b", text, re.MULTILINE)
    return {"VolcanoError", *below}


def test_every_code_of_the_server_has_its_row() -> None:
    assert server_problems() == set(said()) == table_problems(TEXT)


def test_no_other_code_is_named() -> None:
    codes = {code for _, code in server_problems()}

    assert codes == named_codes(TEXT, codes)


@pytest.mark.parametrize(("status", "code"), sorted(server_problems()))
def test_the_error_is_what_the_sdks_make_of_it(status: int, code: str) -> None:
    table = json.loads((ROOT / "conformance" / "tables" / "error_names.json").read_text("utf-8"))
    shared = {(row["status"], row["code"]): row["error"] for row in table["rows"]}
    name = said()[status, code]

    assert from_status(status).__name__ == name
    assert shared.get((status, code), name) == name


@pytest.mark.parametrize("tree", [python_tree(), js_tree(), ruby_tree()], ids=["py", "js", "rb"])
def test_every_error_of_the_tree_is_on_the_page(tree: set[str]) -> None:
    named = set(re.findall(r"\b[A-Z][A-Za-z]+Error\b", TEXT))
    languages_own = {"ValueError", "TypeError", "RangeError", "ArgumentError"}

    assert {"LockLostError", "TransportError"} <= tree
    assert named - languages_own == tree
