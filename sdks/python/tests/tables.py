"""The rules that all SDKs share, as data: conformance/tables."""

import json
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[3] / "conformance" / "tables"


def rows(name: str, *, having: str | None = None) -> list[dict[str, Any]]:
    """The rows of one table; a missing or empty one is an error, never a silent pass.

    `having`: only those with this field; the others are for servers.
    """
    found: list[dict[str, Any]] = json.loads((TABLES / f"{name}.json").read_text())["rows"]
    found = [row for row in found if having is None or having in row]
    assert found, f"{name}.json has no rows"
    return found


def section(name: str, part: str) -> list[dict[str, Any]]:
    """The rows of a further part of a table."""
    found: list[dict[str, Any]] = json.loads((TABLES / f"{name}.json").read_text())[part]
    assert found, f"{name}.json has no {part}"
    return found
