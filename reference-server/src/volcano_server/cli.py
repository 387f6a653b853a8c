"""The command `volcano-server`: dev, serve, migrate, keys, projects.

A user's mistake is one line on stderr and a status of sysexits.h, never a traceback:

    64 usage          65 not our data, or newer   66 no such file      67 no such project or key
    68 no such host   69 port in use              73 cannot create     74 disk error
    75 database in use by another server          77 not permitted
"""

import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from volcano_server.access import (
    DEFAULT_QUOTA,
    EVERYTHING,
    MANAGE_LOCKS,
    Access,
    AccessError,
    AccessFile,
    AccessTables,
    Caller,
    Kind,
)
from volcano_server.clock import HostClock
from volcano_server.logs import Log, silence_uvicorn
from volcano_server.settings import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    SettingError,
    Settings,
    is_database_url,
    parse_store_url,
)
from volcano_server.stores.store import SharedCounts, Store, StoreOpenError

if TYPE_CHECKING:
    from volcano_server.database import Database

DEV_PROJECT = "dev"
DEV_SERVICE_KEY = "sk-dev-volcano-local-service-key"
DEV_ANON_KEY = "ak-dev-volcano-local-anon-key"
DEV_STORE = Path("volcano-dev.db")

_KEY_TEXT = re.compile(r"[!-~]{8,200}")
_PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_QUOTAS = click.IntRange(min=0, max=1_000_000_000)


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script."""
    try:
        status = commands.main(arguments, prog_name="volcano-server", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(64)
    except click.ClickException as error:
        _fail(error.format_message(), 64)
    except (SettingError, AccessError, StoreOpenError) as error:
        _fail(str(error), error.exit_status)
    except OSError as error:  # without a file's name it is about the output
        if error.filename is None:
            # Python would try once more at its end, and say so in its own words.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"cannot use {error.filename or 'the output'}: {error.strerror}", 74)  # EX_IOERR
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


def _fail(sentence: str, status: int) -> NoReturn:
    line = " ".join(sentence.split())
    click.echo(f"volcano-server: {line}", err=True)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="volcano-server")
def commands() -> None:
    """A lock server: renewable leases with fencing tokens."""


_store_option = click.option(
    "--store",
    envvar="VOLCANO_STORE",
    required=True,
    metavar="URL",
    show_envvar=True,
    help="sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host:5432/database",
)


_host_option = click.option(
    "--host", envvar="VOLCANO_HOST", default=DEFAULT_HOST, show_default=True, show_envvar=True
)
_port_option = click.option(
    "--port",
    envvar="VOLCANO_PORT",
    type=int,
    default=DEFAULT_PORT,
    show_default=True,
    show_envvar=True,
    help="0 takes any free one.",
)
_log_option = click.option(
    "--log-requests",
    envvar="VOLCANO_LOG_REQUESTS",
    is_flag=True,
    help="One JSON line a request, on stderr.",
)


# ---------------------------------------------------------------- serve


@commands.command()
@_store_option
@_host_option
@_port_option
@_log_option
def serve(store: str, host: str, port: int, *, log_requests: bool) -> None:
    """Run a server for production.  SIGTERM finishes what was accepted."""
    from volcano_server.clock import SystemClock
    from volcano_server.serving import bind, url_of

    log = Log()
    clock = SystemClock()
    opened, counts, shown = _store(store, clock, log)
    with bind(host, port) as listener:
        _run(
            opened,
            Access(tables=_access_tables(store)),
            clock,
            Settings(log_requests=log_requests),
            log,
            listener,
            ready=lambda: log.note("server_started", url=url_of(listener), store=shown),
            counts=counts,
        )
    log.note("server_stopped")


def _store(url: str, clock: HostClock, log: Log) -> tuple[Store, SharedCounts | None, str]:
    """The store, where replicas add up their counts if it is shared, and its name for people."""
    if not is_database_url(url):
        from volcano_server.stores.sqlite import SqliteStore

        path = parse_store_url(url)
        return SqliteStore(path, clock), None, str(path)
    database = _database(url)
    from volcano_server.stores.postgresql import PostgresqlStore

    def stepped(seconds: float) -> None:
        log.trouble("database_clock_stepped", seconds=round(seconds, 3))

    store = PostgresqlStore(database, clock, on_clock_step=stepped)
    return store, store, database.shown


def _database(url: str) -> "Database":
    try:
        from volcano_server.database import Database
    except ImportError as error:
        raise SettingError(
            "--store: PostgreSQL needs a driver; pip install 'volcano-server[postgresql]'"
            f" ({error})"
        ) from None
    try:
        return Database.parse(url)
    except ValueError as error:
        raise SettingError(
            f"--store: {error}; send postgresql://user@host:5432/database, several hosts being"
            " postgresql://user@one:5432,two:5432/database"
        ) from None


@commands.command("migrate")
@_store_option
def migrate_command(store: str) -> None:
    """Make or bring up to date the tables in PostgreSQL.

    `serve` does so by itself where its role may; with this it needs no right to.
    """
    if not is_database_url(store):
        raise SettingError("--store: only a postgresql:// store has tables to migrate beforehand")
    database = _database(store)
    from volcano_server.database import migrate

    migrate(database)
    click.echo(f"The tables in {database.shown} are up to date.")


# ---------------------------------------------------------------- dev


@commands.command()
@_host_option
@_port_option
@_log_option
@click.option(  # not from the environment: production's store is no place for well-known keys
    "--store", metavar="URL", help="Another file than volcano-dev.db, as sqlite:///PATH."
)
@click.option("--ephemeral", is_flag=True, help="Keep leases in memory, write no file.")
@click.option("--reset", is_flag=True, help="Begin with an empty file.")
@click.option(
    "--quota",
    type=_QUOTAS,
    default=DEFAULT_QUOTA,
    show_default=True,
    help="Requests a minute, 0 for no limit.",
)
@click.option("--service-key", default=DEV_SERVICE_KEY, help="Instead of the well-known one.")
@click.option("--anon-key", default=DEV_ANON_KEY, help="Instead of the well-known one.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one line of JSON when requests are accepted."
)
def dev(
    host: str,
    port: int,
    store: str | None,
    quota: int,
    service_key: str,
    anon_key: str,
    **flags: bool,
) -> None:
    """Run a server for development: no set-up, project `dev`, well-known keys."""
    from volcano_server.clock import MovableClock
    from volcano_server.serving import bind, url_of
    from volcano_server.stores.memory import MemoryStore
    from volcano_server.stores.sqlite import SqliteStore

    ephemeral = flags["ephemeral"]
    if ephemeral and store is not None:
        raise SettingError("--ephemeral writes no file; leave out --store or --ephemeral")
    if store is not None and is_database_url(store):
        raise SettingError(
            "--store: a development server keeps its leases in a file; send sqlite:///path.db,"
            " or use `volcano-server serve`"
        )
    _check_dev_key("--service-key", service_key, "sk-")
    _check_dev_key("--anon-key", anon_key, "ak-")
    _check_well_known_keys(host, {service_key, anon_key})
    path = DEV_STORE if store is None else parse_store_url(store)
    clock = MovableClock()
    access = Access(
        {
            service_key: Caller(DEV_PROJECT, "dev-service", quota=quota),
            anon_key: Caller(DEV_PROJECT, "dev-anon", kind="anon", quota=quota),
        },
        tables=None if ephemeral else AccessFile.beside(path),
    )
    with bind(host, port) as listener:
        if flags["reset"] and not ephemeral:
            _delete_store(path)
        facts = {
            "url": url_of(listener),
            "project": DEV_PROJECT,
            "service_key": service_key,
            "anon_key": anon_key,
            "store": "memory" if ephemeral else f"sqlite:///{path}",
        }
        said = json.dumps(facts) if flags["as_json"] else _banner(facts, quota=quota)
        _run(
            MemoryStore(clock) if ephemeral else SqliteStore(path, clock),
            access,
            clock,
            Settings(log_requests=flags["log_requests"], test_controls=True),
            Log(quiet=True),
            listener,
            ready=lambda: click.echo(said),
        )
    if not flags["as_json"]:
        after_the_ctrl_c = "\n" if sys.stdout.isatty() else ""
        kept = "" if ephemeral else f" The leases are kept in {path}."
        click.echo(f"{after_the_ctrl_c}Stopped.{kept}")


def _banner(facts: dict[str, str], *, quota: int) -> str:
    limit = f"{quota} requests a minute" if quota else "no quota"
    return f"""Volcano locks on {facts["url"]}
  project {facts["project"]}, {limit}, leases in {facts["store"]}
  for development only; Ctrl-C stops it

export VOLCANO_API_URL={facts["url"]}
export VOLCANO_ANON_KEY={facts["anon_key"]}
export VOLCANO_SERVICE_KEY={facts["service_key"]}
"""


def _check_dev_key(option: str, key: str, prefix: str) -> None:
    if not key.startswith(prefix) or _KEY_TEXT.fullmatch(key) is None:
        raise SettingError(
            f"{option}: {len(key)} characters came that are no such key; "
            f"send {prefix} and 5 or more printable ASCII characters"
        )


def _check_well_known_keys(host: str, keys: set[str]) -> None:
    """Everybody knows these keys, so they may guard only what this machine alone can reach."""
    if keys.isdisjoint((DEV_SERVICE_KEY, DEV_ANON_KEY)) or _is_loopback(host):
        return
    raise SettingError(
        f"--host: {host!r} can be reached from other machines, and everybody knows the development "
        "keys; choose 127.0.0.1, or send both --service-key and --anon-key"
    )


def _is_loopback(host: str) -> bool:
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return True  # no such host: bind() says so
    return all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in addresses)


def _delete_store(path: Path) -> None:
    """Delete a development store that no server uses."""
    import asyncio

    from volcano_server.clock import SystemClock
    from volcano_server.stores.sqlite import SqliteStore

    if not path.exists():
        return

    async def check() -> None:
        store = SqliteStore(path, SystemClock())
        await store.open()
        await store.close()

    asyncio.run(check())
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))):
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            raise SettingError(f"--reset: cannot delete {each}: {error.strerror}", 73) from None


def _run(
    store: Store,
    access: Access,
    clock: HostClock,
    settings: Settings,
    log: Log,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    counts: SharedCounts | None = None,
) -> None:
    """Serve until a signal.  Raises what the app could not start for."""
    import gc

    from volcano_server.app import create_app
    from volcano_server.serving import JsonServer, allow_many_connections

    silence_uvicorn()
    allow_many_connections()
    app = create_app(store, access, clock, settings, log=log, counts=counts)

    def started() -> None:
        # What lives now lives until the end: the collector need not look at it. Halves p99.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        # The store's thread asks a busy loop for the interpreter a few times a batch; 5 ms is long.
        sys.setswitchinterval(0.0005)
        ready()

    try:
        JsonServer(app, on_ready=started).run(sockets=[listener])
    except SystemExit:
        error = getattr(app.state, "startup_error", None)
        if error is None:
            raise
        raise error from None


# ---------------------------------------------------------------- projects and keys


@commands.group()
def projects() -> None:
    """Create and list projects, set their quotas."""


@projects.command("create")
@click.argument("name")
@_store_option
@click.option(
    "--quota", type=_QUOTAS, default=DEFAULT_QUOTA, show_default=True,
    help="Requests a minute, 0 for no limit.",
)  # fmt: skip
def create_project(name: str, store: str, quota: int) -> None:
    """Create a project."""
    if _PROJECT_NAME.fullmatch(name) is None:
        raise SettingError(
            f"NAME: got {name!r}; send 1 to 63 of a-z 0-9 and -, beginning with a letter or digit"
        )
    _access_tables(store).create_project(name, quota=quota)
    click.echo(f"Created project {name}, {_quota_words(quota)}.")


@projects.command("list")
@_store_option
def list_projects(store: str) -> None:
    """List projects and their quotas."""
    for project in _access_tables(store).projects():
        click.echo(f"{project.name}\t{_quota_words(project.quota)}")


@projects.command("quota")
@click.argument("name")
@click.argument("requests_per_minute", type=_QUOTAS)
@_store_option
def set_quota(name: str, requests_per_minute: int, store: str) -> None:
    """Set a project's requests a minute, 0 for no limit.  A running server follows within 2 s."""
    _access_tables(store).set_quota(name, requests_per_minute)
    click.echo(f"Project {name}: {_quota_words(requests_per_minute)}.")


_permission_option = click.option(
    "--permission",
    "permissions",
    multiple=True,
    type=click.Choice([MANAGE_LOCKS, EVERYTHING, "none"]),
    help=f"Of a service key; may be repeated; {MANAGE_LOCKS} for a new one unless given.",
)


@commands.group()
def keys() -> None:
    """Create, list and revoke keys.  A running server follows within 2 s."""


@keys.command("create")
@click.option("--project", required=True)
@click.option("--anon", "kind", flag_value="anon", help="An anon key, which may not use locks.")
@click.option("--service", "kind", flag_value="service", default="service", help="The default.")
@_permission_option
@_store_option
def create_key(project: str, kind: Kind, permissions: tuple[str, ...], store: str) -> None:
    """Create a key.  It is shown this once, on stdout, and kept nowhere."""
    if kind == "anon" and permissions:
        raise SettingError("--permission: an anon key has none; leave out --permission or --anon")
    granted = tuple(each for each in permissions if each != "none")
    key, id_ = _access_tables(store).create_key(
        project, kind=kind, permissions=granted if permissions else (MANAGE_LOCKS,)
    )
    click.echo(f"Created {id_}. Keep the key: it is not shown again.", err=True)
    click.echo(key)


@keys.command("list")
@click.option("--project", help="Only this one's.")
@_store_option
def list_keys(project: str | None, store: str) -> None:
    """List keys by their ids; the keys themselves are kept nowhere."""
    for key in _access_tables(store).keys(project):
        state = "active" if key.revoked_at is None else f"revoked {_day(key.revoked_at)}"
        permissions = " ".join(key.permissions) or "-"
        row = (key.id, key.project, key.kind, permissions, f"created {_day(key.created_at)}", state)
        click.echo("\t".join(row))


@keys.command("permit")
@click.argument("key_id")
@_permission_option
@_store_option
def permit_key(key_id: str, permissions: tuple[str, ...], store: str) -> None:
    """Set the permissions of the service key with this id; `--permission none` takes all away."""
    if not permissions:
        raise SettingError(f"--permission: none came; send {MANAGE_LOCKS}, {EVERYTHING} or none")
    _check_key_id(key_id)
    granted = tuple(each for each in permissions if each != "none")
    _access_tables(store).set_permissions(key_id, granted)
    click.echo(f"Key {key_id}: {' '.join(granted) or 'no permissions'}.")


@keys.command("revoke")
@click.argument("key_id")
@_store_option
def revoke_key(key_id: str, store: str) -> None:
    """Revoke the key with this id."""
    _check_key_id(key_id)
    _access_tables(store).revoke_key(key_id)
    click.echo(f"Revoked {key_id}.")


def _check_key_id(key_id: str) -> None:
    if key_id.startswith(("sk-", "ak-")):
        raise SettingError(
            "KEY_ID: a key came; send its id, which `volcano-server keys list` shows"
        )


def _access_tables(store: str) -> AccessTables:
    if not is_database_url(store):
        return AccessFile.beside(parse_store_url(store))
    database = _database(store)
    from volcano_server.access_database import AccessDatabase

    tables = AccessDatabase(database)
    click.get_current_context().call_on_close(tables.close)
    return tables


def _quota_words(quota: int) -> str:
    return f"{quota} requests a minute" if quota else "no quota"


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


if __name__ == "__main__":
    main()
