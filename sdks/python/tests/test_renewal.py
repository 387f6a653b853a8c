import math
from datetime import UTC, datetime
from typing import Any

import pytest
from tables import rows

from volcano_sdk import operations
from volcano_sdk.errors import ConflictError, LockLostError, ServerError, TransportError
from volcano_sdk.operations import Acquired, Answer, Failure, Grant, Outcome
from volcano_sdk.renewal import (
    LONGEST_TRUST,
    Holding,
    Schedule,
    Trust,
    renewal_delay,
    retry_delay,
    try_timeout,
)

EXPIRES_AT = datetime(2026, 11, 29, tzinfo=UTC)
TOKEN = "4b5c3f7e-8f0c-4c3b-9a55-0d9d3c0f7a11"
REQUEST = operations.renew("a", ttl=30, token=TOKEN, request_id=TOKEN, service_key="sk-1")


def grant(sent_at: float, *, fencing_token: int = 7, expires_in: float | None = None) -> Grant:
    return Grant(sent_at, EXPIRES_AT, fencing_token, expires_in)


def trust(ttl: int = 30, sent_at: float = 100.0, expires_in: float | None = None) -> Trust:
    return Trust.begun(Acquired(grant(sent_at, expires_in=expires_in), sent_at), ttl)


def holding(ttl: int = 30, sent_at: float = 100.0) -> Holding:
    return Holding("a", TOKEN, ttl, Acquired(grant(sent_at), sent_at), jitter=0.0)


def good(sent_at: float, fencing_token: int = 7) -> Answer:
    body = b'{"expires_at": "2026-11-29T00:01:00Z", "fencing_token": %d}' % fencing_token
    return Answer(sent_at, 200, {}, body)


def refused(sent_at: float, status: int, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(sent_at, status, named, b'{"error": "A sentence.", "code": "x"}')


def no_answer(sent_at: float) -> Failure:
    return Failure(sent_at, TransportError("reset"), reached=True)


# --- the tables


@pytest.mark.parametrize("row", rows("renewal_delay"), ids=str)
def test_a_renewal_is_due_when_the_table_says(row: dict[str, Any]) -> None:
    delay = renewal_delay(row["ttl"], row["remaining"], row["jitter"])
    assert delay == pytest.approx(row["seconds"], abs=1e-6)


@pytest.mark.parametrize("row", rows("retry_delay"), ids=str)
def test_a_failed_try_is_followed_when_the_table_says(row: dict[str, Any]) -> None:
    delay = retry_delay(row["ttl"], row["failures"], row["remaining"], row["jitter"])
    assert delay == pytest.approx(row["seconds"], abs=1e-6)


@pytest.mark.parametrize("row", rows("try_timeout"), ids=str)
def test_a_try_takes_as_long_as_the_table_says(row: dict[str, Any]) -> None:
    timeout = try_timeout(row["remaining"], row["client_timeout"])
    assert timeout == pytest.approx(row["seconds"], abs=1e-6)


@pytest.mark.parametrize("row", rows("stop_time"), ids=str)
def test_a_lease_is_trusted_until_the_table_says(row: dict[str, Any]) -> None:
    answered = Trust(first_sent_at=0.0, ttl=row["ttl"], deadline=row["ttl"])
    assert answered.stop_at == pytest.approx(row["seconds"], abs=1e-6)


# --- trust


def test_the_deadline_counts_from_the_send_of_the_answered_try() -> None:
    begun = Trust.begun(Acquired(grant(104.0), first_sent_at=100.0), 30)
    assert begun.deadline == 134.0


def test_what_the_server_says_is_left_counts_where_it_is_less() -> None:
    assert trust(30, expires_in=12.5).deadline == 112.5
    assert trust(30, expires_in=99.0).deadline == 130.0


def test_a_good_answer_never_moves_the_deadline_back() -> None:
    assert trust(30).answered(grant(90.0)).deadline == 130.0
    assert trust(30).answered(grant(110.0)).deadline == 140.0


def test_a_shorter_ttl_counts_from_its_send_and_for_ever() -> None:
    crossed = trust(30).sent(101.0, 5)

    assert crossed.deadline == 106.0
    assert crossed.answered(grant(102.0)).deadline == 107.0
    assert trust(30).sent(129.0, 5).deadline == 130.0


def test_a_longer_ttl_lengthens_nothing() -> None:
    assert trust(5).sent(101.0, 30).answered(grant(101.0)).deadline == 106.0


def test_nothing_is_trusted_to_the_last_minute_of_the_hard_deadline() -> None:
    day = 86_400
    held = trust(90 * day, sent_at=0.0)
    assert held.deadline == LONGEST_TRUST

    renewed = held.sent(70.0 * day, 90 * day).answered(grant(70.0 * day))
    assert renewed.deadline == LONGEST_TRUST < 90 * day


# --- schedule


def test_retry_after_is_waited_for_when_there_is_time() -> None:
    after = Schedule(0).after_failure(
        trust(30), sent_at=110.0, now=110.5, jitter=0.0, retry_after=4.0
    )
    assert after == Schedule(114.5, failures=1)


def test_a_retry_after_beyond_the_stop_time_leaves_one_last_try() -> None:
    last = Schedule(0).after_failure(
        trust(30), sent_at=110.0, now=111.0, jitter=0.0, retry_after=1e18
    )
    assert last == Schedule(120.0, failures=1, is_last=True)

    # It counts from the answer, not from the send.
    late = Schedule(0).after_failure(
        trust(30), sent_at=110.0, now=121.0, jitter=0.0, retry_after=9.0
    )
    assert late == Schedule(125.0, failures=1, is_last=True)

    after = last.after_failure(trust(30), sent_at=120.0, now=120.0, jitter=0.0)
    assert after.due_at == math.inf


def test_a_try_that_took_long_is_followed_at_once() -> None:
    after = Schedule(0).after_failure(trust(30), sent_at=110.0, now=116.0, jitter=0.0)
    assert after.due_at == 116.0


# --- holding


def test_a_renewal_is_due_at_a_third() -> None:
    held = holding(30)

    assert held.schedule.due_at == 110.0
    assert held.renewal(REQUEST, 110.0, 10.0).timeout == pytest.approx(19 / 3)


def test_a_shorter_ttl_brings_the_next_renewal_forward() -> None:
    held = holding(30)
    due_at = held.schedule.due_at

    held.sent(101.0, 30)
    assert held.schedule.due_at == due_at
    held.sent(102.0, 5)
    assert held.schedule.due_at == pytest.approx(102.0 + 5 / 3)


def test_a_renewed_lease_is_a_new_value_and_trusted_for_longer() -> None:
    held = holding(30)
    before = held.lease

    held.renewed(REQUEST, good(110.0), now=110.2, jitter=0.0)

    assert held.trust.deadline == 140.0
    assert held.lease.expires_at > before.expires_at
    assert held.schedule == Schedule(120.0)
    assert held.look(138.9) is None


def test_a_lease_that_nobody_renewed_is_lost_at_its_stop_time() -> None:
    held = holding(30)

    assert held.look(128.999) is None
    loss = held.look(129.0)

    assert isinstance(loss, LockLostError)
    assert "'a' (fencing token 7) was not renewed in time" in str(loss)
    assert TOKEN not in str(loss)
    assert loss.__cause__ is None
    assert held.look(0.0) is loss


def test_a_loss_by_the_clock_brings_what_failed_last() -> None:
    held = holding(30)
    held.renewed(REQUEST, no_answer(110.0), now=111.0, jitter=0.0)
    held.renewed(REQUEST, refused(112.0, 503), now=112.0, jitter=0.0)

    loss = held.look(129.0)

    assert loss is not None
    assert isinstance(loss.__cause__, ServerError)
    assert loss.status is None


def test_a_failure_before_the_last_success_is_no_cause() -> None:
    held = holding(30)
    held.renewed(REQUEST, no_answer(110.0), now=111.0, jitter=0.0)
    held.renewed(REQUEST, good(112.0), now=112.0, jitter=0.0)

    loss = held.look(141.0)

    assert loss is not None
    assert loss.__cause__ is None


@pytest.mark.parametrize("row", rows("error_names"), ids=lambda row: str(row["status"]))
def test_a_refused_renewal_is_final_or_transient_as_the_table_says(row: dict[str, Any]) -> None:
    held = holding(30)

    held.renewed(REQUEST, refused(110.0, row["status"]), now=110.5, jitter=0.0)

    assert (held.loss is not None) is (row["renewal"] == "final")
    if held.loss is not None:
        assert held.loss.status == row["status"]
        assert type(held.loss.__cause__).__name__ == row["error"]


@pytest.mark.parametrize(
    "outcome", [no_answer(110.0), Answer(110.0, 200, {}, b"junk"), refused(110.0, 418)]
)
def test_every_other_failure_is_tried_again(outcome: Outcome) -> None:
    held = holding(30)

    held.renewed(REQUEST, outcome, now=110.05, jitter=0.0)

    assert held.loss is None
    assert held.schedule == Schedule(110.1, failures=1)


def test_another_fencing_token_is_another_lease() -> None:
    held = holding(30)
    held.renewed(REQUEST, good(110.0, fencing_token=8), now=110.0, jitter=0.0)

    assert "it now has the fencing token 8" in str(held.loss)
    assert held.lease.fencing_token == 7


def test_an_answer_after_the_stop_time_saves_nothing() -> None:
    held = holding(30)
    held.renewed(REQUEST, good(128.0), now=129.5, jitter=0.0)

    assert held.loss is not None
    held.answered(grant(130.0), jitter=0.0)
    assert held.trust.deadline == 130.0


def test_after_the_end_nothing_is_lost() -> None:
    held = holding(30)
    held.ended = True

    held.renewed(REQUEST, refused(110.0, 409), now=110.0, jitter=0.0)

    assert held.look(200.0) is None
    held.lose("was lost", None)
    assert held.loss is None


def test_the_first_loss_counts() -> None:
    held = holding(30)
    held.lose("was lost: one", None)
    held.lose("was lost: two", None)

    assert "one" in str(held.loss)


def test_a_refused_release_is_a_loss_that_nobody_saw() -> None:
    refusal = ConflictError("another's", status=409)
    held = holding(30)
    held.ended = True

    loss = held.release_refused(refusal)

    assert loss.__cause__ is refusal
    assert held.release_refused(ConflictError("again")) is loss
