"""The reference server passes, and with one rule broken it is caught by the scenario named here."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from conformance import suite
from conformance.reference import ReferenceServer
from conformance.scenario import load_all
from conformance.suite import Outcome, Plan
from volcano_server import batch, fencing, lease, quota, service, wire
from volcano_server.access import Caller
from volcano_server.lease import (
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Free,
    Granted,
    Read,
    Release,
    Renew,
    Slot,
    SlotKey,
)
from volcano_server.problems import LOCK_OWNERSHIP_LOST
from volcano_server.stores import memory

SCENARIOS = {scenario.name: scenario for scenario in load_all()}

Break = Callable[[pytest.MonkeyPatch], None]
Decision = tuple[Slot, Answer]
Decide = Callable[[Slot, Command, int, int], Decision]
Rule = Callable[[Decide, Slot, Command, int, int], Decision]


def play(*names: str) -> list[suite.Result]:
    return suite.run([(SCENARIOS[n], None) for n in names], Plan(ReferenceServer, workers=2))


def no_grace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "GRACE", 0)


def no_margin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "MARGIN", 0)


def no_hard_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "LONGEST", 10 * lease.LONGEST)


def rule(broken: Rule) -> Break:
    """Breaks `decide`: all of the lease rules go through it."""

    def break_it(patch: pytest.MonkeyPatch) -> None:
        honest = lease.decide

        def decide(slot: Slot, command: Command, now: int, floor: int) -> Decision:
            return broken(honest, slot, command, now, floor)

        patch.setattr(lease, "decide", decide)
        patch.setattr(memory, "decide", decide)  # its reads ask for it by this name

    break_it.__name__ = broken.__name__
    return break_it


def a_token_from_the_clock_alone(patch: pytest.MonkeyPatch) -> None:
    def next_token(last: int, floor: int) -> int:
        del last
        return floor

    patch.setattr(fencing, "next_token", next_token)


@rule
def tokens_start_again_after_a_release(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    after, answer = honest(slot, command, now, floor)
    return (replace(after, fencing_token=0) if after.lease is None else after), answer


@rule
def a_renewal_creates(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    if isinstance(command, Renew) and slot.is_free(now):
        command = Acquire(command.slot_key, command.token, command.ttl_seconds)
    return honest(slot, command, now, floor)


@rule
def anybody_may_renew(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    if isinstance(command, Renew) and slot.lease is not None:
        command = replace(command, token=slot.lease.token)
    return honest(slot, command, now, floor)


@rule
def anybody_may_release(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    if isinstance(command, Release):
        command = ForceRelease(command.slot_key)
    return honest(slot, command, now, floor)


@rule
def a_release_of_a_free_key_is_refused(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    if isinstance(command, Release) and slot.lease is None:
        return slot, LOCK_OWNERSHIP_LOST
    return honest(slot, command, now, floor)


@rule
def a_repeated_acquire_is_a_new_lease(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    after, answer = honest(slot, command, now, floor)
    if isinstance(command, Acquire) and isinstance(answer, Granted) and slot.lease is not None:
        number = max(slot.fencing_token + 1, after.fencing_token)
        return replace(after, fencing_token=number), replace(answer, fencing_token=number)
    return after, answer


@rule
def a_repeated_acquire_never_shortens(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    after, answer = honest(slot, command, now, floor)
    if isinstance(command, Acquire) and isinstance(answer, Granted) and slot.lease is not None:
        answer = replace(answer, expires_at=max(answer.expires_at, slot.lease.expires_at))
    return after, answer


@rule
def ones_own_lapsed_lease_goes_on(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    held = slot.lease
    if isinstance(command, Acquire) and held and held.token == command.token:
        return honest(slot, command, min(now, held.expires_at - 1), floor)
    return honest(slot, command, now, floor)


@rule
def a_read_forgets_the_grace(
    honest: Decide, slot: Slot, command: Command, now: int, floor: int
) -> Decision:
    if isinstance(command, Read) and slot.lease and now >= slot.lease.expires_at:
        return slot, Free()
    return honest(slot, command, now, floor)


def nulls_in_a_free_read(patch: pytest.MonkeyPatch) -> None:
    honest = wire.reply

    def reply(answer: Any, *, created: bool = False) -> wire.Reply:
        status, headers, body = honest(answer, created=created)
        if isinstance(answer, Free):
            body = b'{"held":false,"expires_at":null,"fencing_token":null}'
            headers = [(n, v) for n, v in headers if n != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
        return status, headers, body

    patch.setattr(wire, "reply", reply)


def the_quota_is_off_by_one(patch: pytest.MonkeyPatch) -> None:
    honest = quota.spend

    def spend(window: Any, operations: int, *, limit: int, now: int) -> tuple[Any, Any]:
        window, spent = honest(window, operations, limit=limit + 1, now=now)
        return window, replace(spent, limit=limit)

    patch.setattr(quota, "spend", spend)


def a_refused_credential_costs_quota(patch: pytest.MonkeyPatch) -> None:
    honest = service.LockService.admit

    def admit(self: service.LockService, authorization: bytes | None) -> Any:
        caller = self._access.authenticate(authorization)
        if isinstance(caller, Caller) and caller.kind == "anon":
            self._quota.spend(caller.project, limit=caller.quota, now=self._clock.wall())
        return honest(self, authorization)

    patch.setattr(service.LockService, "admit", admit)


def an_anon_key_is_let_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        service.LockService, "admit", lambda self, value: self._access.authenticate(value)
    )


def two_spellings_are_two_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        wire, "parse_lock_token", lambda value: wire._parse_uuid(wire.LOCK_TOKEN_HEADER, value)
    )


def keys_are_decoded_twice(patch: pytest.MonkeyPatch) -> None:
    honest = wire.parse_key
    patch.setattr(wire, "parse_key", lambda segment: honest(unquote_to_bytes(segment)))


def one_project_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "SlotKey", lambda project, key: SlotKey(project[:16], key))


def a_refusal_names_the_lock_token(patch: pytest.MonkeyPatch) -> None:
    honest = wire._parse_uuid

    def parse(header: str, value: bytes | None) -> str:
        try:
            return honest(header, value)
        except wire.InvalidRequestError as error:
            raise wire.InvalidRequestError(f"{error} Got {value!r}.") from None

    patch.setattr(wire, "_parse_uuid", parse)


def many_renewals_cost_one(patch: pytest.MonkeyPatch) -> None:
    honest = quota.Quota.spend

    def spend(self: quota.Quota, project: str, operations: int = 1, **given: Any) -> Any:
        if operations == 1:
            return honest(self, project, **given)
        return replace(honest(self, project, 0, **given), allowed=operations)

    patch.setattr(quota.Quota, "spend", spend)


def many_renewals_in_reverse(patch: pytest.MonkeyPatch) -> None:
    honest = batch.BatchQueue.submit_all

    async def submit_all(self: batch.BatchQueue, commands: Any) -> Any:
        return (await honest(self, commands[::-1]))[::-1]

    patch.setattr(batch.BatchQueue, "submit_all", submit_all)


def one_refusal_refuses_many(patch: pytest.MonkeyPatch) -> None:
    honest = batch.BatchQueue.submit_all

    async def submit_all(self: batch.BatchQueue, commands: Any) -> Any:
        answers = await honest(self, commands)
        refused = LOCK_OWNERSHIP_LOST in answers
        return [LOCK_OWNERSHIP_LOST] * len(answers) if refused else answers

    patch.setattr(batch.BatchQueue, "submit_all", submit_all)


def two_spellings_are_two_tokens_among_many(patch: pytest.MonkeyPatch) -> None:
    def renew(slot_key: SlotKey, token: str, ttl_seconds: int) -> Renew:
        return Renew(slot_key, token.upper(), ttl_seconds)

    patch.setattr(service, "Renew", renew)


def a_wrong_lease_among_many_is_left_out(patch: pytest.MonkeyPatch) -> None:
    honest = wire.parse_renewals

    def parse(body: bytes) -> list[wire.Renewal]:
        try:
            return honest(body)
        except wire.InvalidRequestError:
            leases = json.loads(body)["leases"]
            return honest(json.dumps({"leases": leases[:1]}).encode())

    patch.setattr(wire, "parse_renewals", parse)


def many_answers_without_their_keys(patch: pytest.MonkeyPatch) -> None:
    honest = wire._lease_in_many

    def lease_in_many(key: str, answer: Any) -> bytes:
        return json.dumps({"lock": key, **json.loads(honest(key, answer))}).encode()

    patch.setattr(wire, "_lease_in_many", lease_in_many)


BROKEN: list[tuple[Break, str]] = [
    (no_grace, "server/nobody_can_take_a_key_in_its_grace"),
    (no_margin, "server/a_late_renewal_is_refused"),
    (no_hard_deadline, "server/no_lease_lasts_over_90_days"),
    (tokens_start_again_after_a_release, "server/fencing_tokens_rise"),
    (a_token_from_the_clock_alone, "server/fencing_tokens_rise_for_each_key"),
    (a_renewal_creates, "server/a_renewal_never_creates"),
    (anybody_may_renew, "server/a_renewal_with_anothers_token_is_refused"),
    (anybody_may_release, "server/a_release_of_anothers_lease_is_refused"),
    (a_release_of_a_free_key_is_refused, "server/a_release_of_a_free_key_is_no_error"),
    (a_repeated_acquire_is_a_new_lease, "server/a_repeated_acquire_is_the_same_lease"),
    (a_repeated_acquire_never_shortens, "server/a_repeated_acquire_may_shorten"),
    (ones_own_lapsed_lease_goes_on, "server/ones_own_lapsed_lease_is_refused"),
    (a_read_forgets_the_grace, "server/a_key_reads_as_held_through_its_grace"),
    (nulls_in_a_free_read, "server/a_free_key_reads_as_not_held"),
    (the_quota_is_off_by_one, "server/the_quota_is_exact"),
    (a_refused_credential_costs_quota, "server/the_quota_is_exact"),
    (an_anon_key_is_let_in, "server/an_anon_key_may_do_nothing"),
    (two_spellings_are_two_tokens, "server/the_lock_token_is_compared_as_a_uuid"),
    (keys_are_decoded_twice, "server/a_raw_path_is_never_another_lock"),
    (one_project_for_all, "server/two_projects_do_not_meet"),
    (a_refusal_names_the_lock_token, "server/a_wrong_lock_token_is_refused"),
    (many_renewals_cost_one, "server/renew_many_costs_one_each"),
    (many_renewals_in_reverse, "server/renew_many_decides_in_order"),
    (one_refusal_refuses_many, "server/renew_many_refuses_one_alone"),
    (a_renewal_creates, "server/renew_many_refuses_one_alone"),
    (no_margin, "server/renew_many_keeps_the_margin"),
    (two_spellings_are_two_tokens_among_many, "server/renew_many_compares_tokens_as_uuids"),
    (a_wrong_lease_among_many_is_left_out, "server/renew_many_is_refused_as_a_whole"),
    (many_answers_without_their_keys, "server/renew_many_has_exact_members"),
    (an_anon_key_is_let_in, "server/renew_many_checks_the_credential"),
    (one_project_for_all, "server/renew_many_in_another_project"),
]


def test_the_reference_server_passes_everything() -> None:
    results = play(*(name for name, scenario in SCENARIOS.items() if scenario.is_for_servers))

    assert [r for r in results if r.outcome is not Outcome.PASS] == []


@pytest.mark.parametrize(
    ("break_it", "scenario"),
    BROKEN,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_rule_is_caught_by_its_scenario(
    break_it: Break, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)

    (result,) = play(scenario)

    assert result.outcome is Outcome.FAIL, result.detail
