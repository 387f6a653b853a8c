from pathlib import Path
from typing import Any

import httpx
import pytest
from running import PATIENCE, counted, line_with, load, requests, show, started, until

from volcano_sdk import VolcanoClient
from volcano_server.testing import VolcanoServer

NAME = "next-ticket"
Backlog = load("demo", "backlog").Backlog
open_desk = load("demo", "desk").open_desk


@pytest.fixture
def backlog(tmp_path: Path) -> Any:
    empty = Backlog(tmp_path / "tickets.db")
    empty.create(0)
    return empty


@pytest.mark.timeout(90)
def test_each_ticket_is_taken_once_it_is_there() -> None:
    lines = show(NAME)

    for ticket in range(1, 5):
        assert 1 == counted(lines, f"takes ticket {ticket}")
        taken = next(n for n, line in enumerate(lines) if line.endswith(f"takes ticket {ticket}"))
        assert lines.index(f"ticket {ticket} is there") <= taken + 1  # two processes print


def test_an_agent_with_nothing_to_do_is_told_and_does_not_ask(
    server: VolcanoServer, volcano: VolcanoClient, backlog: Any
) -> None:
    with open_desk(backlog) as url, started(server, NAME, "agent.py", "ann", url) as agent:
        until(lambda: requests(server, "events") == 1)
        with volcano.locks.with_lock("ticket:1", ttl=30):
            backlog.add(1)
        assert "ann takes ticket 1" == line_with(agent, "takes")
        until(lambda: backlog.answers() == {1: 1})
        agent.terminate()
        printed, complaints = agent.communicate(timeout=PATIENCE)

    assert ("", "", 0) == (printed, complaints, agent.returncode)
    assert 2 == requests(server, "acquire"), "ours, and the agent's one"
    assert 1 == requests(server, "events")
    assert 0 == requests(server, "read")


def test_the_ticket_of_a_dead_agent_is_taken_up_again(
    server: VolcanoServer, volcano: VolcanoClient, backlog: Any
) -> None:
    backlog.add(1)
    dead = volcano.locks.acquire("ticket:1", ttl=30)
    with open_desk(backlog) as url, started(server, NAME, "agent.py", "ann", url) as agent:
        until(lambda: requests(server, "events") == 1)
        until(lambda: requests(server, "acquire", "lock_held") == 1)
        server.clock.advance(31)

        assert "ann takes ticket 1" == line_with(agent, "takes")
        until(lambda: backlog.answers() == {1: 1})
    assert not backlog.mark(1, fencing_token=dead.fencing_token or 0)


def test_a_ticket_is_not_taken_while_it_is_written(
    server: VolcanoServer, volcano: VolcanoClient, backlog: Any
) -> None:
    with open_desk(backlog) as url, started(server, NAME, "agent.py", "ann", url) as agent:
        until(lambda: requests(server, "events") == 1)
        with volcano.locks.with_lock("ticket:2", ttl=30):
            httpx.put(f"{url}/tickets/2", trust_env=False).raise_for_status()
            with volcano.locks.with_lock("ticket:1", ttl=30):
                backlog.add(1)
            assert "ann takes ticket 1" == line_with(agent, "takes")
            until(lambda: requests(server, "acquire", "lock_held") >= 1)
        assert "ann takes ticket 2" == line_with(agent, "takes")


def test_a_ticket_that_is_there_stays_as_it_is(backlog: Any) -> None:
    backlog.add(1)
    assert backlog.answer(1, "Done.", fencing_token=7, agent="ann")
    backlog.add(1)

    assert {1: 1} == backlog.answers()
