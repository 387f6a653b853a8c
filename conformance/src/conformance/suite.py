"""Many scenarios at once: who plays where, and what came of each.

A worker is a thread with a stage of its own: a reference server (or one that is there already),
gates, and driver processes, which serve scenario after scenario by a new `hello`.
"""

import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from conformance.discovery import Column
from conformance.driver import Driver, DriverError, UnsupportedError
from conformance.gate import Gate
from conformance.match import MismatchError, show
from conformance.play import Mode, Play, Player, SkipError
from conformance.scenario import SERVER_CAPABILITIES, SHARED_CAPABILITIES, Actor, Scenario
from conformance.target import Target

LONGEST_REAL = 60.0
"""What takes longer than this in real time, in seconds, is skipped there."""


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    SKIP = "skip"
    KNOWN = "known"

    @property
    def is_good(self) -> bool:
        return self not in (Outcome.FAIL, Outcome.ERROR)


@dataclass(frozen=True, slots=True)
class Result:
    scenario: str
    column: str
    outcome: Outcome
    detail: str = ""
    """Why it was skipped; or of a failure everything that there is to know."""
    seconds: float = 0.0


class Server(Protocol):
    def stage(self, *, limited: bool) -> AbstractContextManager[Target]: ...

    def close(self) -> None: ...


class RemoteServer:
    """One that runs already, with its own clock and credentials."""

    def __init__(
        self, base_url: str, credentials: dict[str, str | None], capabilities: Iterable[str] = ()
    ) -> None:
        self._target = Target(
            base_url.rstrip("/"),
            {"none": None, "unknown": f"sk-{secrets.token_hex(16)}", **credentials},
            frozenset(capabilities),
        )

    @contextmanager
    def stage(self, *, limited: bool) -> Iterator[Target]:
        del limited
        yield replace(self._target, key_prefix=f"{secrets.token_hex(4)}.")

    def close(self) -> None:
        """It is not ours."""


class Worker:
    """What one thread needs to play, kept from scenario to scenario."""

    def __init__(self, server: Server, mode: Mode, patience: float) -> None:
        self._server, self._mode, self._patience = server, mode, patience
        self._gates: list[Gate] = []
        self._idle: list[Driver] = []
        self._idle_column: Column | None = None
        self._hired: list[Player] = []

    def play(self, scenario: Scenario, column: Column | None) -> Result:
        started = time.monotonic()
        name = column.name if column else "server"
        with self._server.stage(limited="quota" in scenario.requires) as target:
            play = Play(
                scenario,
                target,
                cast=lambda actor: self._hire(scenario, column, target, actor),
                mode=self._mode,
                patience=self._patience,
            )
            try:
                self._check_that_it_can_be_played(scenario, target)
                play.run()
                outcome, detail = Outcome.PASS, ""
            except (SkipError, UnsupportedError) as reason:
                outcome, detail = Outcome.SKIP, str(reason)
            except MismatchError as mismatch:
                outcome, detail = Outcome.FAIL, self._account(play, mismatch)
            except (DriverError, OSError) as error:
                outcome, detail = Outcome.ERROR, self._account(play, error)
            finally:
                self._dismiss(keep=play.is_over)
        result = Result(scenario.name, name, outcome, detail, time.monotonic() - started)
        return _with_known(result, column)

    def _check_that_it_can_be_played(self, scenario: Scenario, target: Target) -> None:
        lacking = (scenario.requires & SERVER_CAPABILITIES) - target.capabilities
        if lacking:
            raise SkipError(f"the server has no {', '.join(sorted(lacking))}")
        missing = scenario.credentials() - set(target.credentials)
        if missing:
            raise SkipError(f"no credential of the kind {', '.join(sorted(missing))} was given")
        if self._mode is Mode.REAL and scenario.seconds() > LONGEST_REAL:
            raise SkipError(f"takes {scenario.seconds():g} s of real time")
        if self._mode is Mode.REAL and "virtual_clock" in scenario.requires:
            raise SkipError("needs a virtual clock")

    # ------------------------------------------------------------ drivers and gates

    def _hire(
        self, scenario: Scenario, column: Column | None, target: Target, actor: Actor
    ) -> Player:
        assert column is not None
        if self._idle_column is not column:
            self._end(self._idle)
            self._idle, self._idle_column = [], column
        gate = self._gates.pop() if self._gates else Gate()
        credential = target.credentials[actor.credential]
        extra: dict[str, Any] = {} if actor.timeout is None else {"timeout": actor.timeout}
        if self._mode is Mode.VIRTUAL and target.now is not None:
            extra["now"] = target.now()
        driver = self._ready_driver(column, gate, credential, extra)
        player = Player(actor, driver, gate, credential)
        self._hired.append(player)
        of_drivers = scenario.requires - (SERVER_CAPABILITIES - SHARED_CAPABILITIES)
        lacking = of_drivers - driver.capabilities
        if lacking:
            raise SkipError(f"{column.name} has no {', '.join(sorted(lacking))}")
        return player

    def _ready_driver(
        self, column: Column, gate: Gate, credential: str | None, extra: dict[str, Any]
    ) -> Driver:
        while True:
            reused = bool(self._idle)
            driver = self._idle.pop() if reused else column.start(self._patience)
            try:
                ok = driver.command(
                    "hello",
                    protocol=1,
                    base_url=gate.url,
                    service_key=credential,
                    clock=self._mode.value,
                    **extra,
                )
            except UnsupportedError as reason:
                driver.end()
                if not reused:
                    raise SkipError(str(reason)) from None
            except DriverError:
                driver.crash()
                raise
            else:
                driver.capabilities = frozenset(ok["capabilities"])
                return driver

    def _dismiss(self, *, keep: bool) -> None:
        """Everybody off the stage.  What went without a fault may play again."""
        for player in self._hired:
            player.driver.on_line = lambda _way, _line: None
            player.gate.clear()
            if keep and not player.crashed:
                self._gates.append(player.gate)
                self._idle.append(player.driver)
                continue
            player.gate.stop()
            if not player.crashed:
                player.driver.crash()
        self._hired = []

    def _end(self, drivers: Sequence[Driver]) -> None:
        for driver in drivers:
            driver.end()

    def close(self) -> None:
        """Raises DriverError when a driver does not end by itself."""
        try:
            self._end(self._idle)
        finally:
            for gate in self._gates:
                gate.stop()
            self._server.close()

    def _account(self, play: Play, error: Exception) -> str:
        """A failure as it is printed: what was played, where it broke, and the whole talk."""
        scenario, step = play.scenario, play.step
        lines = [scenario.title, f"rule: {scenario.rule}"]
        if step:
            lines.append(f"step {play.step_number}: {step_text(step)}")
            if "note" in step:
                lines.append(f"note: {step['note']}")
        if isinstance(error, MismatchError):
            lines.append(f"at:     {error.where or 'the step'}")
            lines.append(f"wanted: {_wanted_text(error.wanted)}")
            lines.append(f"got:    {_wanted_text(error.got)}")
        else:
            lines.append(f"error: {error}")
        if str(play.bindings):
            lines.append(f"names: {play.bindings}")
        lines.append("conversation:")
        lines += [f"  {line}" for line in play.conversation]
        for player in self._hired:
            if words := player.driver.last_words():
                lines += [f"stderr of {player.actor.name}:", words]
        return "\n".join(lines)


def step_text(step: dict[str, object]) -> str:
    return " ".join(
        [str(step["who"])] + [f"{k} {v}" for k, v in step.items() if k not in ("who", "note")]
    )


def _wanted_text(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _with_known(result: Result, column: Column | None) -> Result:
    """A known failure must fail; strict both ways."""
    why = column.known_failures.get(result.scenario) if column else None
    if why is None:
        return result
    if result.outcome is Outcome.FAIL:
        return replace(result, outcome=Outcome.KNOWN, detail=why)
    if result.outcome is Outcome.PASS:
        detail = f"it passes, but known_failures.txt says that it fails: {why}"
        return replace(result, outcome=Outcome.FAIL, detail=detail)
    return result


@dataclass(frozen=True, slots=True)
class Plan:
    """How to play: `make_server` is called once per worker."""

    make_server: Callable[[], Server]
    mode: Mode = Mode.VIRTUAL
    workers: int = 4
    patience: float = 5.0


def run(
    pairs: Sequence[tuple[Scenario, Column | None]],
    plan: Plan,
    heard: Callable[[Result], None] = lambda _result: None,
) -> list[Result]:
    """Plays all of them, those that must be alone last.  `heard` is told of each as it ends."""
    together = [pair for pair in pairs if not pair[0].alone]
    alone = [pair for pair in pairs if pair[0].alone]
    # Column by column, so that a worker's driver processes serve as long as they can.
    together.sort(key=lambda pair: pair[1].name if pair[1] else "")
    timed = [pair for pair in together if plan.mode is Mode.REAL and pair[0].seconds()]
    # In real time those that take some go first: the others may use up a window of the quota, and
    # who then waits for the next one has waited too long.
    results = _play_together(timed, plan, heard)
    results += _play_together([pair for pair in together if pair not in timed], plan, heard)
    results += _play_together(alone, replace(plan, workers=1), heard)
    return results


def _play_together(
    pairs: Sequence[tuple[Scenario, Column | None]], plan: Plan, heard: Callable[[Result], None]
) -> list[Result]:
    todo: queue.SimpleQueue[tuple[Scenario, Column | None]] = queue.SimpleQueue()
    for pair in pairs:
        todo.put(pair)
    results: list[Result] = []
    lock = threading.Lock()

    def work() -> None:
        worker = Worker(plan.make_server(), plan.mode, plan.patience)
        column: Column | None = None
        try:
            while True:
                try:
                    scenario, column = todo.get_nowait()
                except queue.Empty:
                    break
                try:
                    result = worker.play(scenario, column)
                except Exception:  # noqa: BLE001 - a fault of ours must not pass for a short run
                    name = column.name if column else "server"
                    result = Result(scenario.name, name, Outcome.ERROR, traceback.format_exc())
                with lock:
                    results.append(result)
                    heard(result)
        finally:
            try:
                worker.close()
            except DriverError as error:
                name = column.name if column else "server"
                with lock:
                    results.append(Result("(the driver's end)", name, Outcome.ERROR, str(error)))
                    heard(results[-1])

    threads = [
        threading.Thread(target=work, name=f"stage-{number}")
        for number in range(min(plan.workers, len(pairs)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
