"""Every example has a README with the one command that runs it."""

import pytest
from running import EXAMPLES, languages

NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/show.sh"))


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_names_the_command(name: str) -> None:
    readme = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")

    assert f"./dev example {name}\n" in readme


def test_the_list_of_examples_is_whole() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")

    for name in NAMES:
        assert f"]({name}/README.md)" in readme


def test_each_language_has_two_or_more() -> None:
    for language in ("js", "ruby"):
        assert sum(language in languages(name) for name in NAMES) >= 2
    assert sum(not languages(name) for name in NAMES) >= 2
