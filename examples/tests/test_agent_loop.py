import signal

import pytest
from running import PATIENCE, line_with, show, started

from volcano_sdk import VolcanoClient
from volcano_server.testing import VolcanoServer

NAME = "agent-loop"


@pytest.mark.timeout(90)
def test_a_loss_ends_the_request_in_the_middle() -> None:
    assert [
        "an operator took the lock away",
        "step 1 begins",
        "stopped: the lock is lost",
        "the caller hung up: summarise, step 1",
    ] == show(NAME)


def test_ctrl_c_ends_the_request_and_gives_the_lock_back(
    server: VolcanoServer, volcano: VolcanoClient
) -> None:
    with started(server, NAME, "model.mjs", 60) as model:
        url = line_with(model, "http")
        with started(server, NAME, "agent.mjs", "translate", url) as agent:
            line_with(agent, "step 1")
            agent.send_signal(signal.SIGINT)
            printed, _ = agent.communicate(timeout=PATIENCE)

        assert "stopped: SIGINT; the lock is given back\n" == printed
        assert 130 == agent.returncode
        assert not volcano.locks.get("task:translate").held
        line_with(model, "hung up")


def test_all_steps_are_taken_when_nothing_happens(server: VolcanoServer) -> None:
    with started(server, NAME, "model.mjs", 0) as model:
        url = line_with(model, "http")
        with started(server, NAME, "agent.mjs", "translate", url) as agent:
            printed, _ = agent.communicate(timeout=PATIENCE)

    assert ["step 1 begins", "step 2 begins", "step 3 begins", "done"] == printed.splitlines()


def test_a_second_agent_leaves_the_task_alone(server: VolcanoServer) -> None:
    with started(server, NAME, "model.mjs", 60) as model:
        url = line_with(model, "http")
        with started(server, NAME, "agent.mjs", "translate", url) as first:
            line_with(first, "step 1")
            with started(server, NAME, "agent.mjs", "translate", url) as second:
                printed, _ = second.communicate(timeout=PATIENCE)

            assert "another agent is at it\n" == printed
