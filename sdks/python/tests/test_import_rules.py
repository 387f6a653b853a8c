"""Who may import whom: one direction, pure decisions apart from effects, two dependencies."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "volcano_sdk"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# From the outside in.  A module imports its own package only from rings below its own.
RINGS = (
    {"client", "async_client"},
    {"locks", "async_locks"},
    {"async_waiters", "async_watch"},
    {"guard", "async_guard", "async_calls", "acquisition", "watch"},
    {"held", "async_renewal"},
    {"runtime"},
    {"renewals", "waiters"},
    {"transport", "async_transport", "async_shield"},
    {"lane", "async_lane"},
    {"threads", "endpoint", "waiting"},
    {"renew_many", "subscription"},
    {"async_clock", "renewal", "settings", "tokens", "version", "events"},
    {"operations", "clock"},
    {"lease", "errors"},
)
PURE = {
    "operations",
    "renewal",
    "renew_many",
    "tokens",
    "lease",
    "errors",
    "events",
    "subscription",
    "waiting",
}
EFFECTS = {"time", "random", "os", "asyncio", "threading", "socket", "anyio", "httpx", "httpcore"}
DEPENDENCIES = {"httpx", "httpcore", "anyio"}
TRANSPORT = {"endpoint", "lane", "async_lane", "transport", "async_transport"}
ONLY_IN = {"httpx": TRANSPORT, "httpcore": TRANSPORT, "time": {"clock"}}

MODULES = {
    ".".join(part for part in path.relative_to(SOURCE).with_suffix("").parts): path
    for path in SOURCE.rglob("*.py")
    if path != SOURCE / "__init__.py"
}


def imports(name: str) -> Iterator[str]:
    """What a module imports when it runs, in full, wherever in the file."""
    for node in running(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                yield f"{PACKAGE}.{inner}" if inner in MODULES else node.module


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`, which only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from running(child)


def own_imports(name: str) -> set[str]:
    prefix = f"{PACKAGE}."
    return {target.removeprefix(prefix) for target in imports(name) if target.startswith(prefix)}


def roots(name: str) -> set[str]:
    return {target.split(".")[0] for target in imports(name)}


def ring(name: str) -> int:
    found = [number for number, names in enumerate(RINGS) if name in names]
    assert found, f"{name} has no ring yet: say in this file where it belongs"
    return found[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_from_rings_below_its_own(name: str) -> None:
    own = ring(name)

    assert {target for target in own_imports(name) if ring(target) <= own} == set()


@pytest.mark.parametrize("name", sorted(PURE & set(MODULES)))
def test_the_pure_modules_do_no_input_or_output(name: str) -> None:
    """So the sync and the async client share them, and each twin is plumbing only."""
    assert roots(name) & EFFECTS == set()
    assert own_imports(name) <= PURE


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_network_and_the_clock_have_one_home_each(name: str) -> None:
    assert {root for root in roots(name) if name not in ONLY_IN.get(root, {name})} == set()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_but_the_declared_dependencies_is_imported(name: str) -> None:
    """Neither another room of this repository nor what httpx happens to bring along."""
    assert roots(name) - {PACKAGE} - DEPENDENCIES <= set(sys.stdlib_module_names)


def test_the_rules_look_at_the_files_that_are_there() -> None:
    """A moved source folder must not make every rule above vacuous."""
    assert {"operations", "renewal", "lease", "errors", "clock"} <= set(MODULES)
    assert "volcano_sdk.errors" in set(imports("operations"))
