from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volcano_server.quota import UNUSED, Quota, Spent, Window, exchanged, spend

SECOND = 1_000_000
NOON = 30_000_000 * 60 * SECOND  # the start of a minute


def test_operations_are_counted_down_and_the_first_beyond_the_limit_is_refused() -> None:
    quota = Quota()

    spents = [quota.spend("shop", limit=2, now=NOON + 15 * SECOND) for _ in range(4)]

    assert [(s.allowed, s.remaining) for s in spents] == [(1, 1), (1, 0), (0, 0), (0, 0)]
    assert (
        Spent(allowed=0, limit=2, remaining=0, reset_at=30_000_001 * 60, retry_after=45)
        == spents[3]
    )


def test_several_operations_are_allowed_in_order_until_the_limit() -> None:
    window, first = spend(UNUSED, 3, limit=5, now=NOON)
    window, second = spend(window, 3, limit=5, now=NOON)
    _, third = spend(window, 3, limit=5, now=NOON)

    assert [first.allowed, second.allowed, third.allowed] == [3, 2, 0]
    assert [first.remaining, second.remaining, third.remaining] == [2, 0, 0]


def test_no_operations_cost_nothing() -> None:
    window, spent = spend(Window(30_000_000, 4), 0, limit=5, now=NOON)

    assert (Window(30_000_000, 4), 1, 0) == (window, spent.remaining, spent.allowed)


@pytest.mark.parametrize(
    ("now", "retry_after"),
    [
        (NOON, 60),
        (NOON + 1, 60),
        (NOON + SECOND, 59),
        (NOON + 58 * SECOND + 1, 2),
        (NOON + 59 * SECOND, 1),
        (NOON + 60 * SECOND - 1, 1),
    ],
)
def test_the_wait_is_in_whole_seconds_rounded_up_and_at_least_one(
    now: int, retry_after: int
) -> None:
    _, spent = spend(UNUSED, 1, limit=1, now=now)

    assert (retry_after, 30_000_001 * 60) == (spent.retry_after, spent.reset_at)


def test_a_window_ends_with_its_minute_and_not_a_microsecond_before() -> None:
    full = Window(30_000_000, 1)

    assert spend(full, 1, limit=1, now=NOON + 60 * SECOND - 1)[1].allowed == 0
    assert spend(full, 1, limit=1, now=NOON + 60 * SECOND)[1].allowed == 1


def test_a_wall_clock_set_back_begins_a_fresh_window() -> None:
    window, spent = spend(Window(30_000_000, 1), 1, limit=1, now=NOON - 1)

    assert (Window(29_999_999, 1), 1) == (window, spent.allowed)


def test_one_project_does_not_use_up_the_quota_of_another() -> None:
    quota = Quota()
    quota.spend("shop", limit=1, now=NOON)

    assert quota.spend("bank", limit=1, now=NOON).allowed == 1
    assert quota.spend("shop", limit=1, now=NOON).allowed == 0


def test_a_limit_of_zero_is_no_limit() -> None:
    window, spent = spend(Window(30_000_000, 7), 500, limit=0, now=NOON)

    assert (500, 0, Window(30_000_000, 7)) == (spent.allowed, spent.limit, window)


def test_a_limit_that_was_lowered_within_the_window_refuses_and_never_goes_below_zero() -> None:
    window, spent = spend(Window(30_000_000, 7), 1, limit=5, now=NOON)

    assert (0, 0, Window(30_000_000, 7)) == (spent.allowed, spent.remaining, window)


# Several servers.


def test_what_other_servers_used_counts_from_the_exchange_on() -> None:
    window, _ = spend(UNUSED, 3, limit=10, now=NOON)

    window = exchanged(window, told=3, total=8)
    window, spent = spend(window, 9, limit=10, now=NOON)

    assert (spent.allowed, spent.remaining) == (2, 0)
    assert window == Window(30_000_000, used=5, told=3, elsewhere=5)
    window = exchanged(window, told=2, total=10)
    assert spend(window, 1, limit=10, now=NOON)[1].allowed == 0


def test_what_was_told_belongs_to_its_minute() -> None:
    window = exchanged(Window(30_000_000, used=3), told=3, total=100)

    assert spend(window, 1, limit=10, now=NOON + 60 * SECOND) == (
        Window(30_000_001, used=1),
        spend(UNUSED, 1, limit=10, now=NOON + 60 * SECOND)[1],
    )


def test_a_failed_exchange_is_told_again_and_a_late_one_is_forgotten() -> None:
    quota = Quota()
    quota.spend("shop", 4, limit=10, now=NOON)
    told = quota.untold(NOON)

    assert told == quota.untold(NOON) == {("shop", 30_000_000): 4}
    quota.exchange(told, {("shop", 30_000_000): 9})
    assert quota.untold(NOON) == {("shop", 30_000_000): 0}
    assert quota.untold(NOON + 60 * SECOND) == {}
    quota.spend("shop", 1, limit=10, now=NOON + 60 * SECOND)
    quota.exchange({("shop", 30_000_000): 1}, {("shop", 30_000_000): 10})
    assert quota.untold(NOON + 60 * SECOND) == {("shop", 30_000_001): 1}


def exchange(server: Quota, sums: Counter[tuple[str, int]]) -> None:
    told = server.untold(NOON)
    sums.update(told)
    server.exchange(told, sums)


TURNS = 3
"""From one exchange of a server to its next."""


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=20),
    st.lists(st.integers(0, TURNS - 1), min_size=3, max_size=3),
    st.integers(1, 30),
)
def test_servers_together_exceed_the_limit_by_what_all_but_one_let_through_in_two_exchanges(
    turns: list[list[int]], first_exchange: list[int], limit: int
) -> None:
    """The bound that docs/operations.md states, whenever each of three exchanges and asks."""
    servers, sums = [Quota() for _ in range(3)], Counter[tuple[str, int]]()
    allowed: list[list[int]] = [[] for _ in servers]  # turn by turn
    for number, asked in enumerate(turns):
        for each, server in enumerate(servers):
            if number % TURNS == first_exchange[each]:
                exchange(server, sums)
            allowed[each].append(server.spend("shop", asked[each], limit=limit, now=NOON).allowed)

    most = [max(sum(every[n : n + 2 * TURNS]) for n in range(len(turns) or 1)) for every in allowed]
    assert sum(map(sum, allowed)) <= limit + sum(most) - min(most)
    assert all(sum(each) <= limit for each in allowed)
    assert sum(map(sum, allowed)) >= min(limit, sum(map(sum, turns)))


def test_the_bound_is_reached_where_all_exchange_at_the_worst_moment() -> None:
    (this, other), sums = (Quota(), Quota()), Counter[tuple[str, int]]()

    def let_through(server: Quota, operations: int) -> int:
        return server.spend("shop", operations, limit=100, now=NOON).allowed

    allowed = let_through(this, 1)
    exchange(other, sums)
    allowed += let_through(other, 20)
    exchange(this, sums)
    exchange(other, sums)
    allowed += let_through(other, 20) + let_through(this, 100)

    assert allowed == 100 + 2 * 20
    exchange(this, sums)
    exchange(other, sums)
    assert let_through(this, 1) == let_through(other, 1) == 0
