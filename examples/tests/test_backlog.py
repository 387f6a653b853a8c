import pytest
from running import show


@pytest.mark.timeout(90)
def test_each_ticket_is_answered_once() -> None:
    lines = show("backlog")

    assert [f"ticket {n}" for n in range(1, 10)] == sorted(line[-8:] for line in lines)
