"""docs/openapi.yaml is true to the code: valid, complete, and schemathesis finds nothing."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from openapi_spec_validator import validate
from schemathesis.config import SchemathesisConfig
from starlette.routing import Route

from volcano_server import problems
from volcano_server.routes import openapi_json
from volcano_server.testing import SERVICE_KEY, VolcanoServer, running_server

DESCRIPTION: dict[str, Any] = json.loads(openapi_json())


@pytest.fixture(scope="module")
def server() -> Iterator[VolcanoServer]:
    with running_server() as server:
        yield server


def test_the_description_is_valid() -> None:
    validate(DESCRIPTION)


def test_the_server_serves_its_description(server: VolcanoServer) -> None:
    answer = httpx.get(f"{server.url}/openapi.json", trust_env=False)

    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == DESCRIPTION


def test_every_error_code_is_described() -> None:
    source = problems.__doc__ or ""
    codes = set(re.findall(r"^ *[45]\d\d +(\w+)", source, re.MULTILINE))

    assert len(codes) == 12
    assert set(DESCRIPTION["components"]["schemas"]["Error"]["properties"]["code"]["enum"]) == codes


def test_every_route_is_described(server: VolcanoServer) -> None:
    """All but those under /_test, which exist on development servers alone."""
    routes = {each.path for each in server.app.routes if isinstance(each, Route)}

    described = set(DESCRIPTION["paths"])

    assert {each for each in routes if not each.startswith("/_test")} == described - {
        "/locks/{key}",
        "/locks/{key}/lease",
        "/lock-leases",
        "/lock-events",
    }


def test_every_operation_of_locks_names_every_refusal() -> None:
    for path, item in DESCRIPTION["paths"].items():
        if path.startswith("/lock"):
            for method in {"get", "post", "patch", "delete"} & set(item):
                statuses = {"400", "401", "403", "413", "429", "500", "503"}
                assert statuses <= set(item[method]["responses"]), (method, path)


SCHEMA = schemathesis.openapi.from_dict(
    DESCRIPTION, config=SchemathesisConfig.from_dict({"warnings": False})
)


@SCHEMA.hook("filter_case")
def leave_out_integral_floats(_: Any, case: Any) -> bool:
    """JSON Schema counts 30.0 as an integer; the protocol refuses it."""
    body = case.body
    if not isinstance(body, dict):
        return True
    leases = body.get("leases")
    ttls = [each for each in (leases if isinstance(leases, list) else []) if isinstance(each, dict)]
    return not any(isinstance(each.get("ttl_seconds"), float) for each in (body, *ttls))


# An event stream does not end: what else becomes of its request is in test_event_routes.py.
@SCHEMA.exclude(path="/lock-events").parametrize()
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_schemathesis_finds_nothing(case: Any, server: VolcanoServer) -> None:
    case.call_and_validate(base_url=server.url, headers={"Authorization": f"Bearer {SERVICE_KEY}"})


def test_the_yaml_reads_as_its_own_json() -> None:
    """No date, no octal number and no `no` that YAML turns into something else."""
    assert json.loads(json.dumps(DESCRIPTION)) == DESCRIPTION
    assert yaml.safe_load(yaml.safe_dump(DESCRIPTION)) == DESCRIPTION
