"""Who shares a request, what it says, and what its answer means for each lease."""

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from many import GOOD_ITEM, LOST, Items

from volcano_sdk import renew_many
from volcano_sdk.errors import (
    ConflictError,
    LockLostError,
    RateLimitedError,
    ServerError,
    TransportError,
    VolcanoError,
)
from volcano_sdk.operations import Acquired, Answer, Failure, Grant, Outcome
from volcano_sdk.renew_many import Agenda, Kept
from volcano_sdk.renewal import Holding, Schedule

TOKEN = "4b5c3f7e-8f0c-4c3b-9a55-0d9d3c0f7a11"
REQUEST_ID = "0e3a1c52-77aa-4a53-8b1a-5f6f3f4f9f00"
EXPIRES_AT = datetime(2026, 11, 29, tzinfo=UTC)
SENT_AT = 110.0


def lock(key: str = "a", ttl: int = 30, taken_at: float = 100.0) -> Kept:
    acquired = Acquired(Grant(taken_at, EXPIRES_AT, 7, None), taken_at)
    return Kept(Holding(key, TOKEN, ttl, acquired, jitter=0.0))


def failed(kept: Kept, *, next_at: float) -> Kept:
    kept.holding.schedule = Schedule(next_at, failures=1)
    return kept


def agenda_of(*locks: Kept, shares: bool = True) -> Agenda[Kept]:
    agenda: Agenda[Kept] = Agenda()
    agenda.shares = shares
    for one in locks:
        agenda.moved(one)
    return agenda


def requests_at(agenda: Agenda[Kept], now: float) -> list[list[str]]:
    """The keys of each request that is sent at `now`."""
    assert agenda.pass_by(now) == []
    requests = []
    while taken := agenda.take(now):
        requests.append([one.holding.lease.key for one in taken])
    return requests


# --- who goes together


def test_those_that_are_due_within_half_a_second_go_along() -> None:
    agenda = agenda_of(
        lock("now", taken_at=100),
        lock("soon", taken_at=100.5),
        lock("later", taken_at=100.51),
    )

    assert requests_at(agenda, 110) == [["now", "soon"]]
    assert requests_at(agenda, 110.51) == [["later"]]


def test_of_a_short_lease_it_is_a_thirtieth_of_the_ttl() -> None:
    soon, later = lock("soon", 6, taken_at=108.2), lock("later", 6, taken_at=108.21)
    agenda = agenda_of(lock("now"), soon, later)

    assert requests_at(agenda, 110) == [["soon", "now"]]


def test_a_try_after_a_failure_is_not_brought_forward_but_goes_along_once_it_is_due() -> None:
    agenda = agenda_of(
        lock("now"),
        failed(lock("waits"), next_at=110.1),
        failed(lock("due"), next_at=110.0),
    )

    assert requests_at(agenda, 110) == [["now", "due"]]


def test_nothing_is_brought_forward_while_nothing_is_due() -> None:
    agenda = agenda_of(lock("a"), lock("b"))

    assert requests_at(agenda, 109.9) == []
    assert requests_at(agenda, 110) == [["a", "b"]]


def test_nothing_is_brought_forward_to_go_alone() -> None:
    agenda = agenda_of(lock("a"), lock("b", taken_at=100.2), shares=False)

    assert requests_at(agenda, 110) == [["a"]]
    assert requests_at(agenda, 110.2) == [["b"]]


def test_what_is_in_flight_or_has_had_its_last_try_does_not_go_along() -> None:
    no_more = lock("no more")
    no_more.holding.schedule = Schedule(math.inf, failures=3)
    agenda = agenda_of(lock("a"), no_more)
    assert requests_at(agenda, 110) == [["a"]]

    agenda.moved(lock("b", taken_at=100.1))

    assert requests_at(agenda, 110.1) == [["b"]]


def test_one_request_takes_500_the_earliest_stop_times_first() -> None:
    agenda = agenda_of(*(lock(f"long-{number}", 60, 90.0) for number in range(502)), lock("short"))

    requests = requests_at(agenda, 110)

    assert [len(keys) for keys in requests] == [500, 3]
    assert requests[0][0] == "short"


def test_those_that_must_go_alone_have_their_turn_by_their_stop_times() -> None:
    agenda = agenda_of(lock("b", 60, 90.0), lock("c", 90, 80.0))
    agenda.pass_by(110)
    agenda.again(lock("a", 30))
    agenda.again(lock("d", 300))

    assert agenda.requests_due == 3
    assert agenda.most_urgent == 129
    assert requests_at(agenda, 110) == [["a"], ["b", "c"], ["d"]]
    assert agenda.requests_due == 0
    assert agenda.most_urgent == math.inf


def test_the_ended_are_not_renewed_and_not_urgent() -> None:
    ended, other = lock("ended", 9, 105.0), lock("other")
    agenda = agenda_of(ended, other)
    agenda.pass_by(110)
    ended.holding.ended = True
    assert agenda.most_urgent == 129
    assert requests_at(agenda, 110) == [["other"]]

    ended, other = lock("ended", 60, 90.0), lock("other")
    agenda = agenda_of(ended, other)
    agenda.pass_by(110)
    ended.holding.ended = True
    assert requests_at(agenda, 110) == [["other"]]


def test_what_was_looked_at_and_did_not_go_along_keeps_its_moment() -> None:
    goes, waits = lock("goes", taken_at=100.1), lock("waits", 6, taken_at=108.3)
    agenda = agenda_of(lock("now"), goes, waits)

    assert requests_at(agenda, 110) == [["now", "goes"]]
    assert goes.wakes_at == pytest.approx(129.1)
    assert waits.wakes_at == pytest.approx(110.3)
    assert requests_at(agenda, 110.31) == [["waits"]]
    assert agenda.pass_by(129.05) != []
    assert goes.holding.loss is None
    assert goes in agenda.pass_by(129.2)


def test_without_the_route_each_needs_a_request() -> None:
    agenda = agenda_of(lock("a"), lock("b"))
    agenda.pass_by(110)
    assert agenda.requests_due == 1

    agenda.shares = False

    assert agenda.requests_due == 2
    assert requests_at(agenda, 110) == [["a"], ["b"]]


# --- moments


def test_the_next_moment_is_a_renewal_or_while_there_is_one_the_stop_time() -> None:
    first, second = lock("a"), lock("b", taken_at=105)
    agenda = agenda_of(first, second)
    assert agenda.next_moment == 110

    agenda.pass_by(110)
    assert agenda.next_moment == 115
    agenda.drop(second)
    assert agenda.next_moment == 129
    agenda.drop(first)
    assert agenda.next_moment == math.inf


def test_a_lock_whose_stop_time_has_come_is_to_be_looked_at() -> None:
    late, seen, other = lock("late"), lock("seen"), lock("other", taken_at=125)
    agenda = agenda_of(late, seen, other)
    seen.holding.lose("was lost", None)  # by another thread

    assert agenda.pass_by(129) == [late, seen]
    assert late.holding.loss is not None
    assert agenda.next_moment == 135


def test_locks_that_come_and_go_leave_nothing_behind() -> None:
    """A lease of 90 days whose body took a moment must not be remembered for a month."""
    agenda = agenda_of(stays := lock("stays"))
    for _ in range(1000):
        agenda.moved(goes := lock("goes", ttl=7_776_000))
        agenda.drop(goes)
        agenda.drop(goes)  # lost first, and then it ended

    assert len(agenda._moments) <= 2 * 1 + 64
    assert requests_at(agenda, 110) == [["stays"]]
    assert stays.wakes_at == 129


# --- the request


def attempt(*locks: Kept, now: float = SENT_AT) -> Any:
    return renew_many.attempt(
        locks, now=now, timeout=10.0, request_id=REQUEST_ID, service_key="sk-1"
    )


def test_several_leases_are_one_request_with_their_tokens_in_its_body() -> None:
    request = attempt(lock("a", 30), lock("b", 60)).request

    assert (request.operation, request.method, request.path) == (
        "renew_many",
        "PATCH",
        "/lock-leases",
    )
    assert json.loads(request.body) == {
        "leases": [
            {"key": "a", "token": TOKEN, "ttl_seconds": 30},
            {"key": "b", "token": TOKEN, "ttl_seconds": 60},
        ]
    }
    assert request.headers == {
        "Authorization": "Bearer sk-1",
        "Content-Type": "application/json",
        "X-Volcano-Request-Id": REQUEST_ID,
    }
    assert TOKEN not in repr(request)


def test_five_hundred_of_the_longest_leases_stay_below_the_servers_limit() -> None:
    locks = [lock("k" * 128, 7_776_000) for _ in range(renew_many.MOST)]

    assert len(attempt(*locks).request.body) <= 128 * 1024


def test_the_lease_with_least_left_says_how_long_the_try_may_take() -> None:
    assert attempt(lock("a", 600), lock("b", 15), now=105).timeout == pytest.approx(3)


def test_a_lease_alone_uses_the_single_route_and_its_tries_are_one_operation() -> None:
    kept = lock("a")
    first = attempt(kept).request
    assert (first.operation, first.path) == ("renew", "/locks/a/lease")

    failed(kept, next_at=110.1)
    assert attempt(kept).request is first
    attempt(kept, lock("b"))  # a request of its own
    assert attempt(kept).request is not first


# --- the answer


class Sent:
    """Leases "a", "b", "c" in one request at SENT_AT."""

    def __init__(self) -> None:
        self.locks = [lock("a"), lock("b"), lock("c")]
        self.agenda = agenda_of(*self.locks)
        self.agenda.pass_by(SENT_AT)
        assert self.agenda.take(SENT_AT) == self.locks
        self.request = attempt(*self.locks).request

    def ends(self, outcome: Outcome, now: float = SENT_AT + 0.5) -> None:
        renew_many.settle(
            self.agenda, self.locks, self.request, outcome, now=now, jitter=lambda: 0.0
        )

    def answered(self, status: int, body: str, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.ends(Answer(SENT_AT, status, named, body.encode()))

    def says(self, **items: dict[str, Any]) -> None:
        self.answered(200, Items(items).body(self.request.body))

    @property
    def due(self) -> list[float]:
        return [round(one.holding.schedule.due_at, 3) for one in self.locks]

    @property
    def losses(self) -> list[LockLostError | None]:
        return [one.holding.loss for one in self.locks]


def test_a_good_answer_renews_each_from_when_it_was_sent() -> None:
    sent = Sent()

    sent.says(b={**GOOD_ITEM, "expires_in": 25.5, "expires_at": "2026-11-29T00:01:00Z"})

    assert [one.holding.trust.deadline for one in sent.locks] == [140, 135.5, 140]
    assert sent.locks[1].holding.lease.expires_at == EXPIRES_AT + timedelta(minutes=1)
    assert sent.due == [120, 120, 120]
    assert not any(one.is_renewing for one in sent.locks)


@pytest.mark.parametrize("expires_in", [None, "12.5", True, -1, 1e-9, 1e400, [], math.nan])
def test_what_is_left_counts_only_where_it_is_a_number(expires_in: Any) -> None:
    sent = Sent()

    sent.says(b={**GOOD_ITEM, "expires_in": expires_in})

    assert sent.locks[1].holding.trust.deadline == 140


def test_each_has_jitter_of_its_own() -> None:
    sent = Sent()
    jitter = iter([-1.0, 0.0, 1.0])

    answer = Answer(SENT_AT, 200, {}, Items().body(sent.request.body).encode())
    renew_many.settle(
        sent.agenda, sent.locks, sent.request, answer, now=SENT_AT, jitter=lambda: next(jitter)
    )

    assert sent.due == [119, 120, 121]


def test_a_refused_lease_is_lost_alone() -> None:
    sent = Sent()

    sent.says(b=LOST)

    assert sent.losses[0] is sent.losses[2] is None
    cause = sent.losses[1] and sent.losses[1].__cause__
    assert isinstance(cause, ConflictError)
    assert (cause.status, cause.code, cause.request_id) == (409, "lock_ownership_lost", REQUEST_ID)


def test_another_fencing_token_is_a_loss_of_that_lease() -> None:
    sent = Sent()

    sent.says(b={**GOOD_ITEM, "fencing_token": 8})

    assert [loss is not None for loss in sent.losses] == [False, True, False]


@pytest.mark.parametrize("code", ["invalid_request", "permission_denied", "lock_held"])
def test_other_final_codes_are_final_for_that_lease(code: str) -> None:
    sent = Sent()

    sent.says(b={"error": "A sentence.", "code": code})

    assert [loss is not None for loss in sent.losses] == [False, True, False]


def test_a_lease_over_the_quota_is_tried_again_when_the_server_says() -> None:
    sent = Sent()

    sent.says(b={"error": "A sentence.", "code": "lock_rate_limited", "retry_after": 3})

    assert sent.due == [120, 113.5, 120]
    latest = sent.locks[1].holding._latest_failure
    assert isinstance(latest, RateLimitedError)
    assert latest.retry_after == 3


@pytest.mark.parametrize(
    "item",
    [
        {"error": "A sentence.", "code": "lock_service_unavailable"},
        {"error": "A sentence.", "code": "never_heard_of"},
        {"error": "A sentence.", "code": ["lock_ownership_lost"]},
        {"error": "A sentence."},
        {"expires_at": "tomorrow", "fencing_token": 7},
        {"expires_at": "2026-11-29T00:01:00Z", "fencing_token": "7"},
    ],
    ids=str,
)
def test_what_else_an_item_says_is_tried_again_for_that_lease(item: dict[str, Any]) -> None:
    sent = Sent()

    sent.says(b=item)

    assert sent.losses == [None] * 3
    assert sent.due == [120, 110.5, 120]
    assert isinstance(sent.locks[1].holding._latest_failure, ServerError)


@pytest.mark.parametrize(
    "body",
    [
        "junk",
        "[]",
        "{}",
        '{"leases": null}',
        '{"leases": {"a": 1}}',
        json.dumps({"leases": [{"key": "a", **GOOD_ITEM}, {"key": "b", **GOOD_ITEM}]}),
        json.dumps({"leases": [{"key": key, **GOOD_ITEM} for key in "abca"]}),
        json.dumps({"leases": [{"key": key, **LOST} for key in "acb"]}),
        json.dumps({"leases": [{"key": "a", **LOST}, {"key": "b", **LOST}, None]}),
        json.dumps({"leases": [{"key": "a", **LOST}, {"key": "b", **LOST}, LOST]}),
    ],
)
def test_an_answer_that_is_not_about_these_leases_is_tried_again(body: str) -> None:
    sent = Sent()

    sent.answered(200, body)

    assert sent.losses == [None] * 3
    assert sent.due == [110.5] * 3


@pytest.mark.parametrize("status", [201, 204, 302, 409, 418, 500, 503])
def test_any_other_status_is_tried_again_for_all(status: int) -> None:
    """A 409 too: of the whole, it says nothing of any one lease."""
    sent = Sent()

    sent.answered(status, '{"error": "A sentence.", "code": "lock_ownership_lost"}')

    assert sent.losses == [None] * 3
    assert sent.due == [110.5] * 3
    assert sent.agenda.shares


def test_a_quota_that_is_used_up_is_waited_for_by_all() -> None:
    sent = Sent()

    sent.answered(429, '{"error": "A.", "code": "lock_rate_limited"}', retry_after="4")

    assert sent.due == [114.5] * 3


def test_no_answer_is_tried_again_for_all_and_each_has_an_error_of_its_own() -> None:
    """What is put beside one loss later on must not turn up beside another."""
    sent = Sent()

    sent.ends(Failure(SENT_AT, TransportError("reset", request_id=REQUEST_ID), reached=True))

    assert sent.due == [110.5] * 3
    failures = [one.holding._latest_failure for one in sent.locks]
    assert len({id(failure) for failure in failures}) == 3
    for failure in failures:
        assert isinstance(failure, TransportError)
        assert (str(failure), failure.request_id) == ("reset", REQUEST_ID)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_credential_is_final_for_all(status: int) -> None:
    sent = Sent()

    sent.answered(status, '{"error": "A sentence.", "code": "x"}')

    for loss in sent.losses:
        assert loss is not None
        assert isinstance(loss.__cause__, VolcanoError)
        assert loss.__cause__.status == status


@pytest.mark.parametrize(
    ("status", "shares"), [(404, False), (405, False), (400, True), (413, True)]
)
def test_what_cannot_be_done_together_is_done_singly_at_once(status: int, *, shares: bool) -> None:
    sent = Sent()
    sent.locks[1].holding.ended = True

    sent.answered(status, '{"error": "A sentence.", "code": "x"}')

    assert sent.agenda.shares is shares
    assert sent.losses == [None] * 3
    assert requests_at(sent.agenda, SENT_AT + 0.5) == [["a"], ["c"]]
    assert [one.holding.schedule.failures for one in sent.locks] == [0] * 3


def test_a_route_that_was_missing_once_is_not_asked_for_again() -> None:
    """Two requests were in flight: the other one's 400 comes after the 404."""
    sent = Sent()
    sent.agenda.shares = False

    sent.answered(400, "{}")

    assert not sent.agenda.shares


def test_after_the_stop_time_no_answer_helps_and_nothing_is_sent() -> None:
    sent = Sent()

    sent.ends(Answer(SENT_AT, 404, {}, b""), now=129)

    assert all(loss is not None for loss in sent.losses)
    assert requests_at(agenda_of(), 129) == []
    assert sent.agenda.take(129) == []


def test_the_answer_to_an_ended_or_lost_lease_is_ignored() -> None:
    sent = Sent()
    sent.locks[0].holding.ended = True
    sent.locks[1].holding.lose("was lost", None)
    loss = sent.losses[1]

    sent.says(a=LOST)

    assert sent.losses == [None, loss, None]
    assert sent.due == [110, 110, 120]


def test_the_single_routes_answer_goes_to_its_lease() -> None:
    kept = lock("a")
    agenda = agenda_of(kept)
    agenda.pass_by(SENT_AT)
    agenda.take(SENT_AT)
    body = json.dumps(GOOD_ITEM).encode()

    renew_many.settle(
        agenda,
        [kept],
        attempt(kept).request,
        Answer(SENT_AT, 200, {}, body),
        now=SENT_AT,
        jitter=lambda: 0.0,
    )

    assert kept.holding.trust.deadline == 140
    assert not kept.is_renewing
