"""Twelve agents, forty tickets, no queue: each ticket is answered once.

    python examples/demo/demo.py        (./dev demo sets everything up and runs it)

Starts a fresh server and the agents as processes of their own.  One agent is killed while it holds
a ticket: its lease runs out and another takes over.  One is stopped past its TTL, then goes on and
writes: the data itself refuses the write by its fencing token.  Exit status 0 only if every ticket
was answered once, no two claims overlapped, and both troubles ended as they should.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent import POLL_SECONDS, TTL
from backlog import Backlog
from claims import Claim, Summary, concurrent, next_claim
from rich.console import Console
from rich.live import Live
from rich.table import Table

AGENTS = 12
TICKETS = 40
LONGEST_RUN_SECONDS = 60.0
TROUBLE_AFTER_SECONDS = 0.5
HERE = Path(__file__).resolve().parent

Report = dict[str, Any]


@dataclass(slots=True)
class Run:
    """All that the agents have reported so far."""

    claims: list[Claim] = field(default_factory=list)
    doing: dict[str, str] = field(default_factory=dict)  # {"agent-03": "ticket:7 granted"}
    stale_writes_refused: int = 0

    def take_in(self, report: Report) -> None:
        agent, event, ticket = report["agent"], report["event"], report["ticket"]
        self.doing[agent] = f"ticket:{ticket} {event}"
        if event == "granted":
            self.claims.append(
                Claim(agent, ticket, report["fencing_token"], report["at"], report["expires_at"])
            )
            return
        claim = self.newest_claim(agent)
        if event == "refused":
            self.stale_writes_refused += 1
        elif event == "released":
            claim.released_at = report["at"]
        if event in ("answered", "released"):
            claim.expires_at = report["expires_at"]

    def newest_claim(self, agent: str) -> Claim:
        return next(claim for claim in reversed(self.claims) if claim.agent == agent)

    def claim_of(self, agent: str) -> Claim | None:
        return next((claim for claim in self.claims if claim.agent == agent), None)


class Troublemaker:
    """Kills one agent in the middle of its work; stops another until its ticket is taken over."""

    def __init__(self, crashing: "AgentProcess", stalling: "AgentProcess") -> None:
        self._crashing = crashing
        self._stalling = stalling
        self.killed_at: float | None = None
        self._stopped = False
        self._continued = False

    def act(self, run: Run, backlog: Backlog, now: float) -> None:
        if self.killed_at is None and _is_ripe(run.claim_of(self._crashing.name), now):
            self._crashing.process.send_signal(signal.SIGKILL)
            self.killed_at = now
        stalled = run.claim_of(self._stalling.name)
        if not self._stopped and _is_ripe(stalled, now):
            self._stalling.process.send_signal(signal.SIGSTOP)
            self._stopped = True
        # Not before somebody newer has written: that is what the late write must not undo.
        if self._stopped and not self._continued and stalled and backlog.answers()[stalled.ticket]:
            self._stalling.process.send_signal(signal.SIGCONT)
            self._continued = True


def _is_ripe(claim: Claim | None, now: float) -> bool:
    return claim is not None and now >= claim.granted_at + TROUBLE_AFTER_SECONDS


class AgentProcess:
    """An agent, and a thread that passes its reports on."""

    def __init__(self, name: str, role: str, backlog: Path, reports: "queue.Queue[Report]") -> None:
        self.name = name
        self.role = role
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "agent.py"), name, str(backlog), "--role", role],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reports = reports
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._reports.put(json.loads(line))

    def finish(self) -> bool:
        """Whether it ended as its role should.  A process that still runs is killed."""
        if self.process.poll() is None:
            self.process.kill()
        status = self.process.wait()
        self._reader.join()
        return status == (-signal.SIGKILL if self.role == "crashing" else 0)


@contextmanager
def fresh_server() -> Iterator[dict[str, str]]:
    """A server of our own on a free port: {"url": ..., "service_key": ..., ...}."""
    process = subprocess.Popen(
        [sys.executable, "-m", "volcano_server", "dev", "--ephemeral", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        if not first_line:
            raise SystemExit("demo: the server did not start; what it said is above")
        yield json.loads(first_line)
    finally:
        process.terminate()
        process.wait(timeout=10)


def main() -> int:
    console = Console()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="volcano-demo-")))
        server = stack.enter_context(fresh_server())
        os.environ["VOLCANO_API_URL"] = server["url"]
        os.environ["VOLCANO_SERVICE_KEY"] = server["service_key"]
        backlog = Backlog(folder / "tickets.db")
        backlog.create(TICKETS)
        console.print(f"{AGENTS} agents, {TICKETS} tickets, TTL {TTL} s, server {server['url']}")
        summary = _run(console, backlog, folder / "tickets.db")
    return _report(console, summary)


def _run(console: Console, backlog: Backlog, path: Path) -> Summary:
    reports: queue.Queue[Report] = queue.Queue()
    started_at = time.monotonic()
    roles = ["crashing", "stalling"] + ["steady"] * (AGENTS - 2)
    agents = [
        AgentProcess(f"agent-{number:02}", role, path, reports)
        for number, role in enumerate(roles, start=1)
    ]
    run = Run(doing={agent.name: "starting" for agent in agents})
    trouble = Troublemaker(agents[0], agents[1])
    with _shown(console, run) as show:
        while any(agent.process.poll() is None for agent in agents):
            now = time.monotonic()
            if now - started_at > LONGEST_RUN_SECONDS:
                break
            trouble.act(run, backlog, now)
            _take_in(reports, run, show, patience=0.1)
    failed = [agent.name for agent in agents if not agent.finish()]
    _take_in(reports, run, lambda _: None, patience=0.0)
    return _summary(run, trouble, backlog, failed, time.monotonic() - started_at)


def _take_in(reports: "queue.Queue[Report]", run: Run, show: Any, *, patience: float) -> None:
    try:
        while True:
            report = reports.get(timeout=patience) if patience else reports.get_nowait()
            run.take_in(report)
            show(report)
            patience = 0.0
    except queue.Empty:
        return


def _summary(
    run: Run, trouble: Troublemaker, backlog: Backlog, failed: list[str], seconds: float
) -> Summary:
    crashed = [run.claim_of("agent-01")] if trouble.killed_at is not None else []
    takeover = next_claim(run.claims, crashed[0]) if crashed and crashed[0] else None
    return Summary(
        answers=backlog.answers(),
        overlaps=len(concurrent(run.claims)),
        crashed=len(crashed),
        reclaimed_after=takeover.granted_at - trouble.killed_at
        if takeover and trouble.killed_at is not None
        else None,
        reclaim_limit=TTL + 1 + POLL_SECONDS,
        stale_writes_refused=run.stale_writes_refused,
        seconds=seconds,
        agents_failed=failed,
    )


@contextmanager
def _shown(console: Console, run: Run) -> Iterator[Any]:
    """A live table on a terminal, a line per report elsewhere."""
    if not console.is_terminal:
        yield lambda report: console.print(
            f"{report['agent']}  ticket:{report['ticket']}  {report['event']}", highlight=False
        )
        return
    with Live(_table(run), console=console, refresh_per_second=10) as live:
        yield lambda _: live.update(_table(run))


def _table(run: Run) -> Table:
    table = Table("agent", "doing", "claims")
    for agent, doing in run.doing.items():
        table.add_row(agent, doing, str(sum(claim.agent == agent for claim in run.claims)))
    return table


def _report(console: Console, summary: Summary) -> int:
    console.print(f"{AGENTS} agents ran for {summary.seconds:.1f} s", highlight=False)
    if summary.reclaimed_after is not None:
        console.print(
            f"the killed agent's ticket was taken over after {summary.reclaimed_after:.1f} s",
            highlight=False,
        )
    console.print(summary.line(), highlight=False, style="bold")
    for fault in summary.faults():
        console.print(f"demo: {fault}", style="red", highlight=False)
    return 1 if summary.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
