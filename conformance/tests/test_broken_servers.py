"""The reference server passes, and with one rule broken it is caught by the scenario named here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conformance import suite
from conformance.reference import ReferenceServer
from conformance.scenario import load_all
from conformance.suite import Outcome, Plan
from volcano_server import fencing, lease, quota, service, wire
from volcano_server.lease import Acquire, Free, Granted, Held, Release, Released, Renew, Slot

SCENARIOS = {scenario.name: scenario for scenario in load_all()}

Break = Callable[[pytest.MonkeyPatch], None]


def play(*names: str) -> list[suite.Result]:
    return suite.run([(SCENARIOS[n], None) for n in names], Plan(ReferenceServer, workers=2))


def no_grace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "GRACE", 0)


def no_margin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "MARGIN", 0)


def no_hard_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "LONGEST", 10 * lease.LONGEST)


def tokens_start_again_after_a_release(patch: pytest.MonkeyPatch) -> None:
    def emptied(slot: Slot, now: int) -> Slot:
        del slot
        return Slot(fencing_token=0, lease=None, changed_at=now)

    patch.setattr(lease, "_emptied", emptied)


def a_token_from_the_clock_alone(patch: pytest.MonkeyPatch) -> None:
    def next_token(last: int, floor: int) -> int:
        del last
        return floor

    patch.setattr(fencing, "next_token", next_token)


def a_renewal_creates(patch: pytest.MonkeyPatch) -> None:
    honest = lease._renew

    def renew(slot: Slot, command: Renew, now: int) -> tuple[Slot, Any]:
        if slot.is_free(now):
            acquire = Acquire(command.slot_key, command.token, command.ttl_seconds)
            return lease._acquire(slot, acquire, now, now)
        return honest(slot, command, now)

    patch.setattr(lease, "_renew", renew)


def anybody_may_renew(patch: pytest.MonkeyPatch) -> None:
    honest = lease._renew

    def renew(slot: Slot, command: Renew, now: int) -> tuple[Slot, Any]:
        if slot.lease is not None:
            command = replace(command, token=slot.lease.token)
        return honest(slot, command, now)

    patch.setattr(lease, "_renew", renew)


def anybody_may_release(patch: pytest.MonkeyPatch) -> None:
    def release(slot: Slot, command: Release, now: int) -> tuple[Slot, Any]:
        del command
        return lease._emptied(slot, now), Released()

    patch.setattr(lease, "_release", release)


def a_release_of_a_free_key_is_refused(patch: pytest.MonkeyPatch) -> None:
    honest = lease._release

    def release(slot: Slot, command: Release, now: int) -> tuple[Slot, Any]:
        if slot.lease is None:
            return slot, lease.LOCK_OWNERSHIP_LOST
        return honest(slot, command, now)

    patch.setattr(lease, "_release", release)


def a_repeated_acquire_is_a_new_lease(patch: pytest.MonkeyPatch) -> None:
    honest = lease._acquire

    def acquire(slot: Slot, command: Acquire, now: int, floor: int) -> tuple[Slot, Any]:
        after, answer = honest(slot, command, now, floor)
        if isinstance(answer, Granted) and after.fencing_token == slot.fencing_token:
            number = slot.fencing_token + 1
            return replace(after, fencing_token=number), replace(answer, fencing_token=number)
        return after, answer

    patch.setattr(lease, "_acquire", acquire)


def a_repeated_acquire_never_shortens(patch: pytest.MonkeyPatch) -> None:
    honest = lease._acquire

    def acquire(slot: Slot, command: Acquire, now: int, floor: int) -> tuple[Slot, Any]:
        after, answer = honest(slot, command, now, floor)
        if isinstance(answer, Granted) and slot.lease and after.lease:
            if after.lease.expires_at < slot.lease.expires_at:
                return slot, Granted(slot.lease.expires_at, slot.fencing_token, answer.expires_in)
        return after, answer

    patch.setattr(lease, "_acquire", acquire)


def ones_own_lapsed_lease_goes_on(patch: pytest.MonkeyPatch) -> None:
    honest = lease._acquire

    def acquire(slot: Slot, command: Acquire, now: int, floor: int) -> tuple[Slot, Any]:
        held = slot.lease
        if held and held.token == command.token and not slot.is_free(now):
            return lease._granted(slot, held, slot.fencing_token, command.ttl_seconds, now)
        return honest(slot, command, now, floor)

    patch.setattr(lease, "_acquire", acquire)


def a_read_forgets_the_grace(patch: pytest.MonkeyPatch) -> None:
    def read(slot: Slot, now: int) -> Any:
        if slot.lease is None or now >= slot.lease.expires_at:
            return Free()
        return Held(slot.lease.expires_at, slot.fencing_token)

    patch.setattr(lease, "_read", read)


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
        if not isinstance(caller, service.Problem) and caller.kind == "anon":
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
    patch.setattr(
        wire, "parse_key", lambda segment: honest(wire.unquote_to_bytes(segment) or segment)
    )


def one_project_for_all(patch: pytest.MonkeyPatch) -> None:
    honest = service.SlotKey
    patch.setattr(service, "SlotKey", lambda project, key: honest(project[:16], key))


def a_refusal_names_the_lock_token(patch: pytest.MonkeyPatch) -> None:
    honest = wire._parse_uuid

    def parse(header: str, value: bytes | None) -> str:
        try:
            return honest(header, value)
        except wire.InvalidRequestError as error:
            raise wire.InvalidRequestError(f"{error} Got {value!r}.") from None

    patch.setattr(wire, "_parse_uuid", parse)


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
