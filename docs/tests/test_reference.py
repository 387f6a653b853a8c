"""The HTTP reference says all that the OpenAPI description says."""

import re

import pytest
import yaml
from layout import DESCRIPTION
from pages import read
from reference import METHODS, reference

OPENAPI = yaml.safe_load(DESCRIPTION.read_text(encoding="utf-8"))
OPERATIONS = [
    (method, path, item[method])
    for path, item in OPENAPI["paths"].items()
    for method in METHODS
    if method in item
]


def section(text: str, summary: str) -> str:
    return text.partition(f"\n## {summary}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("method", "path", "operation"), OPERATIONS, ids=[each[2]["operationId"] for each in OPERATIONS]
)
def test_every_operation_is_there_with_its_answers(
    method: str, path: str, operation: dict[str, dict[str, object]]
) -> None:
    said = section(reference(OPENAPI), str(operation["summary"]))

    assert f"`{method.upper()} {path}`" in said
    statuses = re.findall(r"^\| (\d{3}) \|", said, re.MULTILINE)
    assert list(operation["responses"]) == statuses
    assert ("With `Authorization" in said) == ("security" not in operation)


def test_the_reference_says_what_an_acquire_takes_and_gives() -> None:
    said = section(reference(OPENAPI), "Take a free key, or repeat your own acquire")

    for each in (
        "| `key` | path | The lock's name, one percent-encoded segment (string, `^[A-Za-z0-9]",
        "| `X-Volcano-Lock-Token` | header |",
        "| `ttl_seconds` | body | Written as a JSON integer; `30.0` is refused (integer, 5 to",
        "| 201 | The lease is yours | `X-Volcano-Expires-In`, `X-Volcano-Request-Id`,",
        '| `{"expires_at", "fencing_token"}` |',
        "| 409 | `lock_held`: another lease",
    ):
        assert each in said


def test_alternatives_lists_and_optional_members_are_shown() -> None:
    schema = {
        "type": "object",
        "required": ["all"],
        "properties": {
            "all": {
                "type": "array",
                "items": {
                    "oneOf": [
                        {"required": ["a"], "properties": {"a": {"const": True}}},
                        {"required": ["b"], "properties": {"b": {}, "c": {}}},
                    ]
                },
            }
        },
    }
    answer = {"description": "x", "content": {"application/json": {"schema": schema}}}
    operation = {"summary": "S", "responses": {"200": answer}}

    said = reference({"info": {"description": ""}, "paths": {"/p": {"get": operation}}})

    assert '`{"all": [{"a": true} or {"b", "c"?}, …]}`' in said


def test_the_page_has_no_faults() -> None:
    assert [] == read("docs/http-reference.md", reference(OPENAPI)).faults
