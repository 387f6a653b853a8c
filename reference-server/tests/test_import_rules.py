"""Who may import whom: one direction, outside in, and effects only where they belong."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "volcano_server"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# From the outside in.  A module imports its own package only from rings below its own.
RINGS = (
    {"__main__"},
    {"cli", "testing"},
    {"app", "serving"},
    {"routes"},
    {"event_response", "event_metrics", "service"},
    {"hub"},
    {"following", "room", "feed"},
    {"subscription"},
    {"wire_events"},
    {
        *("batch", "stores.sweeper", "stores.memory", "stores.sqlite", "stores.postgresql"),
        "access_database",
    },
    {"database", "news"},
    {"events", "stores.store", "access", "settings", "logs", "agenda", "in_process"},
    {"wire", "clock"},
    {"lease", "quota"},
    {"fencing", "problems"},
    {"value"},
)
PURE = {"value", "lease", "fencing", "quota", "wire", "problems", "events", "news", "wire_events"}
EFFECTS = {"time", "random", "os", "asyncio", "threading", "sqlite3", "starlette", "secrets"}
ONLY_IN = {
    # The last four name its types only.
    "starlette": {*("routes", "app", "serving", "testing", "event_response", "in_process")},
    "sse_starlette": {"event_response"},
    "sqlite3": {"stores.sqlite", "access"},  # access keeps credentials in a file of their own
    "uvicorn": {"serving"},
    "click": {"cli"},
    "pytest": {"testing"},
    "httpx": {"in_process"},
    "psycopg": {"database", "stores.postgresql", "access_database"},
}


def module_name(path: Path) -> str:
    """`stores/sqlite.py` -> `stores.sqlite`; a package's `__init__` has the package's name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def imports(name: str) -> Iterator[str]:
    """What a module imports, in full, wherever in the file: `asyncio`, `volcano_server.lease`."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                yield f"{PACKAGE}.{inner}" if inner in MODULES else node.module


def own_imports(name: str) -> set[str]:
    prefix = f"{PACKAGE}."
    return {target.removeprefix(prefix) for target in imports(name) if target.startswith(prefix)}


def ring(name: str) -> int:
    found = [number for number, names in enumerate(RINGS) if name in names]
    assert found, f"{name} has no ring yet: say in this file where it belongs"
    return found[0]


WITH_A_RING = sorted(name for name in MODULES if name not in {"", "stores"})


@pytest.mark.parametrize("name", WITH_A_RING)
def test_a_module_imports_only_from_rings_below_its_own(name: str) -> None:
    allowed = {"lease", "quota", "fencing", "problems"}  # the lease rules may name their problems

    wrong = {
        target
        for target in own_imports(name)
        if ring(target) <= ring(name) and not {name, target} <= allowed
    }

    assert wrong == set()


@pytest.mark.parametrize("name", sorted(PURE & set(MODULES)))
def test_the_pure_ring_touches_nothing_outside_itself(name: str) -> None:
    roots = {target.split(".")[0] for target in imports(name)}

    assert roots & EFFECTS == set()
    assert own_imports(name) <= PURE


@pytest.mark.parametrize("name", sorted(set(MODULES)))
def test_a_library_stays_in_the_modules_that_are_about_it(name: str) -> None:
    roots = {target.split(".")[0] for target in imports(name)}

    wrong = {root for root in roots if name not in ONLY_IN.get(root, {name})}

    assert wrong == set()


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("stores.")))
def test_a_store_knows_the_lease_rules_and_the_seam_only(name: str) -> None:
    assert own_imports(name) <= {"lease", "fencing", "clock", "stores.store", "database", "news"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_server_imports_nothing_from_another_room(name: str) -> None:
    roots = {target.split(".")[0] for target in imports(name)}

    assert roots & {"volcano_sdk", "conformance"} == set()


def test_the_rules_look_at_the_files_that_are_there() -> None:
    """A moved source folder must not make every rule above vacuous."""
    assert {"lease", "fencing", "problems", "clock", "stores.store"} <= set(MODULES)
    assert "volcano_server.problems" in set(imports("lease"))
    libraries = {"starlette", "sse_starlette", "uvicorn", "click", "pytest", "httpx", "psycopg"}
    assert set(ONLY_IN) - libraries <= set(sys.stdlib_module_names)
