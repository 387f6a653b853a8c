"""Twelve agents on three SDKs, forty tickets, no queue: each ticket is answered once.

    ./dev demo [--without js|ruby]… [--watch] [--json]        sets everything up and runs this

Starts a fresh server and the agents as processes of their own, each on the Python, the JavaScript
or the Ruby SDK.  One agent is killed while it holds a ticket: its lease runs out and another takes
over.  One is stopped past its TTL, then goes on and writes: the data itself refuses the write by
its fencing token.  Exit status 0 only if every ticket was answered once, no two claims overlapped,
each language had its share, and both troubles ended as they should.
"""

import argparse
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from agent import TTL, WORK_SECONDS, now
from backlog import Backlog
from claims import Claim, Summary, by_language, concurrent, next_claim
from desk import open_desk
from rich.console import Console
from rich.live import Live
from rich.table import Table

AGENTS = 12
TICKETS = 40
LONGEST_START_SECONDS = 30.0
LONGEST_RUN_SECONDS = 50.0
HERE = Path(__file__).resolve().parent
RUBY_SDK = HERE.parents[1] / "sdks" / "ruby" / "lib"
COMMANDS = {
    "python": [sys.executable, str(HERE / "agent.py")],
    "js": ["node", str(HERE / "agent.mjs")],
    "ruby": ["ruby", "-w", "-I", str(RUBY_SDK), str(HERE / "agent.rb")],
}

Report = dict[str, Any]


@dataclass(slots=True)
class Run:
    """All that the agents have reported so far."""

    claims: list[Claim] = field(default_factory=list)
    doing: dict[str, str] = field(default_factory=dict)  # {"agent-03": "ticket:7 granted"}
    ready: set[str] = field(default_factory=set)
    at_work: dict[str, Claim] = field(default_factory=dict)  # {"agent-03": Claim(ticket=7, ...)}
    stale_writes_refused: int = 0

    def take_in(self, report: Report) -> None:
        agent, event = report["agent"], report["event"]
        self.doing[agent] = sentence(report)
        if event == "ready":
            self.ready.add(agent)
            return
        if event == "granted":
            ticket, token = report["ticket"], report["fencing_token"]
            self.claims.append(Claim(agent, ticket, token, report["at"], report["expires_at"]))
            return
        claim = next(claim for claim in reversed(self.claims) if claim.agent == agent)
        if event == "working":
            self.at_work[agent] = claim
            return
        self.at_work.pop(agent, None)
        if event == "refused":
            self.stale_writes_refused += 1
        elif event == "released":
            claim.released_at = report["at"]
        if event in ("answered", "released"):
            claim.expires_at = report["expires_at"]


def sentence(report: Report) -> str:
    ticket = f"ticket:{report['ticket']} " if "ticket" in report else ""
    return ticket + str(report["event"])


class AgentProcess:
    """An agent, and a thread that passes its reports on."""

    def __init__(
        self, name: str, language: str, role: str, desk: str, reports: "queue.Queue[Report]"
    ) -> None:
        self.name = name
        self.language = language
        self.role = role
        try:
            self.process = subprocess.Popen(
                [*COMMANDS[language], name, desk, role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError as error:
            raise SystemExit(
                f"demo: {error.filename} is not on PATH; or --without {language}"
            ) from None
        self._reports = reports
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __str__(self) -> str:
        return f"{self.name} ({self.language})"

    def go(self) -> None:
        """Agents begin when their stdin ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def finish(self) -> bool:
        """Whether it ended as its role should.  A process that still runs is killed."""
        if self.process.poll() is None:
            self.process.kill()
        status = self.process.wait()
        self._reader.join()
        return status == (-signal.SIGKILL if self.role == "crashing" else 0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._reports.put(json.loads(line))


class Troublemaker:
    """Kills one agent in the middle of its work; stops another until its ticket is taken over."""

    def __init__(self, crashing: AgentProcess, stalling: AgentProcess) -> None:
        self.crashing = crashing
        self.stalling = stalling
        self.crashed: Claim | None = None
        self.killed_at = 0.0
        self._stalled: Claim | None = None
        self._continued = False

    def act(self, run: Run, backlog: Backlog) -> None:
        if self.crashed is None and (claim := run.at_work.get(self.crashing.name)):
            self.crashing.process.send_signal(signal.SIGKILL)
            self.crashed, self.killed_at = claim, now()
        if self._stalled is None and (claim := run.at_work.get(self.stalling.name)):
            self.stalling.process.send_signal(signal.SIGSTOP)
            self._stalled = claim
        # Not before somebody newer has written: that is what the late write must not undo.
        if self._stalled and not self._continued and backlog.answers()[self._stalled.ticket]:
            self.stalling.process.send_signal(signal.SIGCONT)
            self._continued = True


def main() -> int:
    options = _options()
    languages = [each for each in COMMANDS if each not in options.without]
    console = Console(
        stderr=options.json,
        force_terminal=True if options.watch else None,
        highlight=False,
        soft_wrap=True,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="volcano-demo-")))
        server = stack.enter_context(fresh_server())
        os.environ["VOLCANO_API_URL"] = server["url"]
        os.environ["VOLCANO_SERVICE_KEY"] = server["service_key"]
        backlog = Backlog(folder / "tickets.db")
        backlog.create(TICKETS)
        desk = stack.enter_context(open_desk(backlog))
        reports: queue.Queue[Report] = queue.Queue()
        agents = _start(stack, languages, desk, reports)
        trouble = Troublemaker(
            *(next(a for a in agents if a.role == role) for role in ("crashing", "stalling"))
        )
        console.print(f"{AGENTS} agents ({', '.join(languages)}), {TICKETS} tickets, TTL {TTL} s")
        console.print(f"{trouble.crashing} will be killed, {trouble.stalling} will be stopped")
        summary = _run(console, agents, trouble, backlog, reports)
    if options.json:
        troubled = {"crashed": str(trouble.crashing), "stalled": str(trouble.stalling)}
        print(json.dumps({**summary.as_json(), "agents": AGENTS, "troubled": troubled}))
    return _report(console, summary)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev demo", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--without", action="append", default=[], choices=["js", "ruby"], metavar="js|ruby",
        help="run on the other languages",
    )  # fmt: skip
    parser.add_argument("--watch", action="store_true", help="the live table, also in a pipe")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    return parser.parse_args()


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


def _start(
    stack: ExitStack, languages: list[str], desk: str, reports: "queue.Queue[Report]"
) -> list[AgentProcess]:
    """Languages take turns; who has trouble is drawn anew for each run, from two languages."""
    dealt = [languages[number % len(languages)] for number in range(AGENTS)]
    crashing = random.randrange(AGENTS)
    others = [n for n in range(AGENTS) if n != crashing and dealt[n] != dealt[crashing]]
    stalling = random.choice(others or [n for n in range(AGENTS) if n != crashing])
    roles = {crashing: "crashing", stalling: "stalling"}
    agents = []
    for number, language in enumerate(dealt):
        role = roles.get(number, "steady")
        agent = AgentProcess(f"agent-{number + 1:02}", language, role, desk, reports)
        stack.callback(agent.finish)
        agents.append(agent)
    return agents


def _run(
    console: Console,
    agents: list[AgentProcess],
    trouble: Troublemaker,
    backlog: Backlog,
    reports: "queue.Queue[Report]",
) -> Summary:
    run = Run(doing={agent.name: "starting" for agent in agents})
    languages = {agent.name: agent.language for agent in agents}
    with _shown(console, run, languages) as show:
        given_up_at = now() + LONGEST_START_SECONDS
        while len(run.ready) < len(agents) and now() < given_up_at:
            if any(agent.process.poll() is not None for agent in agents):
                break  # it has said why; the summary names it
            _take_in(reports, run, show, patience=0.1)
        for agent in agents:
            agent.go()
        started_at = now()
        while any(agent.process.poll() is None for agent in agents):
            if now() - started_at > LONGEST_RUN_SECONDS:
                break
            trouble.act(run, backlog)
            _take_in(reports, run, show, patience=0.1)
    seconds = now() - started_at
    failed = [str(agent) for agent in agents if not agent.finish()]
    _take_in(reports, run, lambda _: None, patience=0.0)

    takeover = next_claim(run.claims, trouble.crashed) if trouble.crashed else None
    return Summary(
        answers=backlog.answers(),
        claims=by_language(run.claims, languages),
        overlaps=len(concurrent(run.claims)),
        crashed=1 if trouble.crashed else 0,
        reclaimed_after=takeover.granted_at - trouble.killed_at if takeover else None,
        reclaim_limit=TTL + 1 + WORK_SECONDS[1],
        stale_writes_refused=run.stale_writes_refused,
        seconds=seconds,
        agents_failed=failed,
        requests=_requests(),
    )


def _requests() -> dict[str, int]:
    """How many of each operation the server has answered: {"acquire": 139, ...}."""
    answer = httpx.get(f"{os.environ['VOLCANO_API_URL']}/metrics", trust_env=False)
    counts: Counter[str] = Counter()
    for operation, number in re.findall(_REQUESTS, answer.text):
        counts[operation] += int(float(number))
    return dict(counts)


_REQUESTS = r'(?m)^volcano_lock_requests_total\{operation="([^"]+)".*\} (\S+)$'


def _take_in(
    reports: "queue.Queue[Report]", run: Run, show: Callable[[Report], None], *, patience: float
) -> None:
    try:
        while True:
            report = reports.get(timeout=patience) if patience else reports.get_nowait()
            run.take_in(report)
            show(report)
            patience = 0.0
    except queue.Empty:
        return


@contextmanager
def _shown(
    console: Console, run: Run, languages: dict[str, str]
) -> Iterator[Callable[[Report], None]]:
    """A live table on a terminal, a line per report elsewhere."""
    if not console.is_terminal:
        yield lambda report: console.print(
            f"{report['agent']}  {languages[report['agent']]:6}  {sentence(report)}"
        )
        return
    with Live(_table(run, languages), console=console, refresh_per_second=10) as live:
        yield lambda _: live.update(_table(run, languages))


def _table(run: Run, languages: dict[str, str]) -> Table:
    table = Table("agent", "SDK", "doing", "claims")
    for agent, doing in run.doing.items():
        claims = sum(claim.agent == agent for claim in run.claims)
        table.add_row(agent, languages[agent], doing, str(claims))
    return table


def _report(console: Console, summary: Summary) -> int:
    console.print(f"{AGENTS} agents ran for {summary.seconds:.1f} s")
    claims = ", ".join(f"{count} {language}" for language, count in summary.claims.items())
    console.print(f"claims by SDK: {claims}")
    console.print(f"lock requests: {summary.asked()}")
    if summary.reclaimed_after is not None:
        after = f"{summary.reclaimed_after:.1f} s"
        console.print(f"the killed agent's ticket was taken over after {after}")
    console.print(summary.line(), style="bold")
    for fault in summary.faults():
        console.print(f"demo: {fault}", style="red")
    return 1 if summary.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
