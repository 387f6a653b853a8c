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
from volcano_server import (
    batch,
    events,
    fencing,
    following,
    hub,
    lease,
    quota,
    room,
    service,
    subscription,
    wire,
    wire_events,
)
from volcano_server.access import Caller
from volcano_server.events import Event, Kind
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
from volcano_server.problems import LOCK_OWNERSHIP_LOST, Problem
from volcano_server.stores import memory

SCENARIOS = {scenario.name: scenario for scenario in load_all()}

Break = Callable[[pytest.MonkeyPatch], None]
Decision = tuple[Slot, Answer]
Decide = Callable[[Slot, Command, int, int], Decision]
Rule = Callable[[Decide, Slot, Command, int, int], Decision]


def play(*names: str, patience: float = 5.0) -> list[suite.Result]:
    plan = Plan(ReferenceServer, workers=2, patience=patience)
    return suite.run([(SCENARIOS[n], None) for n in names], plan)


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


# ------------------------------------------------ events


def looks_do_not_see_the_grace(patch: pytest.MonkeyPatch) -> None:
    async def read(_self: following.Following, _slot_key: SlotKey) -> Free:
        return Free()

    patch.setattr(following.Following, "_read", read)


def a_lapse_is_told_early(patch: pytest.MonkeyPatch) -> None:
    looks_do_not_see_the_grace(patch)
    patch.setattr(following, "GRACE", 0)


def a_lapse_is_told_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(following, "GRACE", 2 * lease.GRACE)


def a_renewal_does_not_put_the_lapse_off(patch: pytest.MonkeyPatch) -> None:
    looks_do_not_see_the_grace(patch)
    patch.setattr(events, "_goes_on", lambda known, _fencing_token, _free_at: known)


def a_lapse_is_never_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(events, "_missed_end", lambda _known, _slot_key, _at: ())


def a_released_lease_lapses_too(patch: pytest.MonkeyPatch) -> None:
    honest = events.heard

    def heard(known: events.Known, event: Event) -> events.Followed:
        after, happened = honest(known, event)
        goes_on = event.kind is not Kind.ACQUIRED
        return (replace(after, free_at=known.free_at) if goes_on else after), happened

    patch.setattr(events, "heard", heard)


def leases_from_before_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(following.Following, "learn", lambda *_: None)


def an_event_is_dropped(patch: pytest.MonkeyPatch) -> None:
    honest = hub.Hub._publish

    def publish(self: hub.Hub, event: Event) -> None:
        if event.kind is not Kind.FORCE_RELEASED:
            honest(self, event)

    patch.setattr(hub.Hub, "_publish", publish)


def an_event_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    honest = hub.Hub._publish

    def publish(self: hub.Hub, event: Event) -> None:
        honest(self, event)
        honest(self, event)

    patch.setattr(hub.Hub, "_publish", publish)


def an_acquire_is_told_before_it_is_decided(patch: pytest.MonkeyPatch) -> None:
    honest = batch.BatchQueue.submit

    async def submit(self: batch.BatchQueue, command: Any) -> Answer:
        if isinstance(command, Acquire) and self.on_written is not None:
            granted = Granted(lease.SECOND, 1, lease.SECOND, begins=True)
            self.on_written([command], [granted])
        return await honest(self, command)

    patch.setattr(batch.BatchQueue, "submit", submit)


def a_renewal_is_an_event(patch: pytest.MonkeyPatch) -> None:
    honest = hub.Hub.told

    def told(self: hub.Hub, commands: Any, answers: Any) -> None:
        honest(self, commands, answers)
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(command, Renew) and not isinstance(answer, Problem):
                self._publish(Event(Kind.ACQUIRED, command.slot_key, answer.fencing_token, 0))

    patch.setattr(hub.Hub, "told", told)


def a_key_is_a_prefix(patch: pytest.MonkeyPatch) -> None:
    def follows(self: room.Room, key: str) -> bool:
        return any(self._matching(key))

    def matching(self: room.Room, key: str) -> Any:
        return (each for text, each in self._by_key.items() if key.startswith(text))

    patch.setattr(room.Room, "follows", follows)
    patch.setattr(room.Room, "_matching", matching)


def one_stream_hears(patch: pytest.MonkeyPatch) -> None:
    honest = room.Room._readers
    patch.setattr(room.Room, "_readers", lambda self, key: set(list(honest(self, key))[:1]))


def nobody_else_watches(patch: pytest.MonkeyPatch) -> None:
    honest = wire_events.event_block
    patch.setattr(room, "event_block", lambda event, event_id, _: honest(event, event_id, 1))


def an_event_has_one_more_member(patch: pytest.MonkeyPatch) -> None:
    honest = wire_events.event_block

    def event_block(event: Event, event_id: str, watchers: int) -> bytes:
        return honest(event, event_id, watchers).replace(b"}", b',"token":"0d6f"}')

    patch.setattr(room, "event_block", event_block)


def a_stream_begins_without_a_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(subscription, "COMMENT", b"")


def a_stream_never_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub.Hub, "_resume", lambda *_: None)


def an_unknown_id_is_an_old_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub.Hub, "_number_of", lambda self, _event_id: self._number)


def filters_do_not_linger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub, "LINGERS", 0)


def streams_of_all_projects_meet(patch: pytest.MonkeyPatch) -> None:
    one_project_for_all(patch)
    honest = hub.Hub.open

    async def open_stream(self: hub.Hub, project: str, *given: Any) -> Any:
        return await honest(self, project[:16], *given)

    patch.setattr(hub.Hub, "open", open_stream)


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
    (a_lapse_is_told_early, "server/events_a_lapse_comes_with_the_end_of_the_grace"),
    (a_lapse_is_told_late, "server/events_a_lapse_comes_with_the_end_of_the_grace"),
    (a_renewal_does_not_put_the_lapse_off, "server/events_a_renewal_puts_the_lapse_off"),
    (a_lapse_is_never_told, "server/events_a_lapse_before_the_next_acquired"),
    (a_released_lease_lapses_too, "server/events_no_lapse_after_a_release"),
    (leases_from_before_are_not_looked_for, "server/events_a_lease_from_before_lapses"),
    (an_event_is_dropped, "server/events_of_each_kind"),
    (an_event_is_told_twice, "server/events_in_order"),
    (an_acquire_is_told_before_it_is_decided, "server/events_only_of_what_became_so"),
    (a_renewal_is_an_event, "server/events_only_of_what_became_so"),
    (a_key_is_a_prefix, "server/events_of_other_keys_are_not_told"),
    (one_stream_hears, "server/events_go_to_every_stream"),
    (nobody_else_watches, "server/events_count_the_watchers"),
    (an_event_has_one_more_member, "server/events_have_exact_members"),
    (a_stream_begins_without_a_word, "server/events_begin_at_once"),
    (a_stream_never_goes_on, "server/events_go_on_where_they_stopped"),
    (an_unknown_id_is_an_old_one, "server/events_of_an_unknown_id_are_reset"),
    (filters_do_not_linger, "server/events_of_a_filter_that_lingers"),
    (streams_of_all_projects_meet, "server/events_of_another_project"),
    (an_anon_key_is_let_in, "server/events_need_the_permission"),
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

    (result,) = play(scenario, patience=1.5)

    assert result.outcome is Outcome.FAIL, result.detail
