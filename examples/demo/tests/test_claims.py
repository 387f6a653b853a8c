"""The verdict on a run of the demo: what counts as an overlap, and what makes a run fail."""

import json
from dataclasses import replace

import pytest
from claims import Claim, Summary, by_language, concurrent, next_claim


def claim(agent: str, granted_at: float, released_at: float | None, *, ticket: int = 1) -> Claim:
    return Claim(agent, ticket, 1, granted_at, expires_at=granted_at + 5, released_at=released_at)


def test_a_claim_after_a_release_does_not_overlap() -> None:
    assert concurrent([claim("a", 0, 1), claim("b", 1, 2)]) == []


def test_a_claim_before_a_release_overlaps() -> None:
    first, second = claim("a", 0, 1.5), claim("b", 1, 2)

    assert [(first, second)] == concurrent([second, first]) or [(second, first)] == concurrent(
        [second, first]
    )


def test_a_dead_agents_claim_lasts_until_its_expiry() -> None:
    assert concurrent([claim("a", 0, None), claim("b", 5, 6)]) == []
    assert len(concurrent([claim("a", 0, None), claim("b", 4.9, 6)])) == 1


def test_a_release_after_the_expiry_does_not_lengthen_a_claim() -> None:
    assert concurrent([claim("stalled", 0, 9), claim("b", 6, 7)]) == []


def test_claims_of_different_tickets_never_overlap() -> None:
    assert concurrent([claim("a", 0, 1), claim("b", 0, 1, ticket=2)]) == []


def test_the_next_claim_is_the_first_later_one_of_the_ticket() -> None:
    crashed, other = claim("a", 0, None), claim("b", 1, 2, ticket=2)
    takeover, later = claim("c", 6, 7), claim("d", 8, 9)

    assert next_claim([later, takeover, other, crashed], crashed) is takeover
    assert next_claim([crashed, other], crashed) is None


def test_claims_are_counted_by_language() -> None:
    languages = {"a": "python", "b": "js", "c": "python", "d": "ruby"}
    claims = [claim("a", 0, 1), claim("b", 1, 2), claim("c", 2, 3)]

    assert {"python": 2, "js": 1, "ruby": 0} == by_language(claims, languages)


GOOD = Summary(
    answers={1: 1, 2: 1},
    claims={"python": 2, "js": 1},
    overlaps=0,
    crashed=1,
    reclaimed_after=6.2,
    reclaim_limit=7.0,
    stale_writes_refused=1,
    seconds=12.0,
)


def test_a_summary_for_programs_says_what_the_line_says() -> None:
    told = replace(GOOD, overlaps=1).as_json()

    assert told == json.loads(json.dumps(told))
    assert (2, 1, 1, False) == (
        told["answered"],
        told["concurrent_claims"],
        told["stale_writes_refused"],
        told["ok"],
    )
    assert ["two agents held one ticket at the same time"] == told["faults"]


def test_a_good_run_has_no_faults() -> None:
    assert GOOD.faults() == []
    assert GOOD.line() == (
        "2 answered, 0 concurrent claims, 1 crashed and reclaimed, 1 stale write refused"
    )


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ({"acquire": 9, "events": 2}, "2 event streams, 0 reads: nobody polled"),
        ({"acquire": 9, "events": 2, "read": 4}, "2 event streams, 4 reads"),
        ({"acquire": 9}, "0 event streams, 0 reads"),
    ],
)
def test_who_reads_again_and_again_is_not_said_to_be_told(
    requests: dict[str, int], said: str
) -> None:
    assert f"9 tries for 3 claims, {said}" == replace(GOOD, requests=requests).asked()


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, answers={}),
        replace(GOOD, answers={1: 1, 2: 0}),
        replace(GOOD, answers={1: 1, 2: 2}),
        replace(GOOD, claims={"python": 3, "js": 0}),
        replace(GOOD, overlaps=1),
        replace(GOOD, crashed=0),
        replace(GOOD, reclaimed_after=None),
        replace(GOOD, reclaimed_after=7.1),
        replace(GOOD, stale_writes_refused=0),
        replace(GOOD, agents_failed=["agent-03"]),
    ],
)
def test_each_fault_fails_the_run(bad: Summary) -> None:
    assert len(bad.faults()) == 1
