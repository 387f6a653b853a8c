"""What really happened to users of other lock libraries, against a real server and real threads."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from volcano_sdk import ConflictError, LockGuard, LockLostError, VolcanoClient, VolcanoError
from volcano_sdk.lane import Shield
from volcano_sdk.operations import Outcome, Try
from volcano_sdk.renewal import Schedule
from volcano_sdk.transport import Lanes
from volcano_server.testing import VolcanoServer, running_server

PATIENCE = 20.0


@pytest.fixture
def server() -> Iterator[VolcanoServer]:
    with running_server() as running:
        yield running


def client_of(server: VolcanoServer) -> VolcanoClient:
    return VolcanoClient(api_url=server.url, service_key=server.service_key, trust_env=False)


@pytest.fixture
def client(server: VolcanoServer) -> Iterator[VolcanoClient]:
    with client_of(server) as made:
        yield made


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("volcano-")]


def ours_but_the_server() -> list[str]:
    return [name for name in ours() if name != "volcano-server"]


def test_the_whole_life_of_a_lease(client: VolcanoClient, server: VolcanoServer) -> None:
    first = client.locks.acquire("a:b", ttl=30)
    with pytest.raises(ConflictError) as refusal:
        client.locks.acquire("a:b", ttl=30)
    assert refusal.value.code == "lock_held"
    assert refusal.value.request_id is not None
    renewed = client.locks.renew("a:b", first, ttl=60)
    assert renewed.fencing_token == first.fencing_token
    assert client.locks.get("a:b").fencing_token == first.fencing_token
    client.locks.release("a:b", renewed)
    assert not client.locks.get("a:b").held

    second = client.locks.acquire("a:b", ttl=30)
    assert second.fencing_token > first.fencing_token
    client.locks.force_release("a:b")
    with pytest.raises(ConflictError):
        client.locks.renew("a:b", second, ttl=30)


def test_a_crashed_holders_lock_can_be_taken_after_its_grace(
    client: VolcanoClient, server: VolcanoServer
) -> None:
    client.locks.acquire("a", ttl=30)
    server.clock.advance(30.999)
    with pytest.raises(ConflictError):
        client.locks.acquire("a", ttl=30)
    server.clock.advance(0.001)
    client.locks.acquire("a", ttl=30)


def test_contention_by_twenty_threads_has_one_winner_at_a_time(client: VolcanoClient) -> None:
    inside: list[int] = []
    most, won, failures = 0, 0, []

    def work() -> None:
        nonlocal most, won
        for _ in range(10):
            try:
                with client.locks.with_lock("a", ttl=30):
                    inside.append(1)
                    most = max(most, len(inside))
                    won += 1
                    inside.pop()
            except ConflictError:
                pass
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert failures == []
    assert most == 1
    assert won >= 1


@pytest.mark.timeout(120)
def test_a_thousand_leases_share_a_few_threads_and_leave_none(client: VolcanoClient) -> None:
    assert eventually(lambda: ours_but_the_server() == [])  # those of the tests before
    before = threading.active_count()
    locks = [client.locks.with_lock(f"key-{number}", ttl=30) for number in range(1000)]
    guards = [lock.__enter__() for lock in locks]

    assert threading.active_count() - before <= 8
    assert not any(guard.lost for guard in guards)
    for lock in locks:
        lock.__exit__(None, None, None)
    assert threading.active_count() - before <= 8
    assert eventually(lambda: ours_but_the_server() == [])
    assert threading.active_count() <= before


@pytest.mark.timeout(60)
def test_sixty_leases_with_slow_renewals_are_not_lost_to_a_queue() -> None:
    """Each request takes 200 ms, TTL 5.  One lease a request: test_renewals.py, in no real time."""

    class Slow(Lanes):
        def exchange(self, attempt: Try, *, shield: Shield | None = None) -> Outcome:
            if attempt.request.method == "PATCH":
                time.sleep(0.2)
            return super().exchange(attempt, shield=shield)

    with running_server() as server, client_of(server) as client:
        runtime = client._runtime
        runtime.transport = Slow(runtime.settings, runtime.timers)
        assert eventually(lambda: ours_but_the_server() == [])
        before = threading.active_count()
        locks = [client.locks.with_lock(f"key-{number}", ttl=5) for number in range(60)]
        guards = [lock.__enter__() for lock in locks]
        granted = {guard.lease.key: guard.lease for guard in guards}

        end = time.monotonic() + 6.5  # longer than a TTL: each was renewed
        while time.monotonic() < end and not any(guard.lost for guard in guards):
            time.sleep(0.1)

        assert not any(guard.lost for guard in guards)
        assert all(guard.lease is not granted[guard.lease.key] for guard in guards)
        assert threading.active_count() - before <= 8
        for lock in locks:
            lock.__exit__(None, None, None)


def renew_now(guard: LockGuard) -> None:
    """Its renewal is due."""
    held = guard._held
    with held._runtime.lock:
        held.holding.schedule = Schedule(held._runtime.timers.now())
        held._runtime.renewals.moved(held)


def test_hung_renewals_of_long_leases_do_not_cost_a_short_one() -> None:
    """More hung tries than threads, each of ten seconds; a lease of five is renewed even so."""
    over = threading.Event()

    def handle(request: Request) -> Response:
        if request.method == "DELETE":
            return Response("", 204)
        if request.method == "PATCH" and "long" in request.path:
            over.wait(PATIENCE)
        status = 201 if request.method == "POST" else 200
        return Response('{"expires_at":"2026-11-29T12:00:00Z","fencing_token":1}', status)

    with (
        HTTPServer(threaded=True) as server,
        VolcanoClient(api_url=server.url_for(""), service_key="sk-1", trust_env=False) as client,
        contextlib.ExitStack() as held,
    ):
        server.expect_request(re.compile("/locks/.*")).respond_with_handler(handle)
        client._runtime.renewals._agenda.shares = False
        for number in range(8):
            lock = client.locks.with_lock(f"long-{number}", ttl=600)
            renew_now(held.enter_context(lock))
        short = held.enter_context(client.locks.with_lock("short", ttl=5))
        assert not short.wait_lost(5.5)
        over.set()
    assert eventually(lambda: ours_but_the_server() == [])


def test_threads_that_cannot_be_started_are_said_so_and_the_lock_is_free(
    client: VolcanoClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert eventually(lambda: ours_but_the_server() == [])

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(VolcanoError, match="no thread can renew it"):
            with client.locks.with_lock("a", ttl=30):
                pytest.fail("the block ran")
        assert not client.locks.get("a").held  # direct calls need no thread


def test_closing_the_client_loses_and_releases_what_runs(server: VolcanoServer) -> None:
    client = client_of(server)
    started = threading.Barrier(4)
    lost: list[object] = []

    def work(key: str) -> None:
        try:
            with client.locks.with_lock(key, ttl=30) as guard:
                started.wait(PATIENCE)
                lost.append(guard.wait_lost(PATIENCE))
                guard.check()
        except LockLostError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=work, args=(key,)) for key in "abc"]
    for thread in threads:
        thread.start()
    started.wait(PATIENCE)
    client.close()
    for thread in threads:
        thread.join(PATIENCE)

    assert lost.count(True) == 3
    assert sum("its client was closed" in str(one) for one in lost) == 3
    with client_of(server) as other:
        assert not any(other.locks.get(key).held for key in "abc")


# --- processes of their own


def run(
    server: VolcanoServer,
    program: str,
    *,
    is_interrupted: bool = False,
    patience: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """The program, with a client of the server; stderr must be empty: no traceback, no warning.

    `is_interrupted`: Python itself writes of an interrupt between two of its own steps.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROLOGUE + textwrap.dedent(program)],
        env={
            **os.environ,
            "VOLCANO_API_URL": server.url,
            "VOLCANO_SERVICE_KEY": server.service_key,
        },
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    assert is_interrupted or done.stderr == ""
    return done


PROLOGUE = """
import os, signal, sys, threading, time
from volcano_sdk import *
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's would be ignored
client = VolcanoClient(trust_env=False)
def until(holds):
    while not holds():
        time.sleep(0.01)
def is_waiting():
    return "volcano-events" in [thread.name for thread in threading.enumerate()]
"""


def seconds_to_exit(server: VolcanoServer, program: str) -> float:
    """From the program's last step to its process's end."""
    done = run(server, textwrap.dedent(program) + "\nprint(time.time(), flush=True)")
    assert done.returncode == 0
    return time.time() - float(done.stdout)


def test_a_main_thread_that_ends_with_a_lease_held_ends_the_process_at_once(
    server: VolcanoServer,
) -> None:
    """Within a second of one that holds nothing: a loaded machine is slow with both.

    What it might wait for takes half a minute: its threads' lingering, a renewal, the lease's end.
    """
    holds_nothing = """
        lease = client.locks.acquire("a", ttl=90)
        client.locks.release("a", lease)
        """
    holds_one = """
        import volcano_sdk.threads
        volcano_sdk.threads.LINGER = 30.0
        guard = client.locks.with_lock("a", ttl=90).__enter__()
        threading.Thread(target=guard.wait_lost, daemon=True).start()
        """

    usual = seconds_to_exit(server, holds_nothing)

    assert seconds_to_exit(server, holds_one) < 1.0 + 10 * usual


def test_a_lease_held_by_a_non_daemon_thread_is_released_by_it(server: VolcanoServer) -> None:
    done = run(
        server,
        """
        def work():
            with client.locks.with_lock("a", ttl=5):
                time.sleep(0.3)
            print(client.locks.get("a").held, flush=True)
        threading.Thread(target=work).start()
        """,
    )
    assert done.stdout.strip() == "False"


def test_a_lock_can_be_used_while_the_interpreter_ends(server: VolcanoServer) -> None:
    done = run(
        server,
        """
        import atexit
        def last():
            lease = client.locks.acquire("a", ttl=5)
            client.locks.release("a", lease)
            print(client.locks.get("a").held, flush=True)
        atexit.register(last)
        lock = client.locks.with_lock("b", ttl=5)
        lock.__enter__()
        """,
    )
    assert done.stdout.strip() == "False"


def test_a_fork_owns_nothing_and_takes_locks_of_its_own(server: VolcanoServer) -> None:
    done = run(
        server,
        """
        lock = client.locks.with_lock("parents", ttl=30)
        guard = lock.__enter__()
        busy = threading.Thread(target=lambda: [client.locks.get("x") for _ in range(200)])
        busy.start()
        for _ in range(5):
            child = os.fork()
            if child == 0:
                assert guard.lost and guard.wait_lost()
                try:
                    lock.__exit__(None, None, None)
                except LockLostError as error:
                    assert "forked" in str(error), error
                else:
                    os._exit(1)
                with client.locks.with_lock("childs", ttl=5) as own:
                    before = own.lease
                    assert not own.wait_lost(2.2)
                    assert own.lease is not before, "not renewed"
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, "the child failed"
            if _ == 0 and not guard.lost and client.locks.get("parents").held:
                print("held")
                break
        busy.join()
        lock.__exit__(None, None, None)
        print(client.locks.get("parents").held)
        """,
    )
    assert done.stdout.split() == ["held", "False"]


def test_a_fork_while_renewals_run_does_not_hang(server: VolcanoServer) -> None:
    done = run(
        server,
        """
        locks = [client.locks.with_lock(f"k{n}", ttl=5) for n in range(30)]
        guards = [lock.__enter__() for lock in locks]
        end = time.time() + 2.5
        children = 0
        while time.time() < end:
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                lease = client.locks.acquire(f"child{os.getpid()}", ttl=5)
                client.locks.release(lease.key, lease)
                os._exit(0 if all(guard.lost for guard in guards) else 2)
            assert os.waitpid(child, 0)[1] == 0
            children += 1
        assert not any(guard.lost for guard in guards)
        for lock in locks:
            lock.__exit__(None, None, None)
        print(children > 10)
        """,
    )
    assert done.stdout.strip() == "True"


@pytest.mark.timeout(120)
@pytest.mark.timeout(120)
def test_an_interrupt_at_any_moment_leaves_no_lock_behind(server: VolcanoServer) -> None:
    """300 interrupts at random moments of a loop of `with_lock`: the next taker never waits."""
    done = run(
        server,
        """
        import random
        random.seed(20261129)
        other = VolcanoClient(trust_env=False)
        interrupts = 0
        pid = os.getpid()
        armed = threading.Event()
        stop = False
        def interrupter():
            while not stop:
                armed.wait()
                armed.clear()
                time.sleep(random.uniform(0, 0.006))
                os.kill(pid, signal.SIGINT)
        threading.Thread(target=interrupter, daemon=True).start()
        left = []
        for turn in range(300):
            key = f"key-{turn}"
            try:
                armed.set()
                for _ in range(100):  # an interrupt in a __del__ is swallowed by Python
                    with client.locks.with_lock(key, ttl=600):
                        pass
            except KeyboardInterrupt:
                interrupts += 1
            left.append(key)
        end = time.time() + 30
        held = left
        while held and time.time() < end:  # a worker finishes what was broken off or dropped
            time.sleep(0.1)
            held = [key for key in held if other.locks.get(key).held]
        print(interrupts, len(held))
        """,
        is_interrupted=True,
        patience=5 * PATIENCE,
    )
    interrupts, held = map(int, done.stdout.split())
    assert interrupts >= 290
    assert held == 0


def test_control_c_during_a_hang_ends_within_the_bounds(server: VolcanoServer) -> None:
    """Of ten minutes that the request may take, 2 s are left, and twice 2 s for the release.

    That each is 2 s to the point: test_transport.py and test_locks.py, in no real time.
    """
    done = run(
        server,
        """
        import socket
        quiet = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{quiet.getsockname()[1]}"
        silent = VolcanoClient(api_url=url, service_key="sk-1", trust_env=False, timeout=600)
        import logging
        logging.disable()
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
        started = time.time()
        try:
            silent.locks.acquire("a", ttl=3600)
        except KeyboardInterrupt:
            print(time.time() - started)
        quiet.close()
        silent.close()
        """,
        patience=2 * PATIENCE,
    )
    assert 6.3 <= float(done.stdout) < PATIENCE


# --- while somebody waits


def test_control_c_ends_a_wait_and_leaves_nothing(server: VolcanoServer) -> None:
    done = run(
        server,
        """
        other = VolcanoClient(trust_env=False)
        lease = other.locks.acquire("a", ttl=30)
        def interrupt():
            until(is_waiting)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        started = time.monotonic()
        try:
            client.locks.acquire("a", ttl=600, wait=60)
        except KeyboardInterrupt:
            print(time.monotonic() - started < 10)
        until(lambda: not is_waiting())
        other.locks.release("a", lease)
        print(other.locks.get("a").held)
        """,
        is_interrupted=True,
    )
    assert done.stdout.split() == ["True", "False"]


def test_a_process_that_ends_with_somebody_waiting_ends_at_once(server: VolcanoServer) -> None:
    took = seconds_to_exit(
        server,
        """
        lease = client.locks.acquire("a", ttl=30)
        def wait():
            client.locks.acquire("a", ttl=30, wait=60)
        threading.Thread(target=wait, daemon=True).start()
        until(is_waiting)
        """,
    )
    assert took < PATIENCE / 4


def test_a_fork_while_somebody_waits_has_no_waiter_and_can_wait(server: VolcanoServer) -> None:
    done = run(
        server,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: a fork with threads
        lease = client.locks.acquire("a", ttl=30)
        got = []
        waiting = threading.Thread(
            target=lambda: got.append(client.locks.acquire("a", ttl=30, wait=60))
        )
        waiting.start()
        until(is_waiting)
        child = os.fork()
        if child == 0:
            try:
                client.locks.acquire("a", ttl=30, wait=0.3)
            except ConflictError:
                other = client.locks.acquire("b", ttl=30, wait=5)
                client.locks.release("b", other)
                os._exit(7)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        client.locks.release("a", lease)
        waiting.join(10)
        print(status, len(got))
        """,
    )
    assert done.stdout.split() == ["7", "1"]


def test_closing_the_client_ends_the_waits_of_its_threads(server: VolcanoServer) -> None:
    client = client_of(server)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.locks.acquire("a", ttl=30, wait=60)
        except RuntimeError as error:
            errors.append(error)

    with client_of(server) as holder:
        lease = holder.locks.acquire("a", ttl=30)
        threads = [threading.Thread(target=wait) for _ in range(5)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: "volcano-events" in ours())
        client.close()
        for thread in threads:
            thread.join(PATIENCE)
        holder.locks.release("a", lease)

        assert len(errors) == 5
        assert eventually(lambda: ours_but_the_server() == [])
        assert not holder.locks.get("a").held
