"""The HTTP reference: an OpenAPI description as a page of Markdown.  Pure; layout.py writes it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

METHODS = ("get", "post", "patch", "put", "delete")
Node = Mapping[str, Any]


def reference(description: Node) -> str:
    """One section for each operation: what it takes, what it answers."""
    return "\n".join(_page(description)) + "\n"


def _page(description: Node) -> Iterator[str]:
    yield "# HTTP reference"
    yield ""
    yield "Made from [openapi.yaml](openapi.yaml), which every server serves at `/openapi.json`."
    yield "Examples and headers: [HTTP API](http-api.md). The rules: [semantics](semantics.md)."
    yield ""
    yield str(description["info"]["description"])
    for path, item in description["paths"].items():
        for method in METHODS:
            if method in item:
                yield from _operation(description, f"{method.upper()} {path}", item, item[method])


def _operation(description: Node, title: str, item: Node, operation: Node) -> Iterator[str]:
    yield f"## {operation['summary']}"
    yield ""
    yield f"`{title}`"
    yield ""
    if operation.get("security", True):
        yield "With `Authorization: Bearer <service key>`."
        yield ""
    both = (*item.get("parameters", ()), *operation.get("parameters", ()))
    parameters = [_followed(description, each) for each in both]
    body = _followed(description, operation.get("requestBody", {}))
    members = [row for content in _schemas(body) for row in _members(description, content, "body")]
    if parameters or members:
        yield "| takes | in | what |"
        yield "| --- | --- | --- |"
        for each in parameters:
            what = _joined(each.get("description"), _form(description, each["schema"]))
            yield f"| `{each['name']}` | {each['in']} | {what} |"
        yield from (f"| `{name}` | {where} | {what} |" for name, where, what in members)
        yield ""
    yield "| answers | when | headers | body |"
    yield "| --- | --- | --- | --- |"
    for status, reference_to in operation["responses"].items():
        response = _followed(description, reference_to)
        headers = ", ".join(f"`{name}`" for name in response.get("headers", {}))
        shapes = (_shape(description, schema) for schema in _schemas(response))
        yield f"| {status} | {response['description']} | {headers} | {'; '.join(shapes)} |"
    yield ""


def _followed(description: Node, node: Node) -> Node:
    """The node that a `$ref` names, or the node itself."""
    while "$ref" in node:
        target: Any = description
        for part in node["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        node = target
    return node


def _schemas(holder: Node) -> list[Node]:
    return [content["schema"] for content in holder.get("content", {}).values()]


def _members(description: Node, schema: Node, where: str) -> Iterator[tuple[str, str, str]]:
    """("leases[].key", "body", "…"): the members of an object, and of the objects in its lists."""
    schema = _followed(description, schema)
    for name, node in schema.get("properties", {}).items():
        member = _followed(description, node)
        yield name, where, _joined(member.get("description"), _form(description, member))
        if member.get("type") == "array":
            for below, _, what in _members(description, member["items"], where):
                yield f"{name}[].{below}", where, what


def _shape(description: Node, schema: Node) -> str:
    """`{"held", "expires_at"}`: the members of an answer; alternatives with *or*."""
    schema = _followed(description, schema)
    if "oneOf" in schema:
        return " or ".join(_shape(description, each) for each in schema["oneOf"])
    parts = []
    for name, node in schema.get("properties", {}).items():
        member = _followed(description, node)
        optional = "" if name in schema.get("required", ()) else "?"
        if "const" in member:
            parts.append(f'"{name}": {json.dumps(member["const"])}')
        elif member.get("type") == "array":
            inner = _shape(description, member["items"]).replace("`", "")
            parts.append(f'"{name}": [{inner}, …]')
        else:
            parts.append(f'"{name}"{optional}')
    return f"`{{{', '.join(parts)}}}`" if parts else str(schema.get("type", "any"))


def _form(description: Node, schema: Node) -> str:
    """`an integer from 5 to 7776000`; `matches …`."""
    schema = _followed(description, schema)
    words = [f"{schema['type']}"] if "type" in schema else []
    low = schema.get("minimum", schema.get("minItems"))
    high = schema.get("maximum", schema.get("maxItems"))
    if low is not None and high is not None:
        words.append(f"{low} to {high}")
    elif low is not None:
        words.append(f"at least {low}")
    if "pattern" in schema:
        words.append(f"`{schema['pattern']}`".replace("|", r"\|"))
    return ", ".join(words)


def _joined(text: str | None, form: str) -> str:
    return f"{text.rstrip('.')} ({form})" if text and form else text or form
