"""The sync flavour's renewals: what goes together, and what threads and timers they need.

What was decided, and what an answer means, is in test_renew_many.py.
"""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from many import LOST, Items
from sync_stage import Stage, answer, hang, refused
from sync_stage import lost as unanswered

from volcano_sdk.errors import ConflictError, LockLostError
from volcano_sdk.guard import LockGuard
from volcano_sdk.operations import Answer
from volcano_sdk.renewals import Flight


def hold(stage: Stage, held: ExitStack, keys: str, ttl: int = 30) -> list[LockGuard]:
    return [held.enter_context(stage.locks.with_lock(key, ttl=ttl)) for key in keys]


def test_a_herd_of_locks_is_one_timer_and_one_request_at_a_time(stage: Stage) -> None:
    with ExitStack() as held:
        guards = [
            held.enter_context(stage.locks.with_lock(f"k{number}", ttl=30))
            for number in range(1000)
        ]
        assert len(stage.timers.due()) == 1
        stage.advance(95)
        assert not any(guard.lost for guard in guards)
        assert len(stage.timers.due()) == 1

    assert len(stage.wire.of("renew_many")) == 9 * 2  # of 500
    assert stage.wire.of("renew") == []


def test_a_lease_that_is_due_alone_uses_the_single_route(stage: Stage) -> None:
    with ExitStack() as held:
        hold(stage, held, "a")
        stage.advance(0.6)
        hold(stage, held, "b")
        stage.advance(0.4)
        hold(stage, held, "c")
        stage.advance(20)

    sent = [(round(one.at - 100, 6), one.keys) for one in stage.wire.sent[3:-3]]
    assert sent == [(10, ["a"]), (10.6, ["b", "c"]), (20, ["a"]), (20.6, ["b", "c"])]


def test_a_refused_lease_is_lost_alone(stage: Stage) -> None:
    stage.script(renew_many=[Items(b=LOST)])
    with ExitStack() as held:
        held.enter_context(pytest.raises(LockLostError))
        a, b, c = hold(stage, held, "abc")
        losses: list[LockLostError] = []
        b.on_lost(losses.append)
        stage.advance(10.1)
        assert [guard.lost for guard in (a, b, c)] == [False, True, False]
        assert isinstance(losses[0].__cause__, ConflictError)
        stage.advance(10)

    assert [one.keys for one in stage.wire.of("renew_many")] == [["a", "b", "c"], ["a", "c"]]


def test_a_batch_that_fails_in_transit_is_tried_again(stage: Stage) -> None:
    stage.script(renew_many=[unanswered, hang, answer(503)])
    with ExitStack() as held:
        guards = hold(stage, held, "abc")
        stage.advance(28)
        assert not any(guard.lost for guard in guards)


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_the_route_is_asked_once(stage: Stage, status: int) -> None:
    stage.script(renew_many=[refused(status, "not_found")])
    with ExitStack() as held:
        hold(stage, held, "abc")
        stage.advance(25)

    assert len(stage.wire.of("renew_many")) == 1
    assert [one.keys for one in stage.wire.of("renew")] == [["a"], ["b"], ["c"]] * 2
    assert [one.at - 100 for one in stage.wire.of("renew")] == [10] * 3 + [20] * 3


@pytest.mark.parametrize("status", [400, 413])
def test_what_the_server_finds_wrong_as_a_whole_is_sent_singly_this_time(
    stage: Stage, status: int
) -> None:
    stage.script(renew_many=[refused(status, "invalid_request")])
    with ExitStack() as held:
        hold(stage, held, "abc")
        stage.advance(25)

    assert [one.keys for one in stage.wire.of("renew")] == [["a"], ["b"], ["c"]]
    assert [one.at - 100 for one in stage.wire.of("renew_many")] == [10, 20]


def test_a_renewal_that_is_due_before_the_block_waits_also_through_a_fallback(
    stage: Stage,
) -> None:
    """Two answers to acquires took long: both must be renewed before their blocks run."""
    stage.script(renew_many=[refused(404, "not_found")])

    def late(sent_at: float) -> Answer:
        stage.timers.time += 11
        good = '{"expires_at": "2026-11-29T12:00:00Z", "fencing_token": 7}'
        return Answer(sent_at, 201, {}, good.encode())

    with ExitStack() as held:
        hold(stage, held, "a")
        stage.script(acquire=[late], renew=[unanswered, unanswered])
        hold(stage, held, "b")
        assert stage.wire.operations()[2:5] == ["renew_many", "renew", "renew"]
        assert [one.at - 111 for one in stage.wire.of("renew") if one.key == "b"] == [
            0,
            pytest.approx(0.1),
        ]
        assert stage.now == pytest.approx(111.1)


def test_a_request_is_abandoned_when_nobody_waits_for_it_any_more(stage: Stage) -> None:
    with ExitStack() as held:
        first = stage.locks.with_lock("a", ttl=30)
        first.__enter__()
        hold(stage, held, "b")
        stage.timers.after = lambda: None
        stage.advance(10)
        assert stage.runtime.renewals._begun() is not None
        first.__exit__(None, None, None)
        assert stage.wire.abandoned == []
        held.close()
        assert stage.wire.abandoned == ["/lock-leases"]
        stage.timers.after = stage.run_jobs


def test_what_ended_or_was_lost_while_it_was_asked_for_stays_so(stage: Stage) -> None:
    first = stage.locks.with_lock("a", ttl=30)
    first.__enter__()

    def ends_meanwhile(sent_at: float) -> Answer:
        first.__exit__(None, None, None)
        return Answer(sent_at, 200, {}, Items(a=LOST).body(stage.wire.sent[-2].body).encode())

    stage.script(renew_many=[ends_meanwhile])
    with stage.locks.with_lock("b", ttl=30) as guard:
        stage.advance(10.1)
        assert not guard.lost
        stage.advance(10)

    assert stage.wire.operations()[2:] == ["renew_many", "release", "renew", "release"]


def test_locks_that_are_lost_before_a_worker_comes_to_them_send_nothing(stage: Stage) -> None:
    with ExitStack() as held:
        held.enter_context(pytest.raises(LockLostError))
        hold(stage, held, "ab")
        stage.timers.after = lambda: None
        stage.advance(10)
        stage.block(20)
        stage.run_jobs()
        stage.timers.after = stage.run_jobs
        assert stage.wire.operations() == ["acquire"] * 2


def test_sixty_leases_with_slow_renewals_are_not_lost_to_a_queue(stage: Stage) -> None:
    """One lease a request, each request takes 200 ms, TTL 5, six threads: protocol.md's bound."""
    renewals = stage.runtime.renewals
    renewals._agenda.shares = False
    free, most_busy = 6, 0

    def carry_out(flight: Flight) -> Callable[[], None]:
        outcome = stage.wire.exchange(flight.attempt)

        def end() -> None:
            nonlocal free
            renewals._ended(flight, outcome)
            free += 1

        return end

    def work() -> None:
        nonlocal free, most_busy
        stage.callbacks.run_all()
        while free and stage.workers.jobs:
            stage.workers.jobs.pop()
            flight = renewals._begun()
            assert flight is not None
            free -= 1
            most_busy = max(most_busy, 6 - free)
            stage.timers.call_at(stage.now + 0.2, carry_out(flight))

    with ExitStack() as held:
        guards = [
            held.enter_context(stage.locks.with_lock(f"k{number}", ttl=5)) for number in range(60)
        ]
        stage.timers.after = work
        stage.advance(60)
        assert not any(guard.lost for guard in guards)
        assert most_busy == 6
        renewed = [sum(one.key == f"k{number}" for one in stage.wire.sent) for number in range(60)]
        assert min(renewed) > 20

        while free < 6 or stage.workers.jobs:  # let the last ones land
            stage.advance(0.2)
            stage.workers.jobs.clear()
        stage.timers.after = stage.run_jobs


def test_a_hung_renewal_gives_way_to_a_more_urgent_one(stage: Stage) -> None:
    """Every thread waits for an answer: after a second, those with most time left are freed."""
    renewals = stage.runtime.renewals
    with ExitStack() as held:
        for key, ttl in [("long", 600), ("longest", 900), ("long-too", 600)]:
            held.enter_context(stage.locks.with_lock(key, ttl=ttl))
        not_hung = held.enter_context(stage.locks.with_lock("not-hung", ttl=9000))._held
        stage.timers.after = lambda: None  # no thread is free
        flights = []
        for seconds in (200, 100):
            stage.advance(seconds)
            stage.workers.jobs.clear()
            flights.append(renewals._begun())
        assert [
            [one.holding.lease.key for one in flight.locks] for flight in flights if flight
        ] == [
            ["long", "long-too"],
            ["longest"],
        ]
        stage.workers.busy = True
        held.enter_context(stage.locks.with_lock("short", ttl=6))
        stage.advance(2.9)
        assert stage.wire.abandoned == []
        renewals._sent([not_hung], stage.now)  # for a tenth of a second
        stage.advance(0.1)
        assert stage.wire.abandoned == ["/locks/longest/lease"]
        stage.timers.after = stage.run_jobs

    # The bodies have ended.
    assert sorted(stage.wire.abandoned[1:]) == [
        "/lock-leases",
        "/locks/longest/lease",
        "/locks/not-hung/lease",
    ]


def test_a_renewal_never_makes_a_more_urgent_one_give_way(stage: Stage) -> None:
    with ExitStack() as held:
        held.enter_context(stage.locks.with_lock("short", ttl=6))
        held.enter_context(stage.locks.with_lock("long", ttl=9))
        stage.timers.after = lambda: None
        stage.advance(2)
        stage.workers.jobs.clear()
        assert stage.runtime.renewals._begun() is not None
        stage.workers.busy = True
        stage.advance(2.9)
        assert stage.wire.abandoned == []
        stage.timers.after = stage.run_jobs
