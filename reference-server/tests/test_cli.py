"""The command as a user runs it: real processes on free ports, and their mistakes."""

import contextlib
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

REQUEST_ID = "6d0c5a35-93f1-4a53-8f59-0b8e0d5d7b1c"
COMMAND = [sys.executable, "-m", "volcano_server"]
PATIENCE = 15


def environment(**more: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("VOLCANO_")}
    return {**mine, "PYTHONWARNINGS": "error", **more}


def run(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        check=False,
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


class Running:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], facts: dict[str, str]) -> None:
        self.process = process
        self.facts = facts
        self.http = httpx.Client(base_url=facts["url"], trust_env=False)

    def call(
        self, method: str, path: str, service_key: str | None = None, **options: Any
    ) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {service_key or self.facts['service_key']}",
            "X-Volcano-Lock-Token": str(uuid.uuid4()),
            "X-Volcano-Request-Id": REQUEST_ID,
        }
        return self.http.request(method, path, headers=headers, **options)

    def acquire(self, key: str) -> httpx.Response:
        return self.call("POST", f"/locks/{key}/lease", json={"ttl_seconds": 30})

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """The exit status, and what else was printed."""
        self.http.close()
        self.process.send_signal(how)
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@contextlib.contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def dev(*arguments: str, cwd: Path) -> Iterator[Running]:
    with started("dev", "--port", "0", "--json", *arguments, cwd=cwd) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=PATIENCE)[1]
        running = Running(process, json.loads(line))
        yield running
        running.http.close()


@contextlib.contextmanager
def serve(*arguments: str, cwd: Path) -> Iterator[Running]:
    """Its first line on stderr says where it listens."""
    command = ("serve", "--port", "0", "--store", "sqlite:///locks.db", *arguments)
    with started(*command, cwd=cwd) as process:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert line["event"] == "server_started"
        running = Running(process, {"url": line["url"], "service_key": "sk-none"})
        yield running
        running.http.close()


def is_one_line(done: subprocess.CompletedProcess[str], status: int, *words: str) -> bool:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("volcano-server: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    return True


# ---------------------------------------------------------------- dev


def test_dev_prints_one_line_of_json_once_it_accepts_requests(tmp_path: Path) -> None:
    with dev("--ephemeral", cwd=tmp_path) as server:
        answer = server.acquire("nightly")
        status, out, err = server.stop()

    assert server.facts == {
        "url": server.facts["url"],
        "project": "dev",
        "service_key": "sk-dev-volcano-local-service-key",
        "anon_key": "ak-dev-volcano-local-anon-key",
        "store": "memory",
    }
    assert server.facts["url"].startswith("http://127.0.0.1:")
    assert answer.status_code == 201
    assert answer.headers["x-ratelimit-limit"] == "600"
    assert (status, out, err) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_dev_keeps_leases_in_one_visible_file_until_a_reset(tmp_path: Path) -> None:
    with dev(cwd=tmp_path) as server:
        first = server.acquire("nightly")
        assert server.facts["store"] == "sqlite:///volcano-dev.db"
        server.stop()
    assert [each.name for each in tmp_path.iterdir()] == ["volcano-dev.db"]
    with dev(cwd=tmp_path) as server:
        kept = server.call("GET", "/locks/nightly").json()
        server.stop()
    with dev("--reset", cwd=tmp_path) as server:
        reset = server.call("GET", "/locks/nightly").json()

    assert kept == {"held": True, **first.json()}
    assert reset == {"held": False}


def test_dev_takes_keys_and_a_quota_of_its_own(tmp_path: Path) -> None:
    options = ("--service-key", "sk-my-own", "--anon-key", "ak-my-own", "--quota", "0")
    with dev("--ephemeral", *options, cwd=tmp_path) as server:
        mine = server.acquire("a")
        well_known = server.call("GET", "/locks/a", "sk-dev-volcano-local-service-key")
        anon = server.call("GET", "/locks/a", "ak-my-own")

    assert (server.facts["service_key"], server.facts["anon_key"]) == ("sk-my-own", "ak-my-own")
    assert mine.status_code == 201
    assert "x-ratelimit-limit" not in mine.headers
    assert well_known.status_code == 401
    assert anon.status_code == 403


def test_dev_never_takes_the_store_of_production_from_the_environment(tmp_path: Path) -> None:
    done = run("dev", "--port", "x", cwd=tmp_path, VOLCANO_STORE="nonsense")
    assert is_one_line(done, 64, "--port")

    done = run("dev", "--port", "-1", cwd=tmp_path, VOLCANO_STORE="nonsense")
    assert is_one_line(done, 64, "-1")


def test_dev_has_a_clock_that_a_test_can_move(tmp_path: Path) -> None:
    with dev("--ephemeral", cwd=tmp_path) as server:
        server.acquire("a")
        server.call("POST", "/_test/clock", json={"advance_seconds": 31})
        freed = server.call("GET", "/locks/a").json()

    assert freed == {"held": False}


def test_dev_shows_lines_to_paste_and_ends_with_one(tmp_path: Path) -> None:
    with started("dev", "--port", "0", cwd=tmp_path) as process:
        assert process.stdout is not None
        banner = ""
        while not banner.endswith("\n\n") or "export" not in banner:
            banner += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)

    assert "export VOLCANO_API_URL=http://127.0.0.1:" in banner
    assert "export VOLCANO_ANON_KEY=ak-dev-" in banner
    assert "export VOLCANO_SERVICE_KEY=sk-dev-" in banner
    assert "sqlite:///volcano-dev.db" in banner
    assert out == "Stopped. The leases are kept in volcano-dev.db.\n"
    assert (process.returncode, err) == (0, "")


def test_the_well_known_keys_are_refused_where_others_can_reach_them(tmp_path: Path) -> None:
    for options in ((), ("--service-key", "sk-my-own"), ("--anon-key", "ak-my-own")):
        done = run("dev", "--host", "0.0.0.0", "--port", "0", *options, cwd=tmp_path)
        assert is_one_line(done, 64, "0.0.0.0", "--service-key", "127.0.0.1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_every_loopback_address_takes_the_well_known_keys(tmp_path: Path, host: str) -> None:
    with dev("--ephemeral", "--host", host, cwd=tmp_path) as server:
        assert server.acquire("a").status_code == 201


def test_a_development_key_of_the_wrong_kind_is_refused_and_not_shown(tmp_path: Path) -> None:
    for option, key in (
        ("--service-key", "ak-oh-no-secret"),
        ("--anon-key", "sk-oh-no-secret"),
        ("--service-key", "sk-with blank"),
        ("--service-key", "sk-"),
    ):
        done = run("dev", option, key, cwd=tmp_path)
        assert is_one_line(done, 64, option)
        assert "secret" not in done.stderr


# ---------------------------------------------------------------- mistakes


def test_a_port_in_use_is_named_before_a_file_is_touched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (("dev",), ("serve", "--store", "sqlite:///locks.db")):
            done = run(*command, "--port", port, cwd=tmp_path)
            assert is_one_line(done, 69, port, "--port")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("--store", "locks.db"), 64, "sqlite:///"),
        (("--store", "sqlite://locks.db"), 64, "sqlite:///"),
        (("--store", "postgresql://u:secret@h/d?frob=1"), 64, "postgresql://user@host"),
        (("--store", "postgresql://127.0.0.1:1/d"), 69, "postgresql://127.0.0.1/d"),
        (("--store", "sqlite:///"), 64, "sqlite:///"),
        (("--store", "sqlite:////"), 64, "sqlite:////"),
        (("--store", "sqlite:///."), 64, "sqlite:///."),
        (("--store", "sqlite:///folder/.."), 64, "sqlite:///folder/.."),
        (("--store", f"sqlite:///{'a' * 300}.db"), 74, "too long"),
        (("--store", f"sqlite:///notes.txt/{'a' * 10}.db"), 73, "notes.txt"),
        ((), 64, "--store"),
        (("--store", "sqlite:///none/locks.db"), 73, "none"),
        (("--store", "sqlite:///folder"), 73, "folder"),
        (("--store", "sqlite:///notes.txt"), 65, "notes.txt"),
        (("--store", "sqlite:///l.db", "--host", "no.such.host.invalid"), 68, "no.such.host"),
        (("--store", "sqlite:///l.db", "--host", "192.0.2.1"), 68, "192.0.2.1"),
        (("--store", "sqlite:///l.db", "--port", "65536"), 64, "65536"),
        (("--store", "sqlite:///l.db", "--port", "-1"), 64, "-1"),
        (("--store", "sqlite:///l.db", "--port", "x"), 64, "x"),
        (("--frob",), 64, "--frob"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, word: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("no database at all\n" * 100)

    done = run("serve", "--port", "0", *arguments, cwd=tmp_path)

    assert is_one_line(done, status, word)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_takes_nothing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    for arguments in (("dev", "--port", "0", "--ephemeral"), ("--version",)):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*COMMAND, *arguments],
                cwd=tmp_path,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=30,
                check=False,
            )
        assert (done.returncode, len(done.stderr.splitlines())) == (74, 1)
        assert "No space left" in done.stderr


def test_a_quota_beyond_every_use_is_refused(tmp_path: Path) -> None:
    """It would not fit into the column."""
    huge = "9" * 30
    store = ("--store", "sqlite:///locks.db")
    run("projects", "create", "shop", *store, cwd=tmp_path)

    for arguments in (
        ("projects", "create", "other", "--quota", huge, *store),
        ("projects", "quota", "shop", huge, *store),
        ("dev", "--port", "0", "--ephemeral", "--quota", huge),
    ):
        assert is_one_line(run(*arguments, cwd=tmp_path), 64, huge)


def test_a_store_of_another_server_is_refused(tmp_path: Path) -> None:
    with serve(cwd=tmp_path) as server:
        second = run("serve", "--port", "0", "--store", "sqlite:///locks.db", cwd=tmp_path)
        reset = run("dev", "--port", "0", "--store", "sqlite:///locks.db", "--reset", cwd=tmp_path)
        alive = server.http.get("/readyz").status_code

    assert is_one_line(second, 75, "locks.db", "another server")
    assert is_one_line(reset, 75, "locks.db", "another server")
    assert alive == 200
    assert (tmp_path / "locks.db").exists()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with serve(cwd=tmp_path) as server:
        server.stop()
    database = sqlite3.connect(tmp_path / "locks.db")
    database.execute("pragma user_version = 99")
    database.close()

    done = run("serve", "--port", "0", "--store", "sqlite:///locks.db", cwd=tmp_path)

    assert is_one_line(done, 65, "99")


def test_broken_credentials_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "locks.access.db").write_text("no database at all\n" * 100)

    done = run("serve", "--port", "0", "--store", "sqlite:///locks.db", cwd=tmp_path)

    assert is_one_line(done, 65, "locks.access.db")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    store = ("--store", "sqlite:///locks.db")
    assert is_one_line(run("keys", "list", *store, cwd=tmp_path), 66, "projects create")
    run("projects", "create", "shop", *store, cwd=tmp_path)

    for command, status, word in (
        (("keys", "create", "--project", "nope"), 67, "'nope'"),
        (("keys", "list", "--project", "nope"), 67, "'nope'"),
        (("keys", "revoke", "key_0"), 67, "'key_0'"),
        (("projects", "quota", "nope", "5"), 67, "'nope'"),
        (("projects", "create", "shop"), 73, "'shop'"),
        (("projects", "create", "Shop!"), 64, "'Shop!'"),
        (("projects", "create", "x", "--quota", "-1"), 64, "-1"),
        (("keys", "create", "--project", "shop", "--permission", "fly"), 64, "fly"),
        (("keys", "create", "--project", "shop", "--anon", "--permission", "*"), 64, "--permis"),
    ):
        assert is_one_line(run(*command, *store, cwd=tmp_path), status, word)


def test_a_key_in_place_of_its_id_is_not_repeated(tmp_path: Path) -> None:
    done = run("keys", "revoke", "sk-very-secret", "--store", "sqlite:///locks.db", cwd=tmp_path)

    assert is_one_line(done, 64, "keys list")
    assert "secret" not in done.stderr


# ---------------------------------------------------------------- keys while a server runs


def test_keys_are_made_listed_and_revoked_while_a_server_runs(tmp_path: Path) -> None:
    store = {"VOLCANO_STORE": "sqlite:///locks.db"}

    def becomes(server: Running, key: str, status: int) -> None:
        deadline = time.monotonic() + 2
        while server.call("GET", "/locks/a", key).status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    with serve("--log-requests", cwd=tmp_path) as server:
        run("projects", "create", "shop", "--quota", "1000", cwd=tmp_path, **store)
        made = run("keys", "create", "--project", "shop", cwd=tmp_path, **store)
        key = made.stdout.strip()
        becomes(server, key, 200)
        limit = server.call("GET", "/locks/a", key).headers["x-ratelimit-limit"]
        listed = run("keys", "list", cwd=tmp_path, **store).stdout
        id_ = listed.split("\t")[0]
        revoked = run("keys", "revoke", id_, cwd=tmp_path, **store)
        becomes(server, key, 401)
        status, out, err = server.stop()

    assert key.startswith("sk-")
    assert id_ in made.stderr
    assert listed.split("\t")[1:4] == ["shop", "service", "locks.manage"]
    assert listed.rstrip().endswith("active")
    assert limit == "1000"
    assert revoked.stdout == f"Revoked {id_}.\n"
    assert key not in listed + made.stderr + out + err
    events = [json.loads(line) for line in err.splitlines()]
    changes = [each for each in events if each["event"] == "credentials_changed"]
    assert [(each["added"], each["removed"]) for each in changes] == [([id_], []), ([], [id_])]
    assert (status, events[-1]["event"]) == (0, "server_stopped")


def test_projects_are_listed_with_their_quotas(tmp_path: Path) -> None:
    store = ("--store", "sqlite:///locks.db")
    assert run("projects", "list", *store, cwd=tmp_path).stdout == ""
    run("projects", "create", "shop", *store, cwd=tmp_path)
    run("projects", "create", "farm", "--quota", "0", *store, cwd=tmp_path)
    run("projects", "quota", "shop", "60", *store, cwd=tmp_path)

    listed = run("projects", "list", *store, cwd=tmp_path).stdout

    assert listed == "farm\tno quota\nshop\t60 requests a minute\n"


def test_a_key_without_permissions_may_not_use_locks(tmp_path: Path) -> None:
    store = ("--store", "sqlite:///locks.db")
    run("projects", "create", "shop", *store, cwd=tmp_path)
    create = ("keys", "create", "--project", "shop", *store)
    keys = {
        403: run(*create, "--permission", "none", cwd=tmp_path).stdout.strip(),
        200: run(*create, "--permission", "*", cwd=tmp_path).stdout.strip(),
    }
    anon = run(*create, "--anon", cwd=tmp_path).stdout.strip()

    with serve(cwd=tmp_path) as server:
        for status, key in keys.items():
            assert server.call("GET", "/locks/a", key).status_code == status
        assert server.call("GET", "/locks/a", anon).status_code == 403


def test_production_has_no_test_controls_and_no_well_known_keys(tmp_path: Path) -> None:
    with serve(cwd=tmp_path) as server:
        well_known = "sk-dev-volcano-local-service-key"
        assert server.call("GET", "/_test/clock", well_known).status_code == 404
        assert server.call("GET", "/locks/a", well_known).status_code == 401


# ---------------------------------------------------------------- stopping


def half_sent(server: Running) -> socket.socket:
    """A connection whose acquire lacks the last byte of its body."""
    url = httpx.URL(server.facts["url"])
    connection = socket.create_connection((url.host, url.port or 0), timeout=PATIENCE)
    connection.sendall(
        b"POST /locks/late/lease HTTP/1.1\r\nHost: a\r\nContent-Length: 18\r\n"
        b"Authorization: Bearer " + server.facts["service_key"].encode() + b"\r\n"
        b"X-Volcano-Lock-Token: 0b7c1f2e-5a0f-4c55-9d1d-3c1f6f0f2a11\r\n"
        b"X-Volcano-Request-Id: 6d0c5a35-93f1-4a53-8f59-0b8e0d5d7b1c\r\n\r\n"
        b'{"ttl_seconds":30'
    )
    # Another request, answered after the first one was taken in by the one event loop.
    assert server.http.get("/healthz").status_code == 200
    return connection


def refuses_connections(server: Running) -> bool:
    url = httpx.URL(server.facts["url"])
    try:
        socket.create_connection((url.host, url.port or 0), timeout=1).close()
    except OSError:
        return True
    return False


def until_it_stops_accepting(server: Running) -> None:
    deadline = time.monotonic() + PATIENCE
    while not refuses_connections(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stop_finishes_what_was_accepted(tmp_path: Path) -> None:
    with dev(cwd=tmp_path) as server, half_sent(server) as late:
        server.process.send_signal(signal.SIGTERM)
        until_it_stops_accepting(server)
        late.sendall(b"}")
        answer = late.recv(65_536)
        assert server.process.wait(PATIENCE) == 0
    with dev(cwd=tmp_path) as server:
        state = server.call("GET", "/locks/late").json()

    assert answer.startswith(b"HTTP/1.1 201 ")
    assert b"connection: close" in answer
    assert state["held"] is True


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with dev("--ephemeral", cwd=tmp_path) as server, half_sent(server):
        server.process.send_signal(signal.SIGTERM)
        until_it_stops_accepting(server)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        out, err = server.process.communicate(timeout=PATIENCE)
        took = time.monotonic() - began

    assert took < 3  # a body may take 5 s
    assert "Traceback" not in out + err


def test_a_kept_connection_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    with dev("--ephemeral", cwd=tmp_path) as server:
        server.acquire("a")
        url = httpx.URL(server.facts["url"])
        with socket.create_connection((url.host, url.port or 0)):
            began = time.monotonic()
            status, _, _ = server.stop()

    assert status == 0
    assert time.monotonic() - began < 3


def test_help_and_version_need_no_store(tmp_path: Path) -> None:
    assert "serve" in run("--help", cwd=tmp_path).stdout
    assert run("--version", cwd=tmp_path).stdout.startswith("volcano-server, version ")
    bare = run(cwd=tmp_path)
    assert (bare.returncode, bare.stdout) == (64, "")
    assert "Usage" in bare.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks at another process's limit")
def test_a_server_takes_more_connections_than_the_usual_limit(tmp_path: Path) -> None:
    """Else one project's event streams leave none for anybody's locks."""
    files = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(files)
    resource.setrlimit(files, (min(soft, 1024), hard))
    try:
        with dev("--ephemeral", cwd=tmp_path) as running:
            assert resource.prlimit(running.process.pid, files) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(files, (soft, hard))
