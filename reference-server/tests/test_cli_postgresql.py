"""The command over a PostgreSQL store; what it has in common with SQLite's is in test_cli.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from postgres import Cluster

from volcano_server.cli import commands, main


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.database()


def run(*arguments: str, store: str) -> str:
    done = CliRunner(env={"VOLCANO_STORE": store}).invoke(
        commands, arguments, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def fails(
    capsys: pytest.CaptureFixture[str], *arguments: str, store: str
) -> tuple[str, int | str | None]:
    """The one line on stderr, and the exit status."""
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--store", store])
    (line,) = capsys.readouterr().err.splitlines()
    return line, stopped.value.code


def test_the_tables_are_made_once_and_then_up_to_date(url: str) -> None:
    assert run("migrate", store=url) == run("migrate", store=url)
    assert "up to date" in run("migrate", store=url)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_keys_permissions_are_changed(kind: str, url: str, tmp_path: Path) -> None:
    store = url if kind == "postgresql" else f"sqlite:///{tmp_path}/locks.db"
    run("projects", "create", "shop", store=store)
    run("keys", "create", "--project", "shop", store=store)
    id_ = run("keys", "list", store=store).split("\t")[0]

    assert run("keys", "permit", id_, "--permission", "none", store=store) == (
        f"Key {id_}: no permissions.\n"
    )
    assert "\tservice\t-\t" in run("keys", "list", store=store)
    run("keys", "permit", id_, "--permission", "locks.manage", "--permission", "*", store=store)
    assert "\tservice\tlocks.manage *\t" in run("keys", "list", store=store)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("keys", "permit", "key_0"), 64, "--permission"),
        (("keys", "permit", "key_0", "--permission", "*"), 67, "'key_0'"),
        (("keys", "permit", "sk-very-secret", "--permission", "*"), 64, "KEY_ID"),
        (("projects", "create", "shop"), 73, "exists already"),
        (("projects", "quota", "bank", "5"), 67, "'bank'"),
        (("dev",), 64, "volcano-server serve"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str],
    url: str,
    arguments: tuple[str, ...],
    status: int,
    words: str,
) -> None:
    run("projects", "create", "shop", store=url)

    line, code = fails(capsys, *arguments, store=url)

    assert code == status, line
    assert words in line
    assert "very-secret" not in line


@pytest.mark.parametrize("command", [("migrate",), ("projects", "list"), ("keys", "list")])
def test_an_unreachable_database_is_one_line_without_the_password(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    line, code = fails(capsys, *command, store="postgresql://u:secret@127.0.0.1:1/d")

    assert code == 69, line
    assert "postgresql://127.0.0.1/d" in line
    assert "secret" not in line


def test_only_a_database_has_tables_to_migrate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line, code = fails(capsys, "migrate", store=f"sqlite:///{tmp_path}/locks.db")

    assert code == 64
    assert "postgresql://" in line


def test_without_the_driver_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from volcano_server.cli import main\n"
        "main(['serve', '--port', '0', '--store', 'postgresql://127.0.0.1:1/d'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )

    assert done.returncode == 64
    assert "pip install 'volcano-server[postgresql]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
