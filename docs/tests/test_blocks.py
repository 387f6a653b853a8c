"""Every code block of every page runs, or says why it does not."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pages import Page, Program, is_printed, pages, read
from programs import empty, run, server

PAGES = list(pages().values())


def programs(page: Page) -> list[Program]:
    try:
        return page.programs
    except ValueError:
        return []  # test_every_block_can_run_or_says_why_not tells which


PROGRAMS = [program for page in PAGES for program in programs(page)]
LEFT_OUT = set(os.environ.get("VOLCANO_TEST_WITHOUT", "").split())


@pytest.fixture(scope="module")
def environment() -> Iterator[Mapping[str, str]]:
    with server() as variables:
        yield variables


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_block_can_run_or_says_why_not(page: Page) -> None:
    assert not page.faults, "\n".join(page.faults)
    assert page.programs is not None  # raises where a mark refers to nothing


@pytest.mark.timeout(60)
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_every_program_does_what_its_page_says(
    program: Program, environment: Mapping[str, str], tmp_path: Path
) -> None:
    if {"ts": "js"}.get(program.language, program.language) in LEFT_OUT:
        pytest.skip(f"--without {program.language}")
    if program.language == "sh" and "curl" in program.source and not shutil.which("curl"):
        pytest.skip("curl is not on PATH")
    empty(environment)

    ended = run(program, tmp_path, environment)

    shown = f"{program.name} ended with {ended.status}\n{ended.printed}\n{ended.trouble}"
    assert 0 == ended.status, shown
    if program.prints is not None:
        assert is_printed(program.prints, ended.printed), f"{shown}\nThe page says:{program.prints}"


# ---------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nls\n```", "without a language"),
        ("    ls\n", "without a language"),
        ("```console\n$ ls\n```", "console cannot be run"),
        ("<!-- not run -->\n```sh\nls\n```", "gives no reason"),
        ("<!-- not run: no -->\n```sh\nls\n```", "gives no reason"),
        ("<!-- norun: needs a network -->\n```sh\nls\n```", "no mark that we know"),
        ('```json\n{"held": }\n```', "this is not json"),
        ("```yaml\na: [\n```", "this is not yaml"),
        ("```toml\na\n```", "this is not toml"),
        ("<!-- continues -->\n```text\nls\n```", "runs in no program"),
        ("<!-- prints -->\n```sh\nls\n```", "the output of a program is text or data"),
        ("1. a list\n\n   ```\n   ls\n   ```", "without a language"),
        ('<a id="a"></a>\n\n<a id="a"></a>\n', "the anchor a is there twice"),
    ],
)
def test_a_block_that_nothing_checks_is_a_fault(text: str, fault: str) -> None:
    faults = read("page.md", text).faults

    assert 1 == len(faults)
    assert fault in faults[0]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- continues -->\n```sh\nls\n```",
        "```python\nx = 1\n```\n<!-- continues -->\n```sh\nls\n```",
        "<!-- prints -->\n```text\nhi\n```",
        "```sh\necho hi\n```\n```text\nhi\n```\n<!-- prints -->\n```text\nhi\n```",
    ],
)
def test_a_mark_that_refers_to_nothing_is_a_fault(text: str) -> None:
    with pytest.raises(ValueError, match=r"nothing|no program"):
        _ = read("page.md", text).programs


@pytest.mark.parametrize(
    "code",
    [
        "```python\nraise SystemExit(3)\n```",
        "```python\nimport volcano_sdk_that_is_not\n```",
        "```python\ndef test_it():\n    assert False\n```",
        "```python\nasync def test_it():\n    pass\n```",  # pytest alone does not run it
        "```sh\nfalse\ntrue\n```",
        '```sh\necho "$VOLCANO_NO_SUCH_NAME"\n```',
        "```sql\nselect 1 from nowhere;\n```",
        "```sql\nselect 1\n```",
    ],
)
def test_a_program_that_fails_is_seen(code: str, tmp_path: Path) -> None:
    [program] = read("page.md", code).programs

    assert 0 != run(program, tmp_path, {}).status


def test_lines_keep_the_numbers_that_they_have_on_the_page(tmp_path: Path) -> None:
    text = (
        "<!-- setup\nx = 1\n-->\n```python\nx += 1\n```\n\nprose\n\n"
        "<!-- continues -->\n```python\nassert x == 3\n```\n"
    )
    [program] = read("page.md", text).programs

    ended = run(program, tmp_path, {})

    assert ["", "x = 1", "", "", "x += 1"] == program.source.splitlines()[:5]
    assert 1 == ended.status
    assert "line 12" in ended.trouble


def test_what_is_printed_is_compared_as_a_whole() -> None:
    text = "```sql\nselect 1, null;\nselect 2;\n```\n<!-- prints -->\n```text\n1|\n2\n```\n"
    [program] = read("page.md", text).programs

    assert "1|\n2\n" == program.prints
    assert is_printed("1|\n2\n", "1|\n2")
    assert is_printed('{"expires_at": "…", "n": 1}', '{"expires_at": "2026-01-01", "n": 1}\n')
    assert not is_printed("1|\n", "1|\n2")
    assert not is_printed("a.c", "abc")


def test_the_readme_has_programs() -> None:
    """So that none of the above passes because nothing was found."""
    found = {program.page for program in PROGRAMS}

    assert {"README.md", "docs/fencing.md", "docs/http-api.md", "docs/sdks/python.md"} <= found
