"""The async client against the real server, over real sockets; the test moves both clocks."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import anyio
import pytest
from anyio import from_thread, to_thread
from async_stage import EXPIRES_AT, ManualClock
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from volcano_sdk import AsyncVolcanoClient, ConflictError, LockLostError
from volcano_sdk.async_transport import Lanes
from volcano_sdk.operations import Outcome, Try
from volcano_server.testing import VolcanoServer, running_server

pytestmark = pytest.mark.anyio


class World:
    """A server, and a clock for its clients that goes with the server's."""

    def __init__(self, server: VolcanoServer) -> None:
        self.server = server
        self.clock = ManualClock()
        self.in_flight = 0

    def client(self) -> AsyncVolcanoClient:
        return AsyncVolcanoClient(
            api_url=self.server.url,
            service_key=self.server.service_key,
            trust_env=False,
            _clock=self.clock,
        )

    async def pass_time(self, seconds: float) -> None:
        """In steps, each of which ends when every request that it caused is answered."""
        for _ in range(round(seconds / 0.25)):
            self.server.clock.advance(0.25)
            await self.clock.advance(0.25)
            while self.in_flight:
                await anyio.sleep(0.001)
                await self.clock.advance(0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with running_server() as server:
        world = World(server)
        exchange = Lanes.exchange

        async def counted(self: Lanes, attempt: Try, *, sent_at: float) -> Outcome:
            world.in_flight += 1
            try:
                return await exchange(self, attempt, sent_at=sent_at)
            finally:
                world.in_flight -= 1

        monkeypatch.setattr(Lanes, "exchange", counted)
        yield world


async def test_a_lock_is_held_far_beyond_its_ttl(world: World) -> None:
    async with world.client() as client, world.client() as rival:
        async with client.locks.with_lock("k", ttl=5) as guard:
            first = guard.lease
            for _ in range(4):
                await world.pass_time(5)
                with pytest.raises(ConflictError):
                    await rival.locks.acquire("k", ttl=5)
            assert not guard.lost
            assert guard.lease.fencing_token == first.fencing_token
            assert guard.lease.expires_at > first.expires_at
        lease = await rival.locks.acquire("k", ttl=5)

    assert lease.fencing_token > first.fencing_token


async def test_a_displaced_holder_hears_of_it_at_its_next_renewal(world: World) -> None:
    async with world.client() as client, world.client() as rival:
        with pytest.raises(LockLostError) as caught:
            async with client.locks.with_lock("k", ttl=6):
                await rival.locks.force_release("k")
                lease = await rival.locks.acquire("k", ttl=60)
                await world.pass_time(3)
                await anyio.sleep_forever()
        state = await rival.locks.get("k")

    assert isinstance(caught.value.__cause__, ConflictError)
    assert caught.value.code == "lock_ownership_lost"
    assert state.held
    assert state.fencing_token == lease.fencing_token


async def test_a_cancelled_acquire_leaves_the_lock_free_for_the_next(world: World) -> None:
    async with world.client() as client:
        for rounds in range(8):
            async with anyio.create_task_group() as tasks:

                async def take() -> None:
                    async with client.locks.with_lock("k", ttl=60):
                        await anyio.sleep_forever()

                tasks.start_soon(take)
                await anyio.sleep(rounds * 0.0005)
                tasks.cancel_scope.cancel()
            lease = await client.locks.acquire("k", ttl=60)
            await client.locks.release("k", lease)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_task_leaves_the_lock_free_for_the_next(world: World) -> None:
    async with world.client() as client:
        for rounds in range(8):
            task = asyncio.create_task(client.locks.acquire("k", ttl=60))
            await asyncio.sleep(rounds * 0.0005)
            task.cancel()
            try:
                taken = await task
            except asyncio.CancelledError:
                pass
            else:
                await client.locks.release("k", taken)
            lease = await client.locks.acquire("k", ttl=60)
            await client.locks.release("k", lease)


async def test_one_of_many_tasks_gets_the_lock(world: World) -> None:
    held = 0
    refused = 0
    everyone_tried = anyio.Event()

    async def attempt() -> None:
        nonlocal held, refused
        try:
            async with client.locks.with_lock("k", ttl=30):
                held += 1
                if refused < 19:
                    await everyone_tried.wait()
        except ConflictError:
            refused += 1
            if refused == 19:
                everyone_tried.set()

    async with world.client() as client:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(attempt)

    assert (held, refused) == (1, 19)


async def test_the_second_holder_keeps_the_lock_that_the_first_overran(world: World) -> None:
    """Two tasks of one client: the state is the guard's, never the client's."""
    async with world.client() as client:
        with pytest.raises(LockLostError):
            async with client.locks.with_lock("k", ttl=5) as first:
                world.clock.jump(7)
                world.server.clock.advance(7)
                async with client.locks.with_lock("k", ttl=5) as second:
                    assert first.lost
                    assert not second.lost
                    assert (await client.locks.get("k")).held


async def test_a_worker_thread_may_ask_the_guard(world: World) -> None:
    async with world.client() as client, client.locks.with_lock("k", ttl=5) as guard:

        def work() -> bool:
            from_thread.run(world.pass_time, 4.0)
            guard.check()
            return guard.lost

        assert not await to_thread.run_sync(work)


_INTERRUPTED = """
import signal, sys, anyio, volcano_sdk
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's would be ignored
async def main():
    async with volcano_sdk.AsyncVolcanoClient(api_url=sys.argv[1], service_key="sk-test") as client:
        async with client.locks.with_lock("k", ttl=60):
            print("the body ran")
anyio.run(main, backend=sys.argv[2])
"""


def test_ctrl_c_during_an_acquire_gives_the_lock_back(
    httpserver: HTTPServer, anyio_backend_name: str
) -> None:
    """The answer is on its way when the interrupt comes: a real process, a real signal."""
    interrupted = threading.Event()
    arrived = threading.Event()
    seen: list[tuple[str, str]] = []

    def handle(request: Request) -> Response:
        seen.append((request.method, request.headers["X-Volcano-Lock-Token"]))
        if request.method == "DELETE":
            return Response("", 204)
        arrived.set()
        interrupted.wait(10)
        return Response(f'{{"expires_at":"{EXPIRES_AT}","fencing_token":1}}', 201)

    httpserver.expect_request("/locks/k/lease").respond_with_handler(handle)
    command = [sys.executable, "-c", _INTERRUPTED, httpserver.url_for(""), anyio_backend_name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert arrived.wait(20)
        process.send_signal(signal.SIGINT)
        # The signal is the child's own affair: the answer comes after it had time to be handled.
        threading.Timer(0.3, interrupted.set).start()
        output, errors = process.communicate(timeout=20)
    finally:
        process.kill()

    assert output == ""
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert [method for method, _ in seen] == ["POST", "DELETE"]
    assert seen[0][1] == seen[1][1]
