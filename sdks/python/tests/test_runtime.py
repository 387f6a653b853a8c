import gc
import threading
from typing import Any

import pytest
from sync_stage import SETTINGS, ScriptedTransport, Stage, refused

from volcano_sdk import runtime, threads
from volcano_sdk.errors import LockLostError
from volcano_sdk.locks import Locks
from volcano_sdk.runtime import Runtime

PATIENCE = 10.0


def scripted(timers: Any) -> ScriptedTransport:
    """On the real clock: nothing in the script hangs."""
    return ScriptedTransport(timers)


def test_in_a_child_nobody_is_on_the_way_to_a_lease() -> None:
    """Else its threads would never go."""
    forked = Runtime(SETTINGS, transport=scripted)
    forked.entering.add(object())

    forked.become_child()

    assert forked.entering == set()


def test_a_callback_runs_on_a_thread_of_its_own_that_goes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "LINGER", 0.05)
    calls: list[tuple[str, LockLostError]] = []
    called = threading.Event()
    real = Runtime(SETTINGS, transport=scripted)
    locks = Locks(real)
    lock = locks.with_lock("a", ttl=30)
    guard = lock.__enter__()

    def callback(loss: LockLostError) -> None:
        calls.append((threading.current_thread().name, loss))
        called.set()

    guard.on_lost(callback)
    real.close()

    assert called.wait(PATIENCE)
    assert calls[0][0] == "volcano-callbacks"
    for thread in threading.enumerate():
        if thread.name.startswith("volcano-") and thread.name != "volcano-server":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_a_fork_reaches_every_client_of_the_process(stage: Stage) -> None:
    lock = stage.locks.with_lock("a", ttl=30)
    guard = lock.__enter__()

    runtime._in_child()
    stage.timers.pending.clear()

    assert guard.lost
    assert stage.wire.forgot == 1
    assert stage.runtime.lock is not None
    del lock, guard
    stage.advance(0)


def test_a_runtime_that_nobody_holds_is_forgotten() -> None:
    made = Stage()
    count = len(runtime._runtimes)
    made.script(acquire=[refused(500)])
    del made

    gc.collect()
    assert len(runtime._runtimes) < count
