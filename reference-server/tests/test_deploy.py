"""The files under deploy/ and the SQL of docs/operations.md say what this server understands."""

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from click.testing import CliRunner
from postgres import Cluster

from volcano_server.access import Access, AccessError
from volcano_server.access_database import AccessDatabase
from volcano_server.app import create_app
from volcano_server.cli import commands
from volcano_server.clock import ManualClock, SystemClock
from volcano_server.database import Database, migrate
from volcano_server.lease import Acquire, Granted, SlotKey
from volcano_server.serving import GRACEFUL
from volcano_server.settings import DEFAULT_PORT
from volcano_server.stores.memory import MemoryStore
from volcano_server.stores.postgresql import PostgresqlStore

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd minds the case
    parser.read_string((DEPLOY / "volcano-server.service").read_text())
    assert set(parser.sections()) == {"Unit", "Service", "Install"}
    return parser["Service"]


@pytest.fixture
def kinds() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def is_understood(arguments: list[str]) -> bool:
    """True where only the store is missing, which comes from the environment."""
    done = CliRunner(env={"VOLCANO_STORE": None}).invoke(commands, arguments)
    return "Missing option '--store'" in done.output


def test_the_unit_starts_what_the_command_understands(unit: configparser.SectionProxy) -> None:
    program, *arguments = shlex.split(unit["ExecStart"])

    assert Path(program).name == "volcano-server"
    assert is_understood(arguments)
    assert not is_understood(["serve", "--frob"])


def test_the_unit_waits_for_the_stop_and_starts_again(unit: configparser.SectionProxy) -> None:
    assert int(unit["TimeoutStopSec"]) > GRACEFUL
    assert unit["Restart"] == "always"
    assert "EnvironmentFile" in unit
    assert "VOLCANO_STORE" not in unit


def test_the_pods_start_what_the_command_understands(kinds: dict[str, Any]) -> None:
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]

    assert container["command"][0] == "volcano-server"
    assert is_understood([*container["command"][1:], *container["args"]])
    (variable,) = container["env"]
    assert variable["name"] == "VOLCANO_STORE"
    assert set(variable["valueFrom"]) == {"secretKeyRef"}


def test_the_probes_ask_what_the_server_answers_and_long_enough(kinds: dict[str, Any]) -> None:
    spec = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    clock = ManualClock()
    paths = {getattr(r, "path", "") for r in create_app(MemoryStore(clock), Access(), clock).routes}

    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"/healthz", "/readyz"} <= paths
    assert container["readinessProbe"]["timeoutSeconds"] > 5
    (port,) = container["ports"]
    assert container["args"][-1] == str(port["containerPort"]) == str(DEFAULT_PORT)
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert spec["terminationGracePeriodSeconds"] > pause + GRACEFUL


def test_the_parts_of_the_deployment_belong_together(kinds: dict[str, Any]) -> None:
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]

    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["Service"]["spec"]["selector"] == labels
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.anyio
async def test_the_roles_of_the_page_can_do_their_work_and_no_more(cluster: Cluster) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    roles, grants = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)[:2]
    cluster.execute(*statements(roles))
    as_owner = Database.parse(cluster.url("locks", "volcano_owner"))
    as_server = cluster.url("locks", "volcano")
    migrate(as_owner)
    tables = AccessDatabase(as_owner)
    tables.create_project("shop")
    cluster.execute(*statements(grants), database="locks")

    store = PostgresqlStore(Database.parse(as_server), SystemClock())
    await store.open()
    (answer,) = await store.apply([Acquire(SlotKey("shop", "nightly"), "alice", 5)], lambda: True)
    assert isinstance(answer, Granted)
    assert await store.sweep(10) == 0
    assert await store.add({("shop", 1): 1}) == {("shop", 1): 1}
    await store.close()
    server_tables = AccessDatabase(Database.parse(as_server))
    Access(tables=server_tables).refresh()
    with pytest.raises(AccessError, match="permission denied"):
        server_tables.create_key("shop", kind="service")
    with psycopg.connect(as_server) as sql, pytest.raises(psycopg.errors.InsufficientPrivilege):
        sql.execute("DROP TABLE volcano.slots")
    server_tables.close()
    tables.close()


def statements(sql: str) -> list[str]:
    lines = [line.partition("--")[0].strip() for line in sql.splitlines()]
    return [statement for each in " ".join(lines).split(";") if (statement := each.strip())]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
