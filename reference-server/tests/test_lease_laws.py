"""Laws of the lease rules under any sequence of requests, delays and lost answers.

The machine is a server and some callers who keep to protocol.md: requests are sent, then decided in
any order, singly or in a batch, and their answers arrive in any order, late or never.  Each caller
trusts its lease until its local deadline, counted as an SDK counts it.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from volcano_server import fencing
from volcano_server.lease import (
    LONGEST,
    SECOND,
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Free,
    Granted,
    Held,
    Lease,
    Read,
    Release,
    Released,
    Renew,
    Slot,
    SlotKey,
    decide_all,
)
from volcano_server.problems import Problem

KEYS = [SlotKey("shop", "nightly"), SlotKey("shop", "hourly")]
TRUST_AT_MOST = LONGEST - LONGEST // 1000
TTLS = st.sampled_from([5, 6, 7, 30, 86_400, 45 * 86_400, 7_776_000])
PAUSES = st.one_of(
    st.sampled_from([0, 1, SECOND - 1, SECOND, SECOND + 1]),
    st.integers(0, 8 * SECOND),
    st.integers(0, 2 * SECOND),
    st.sampled_from([29, 30, 31, 86_400, 30 * 86_400, 90 * 86_400]).map(lambda s: s * SECOND),
)


@dataclass(eq=False)
class Caller:
    """One lock token of one key, and until when its holder trusts it."""

    slot_key: SlotKey
    token: str
    first_sent: int
    shortest_ttl: int
    deadline: int | None = None  # None: no success heard of yet


@dataclass(eq=False)
class Sent:
    caller: Caller | None
    command: Command
    sent_at: int


@dataclass(eq=False)
class Answered:
    sent: Sent
    answer: Answer


@dataclass(eq=False)
class Grant:
    caller: Caller
    fencing_token: int
    granted_at: int
    expires_at: int = 0
    released: bool = False  # with its own token, or by force


class LeaseMachine(RuleBasedStateMachine):
    @initialize(wall=st.integers(0, 10**15))
    def start(self, wall: int) -> None:
        self.now = 10 * SECOND
        self.wall = wall
        self.slots: dict[SlotKey, Slot] = {}
        self.callers: list[Caller] = []
        self.sent: list[Sent] = []
        self.answered: list[Answered] = []
        self.grants: dict[SlotKey, list[Grant]] = {key: [] for key in KEYS}

    # The world.

    @rule(pause=PAUSES)
    def time_passes(self, pause: int) -> None:
        self.now += pause
        self.wall += pause

    @rule(step=st.integers(-(10**10), 10**10))
    def somebody_sets_the_wall_clock(self, step: int) -> None:
        self.wall = max(0, self.wall + step)

    # The callers.

    @rule(key=st.sampled_from(KEYS), ttl=TTLS)
    def a_new_caller_acquires(self, key: SlotKey, ttl: int) -> None:
        caller = Caller(key, f"token-{len(self.callers)}", self.now, ttl)
        self.callers.append(caller)
        self.send(caller, Acquire(key, caller.token, ttl), ttl)

    @rule(data=st.data(), ttl=TTLS)
    def a_caller_acquires_again(self, data: st.DataObject, ttl: int) -> None:
        if caller := self.some_caller(data):
            self.send(caller, Acquire(caller.slot_key, caller.token, ttl), ttl)

    @rule(data=st.data(), ttl=TTLS)
    def a_caller_renews(self, data: st.DataObject, ttl: int) -> None:
        if caller := self.some_caller(data):
            self.send(caller, Renew(caller.slot_key, caller.token, ttl), ttl)

    @rule(data=st.data())
    def a_caller_releases(self, data: st.DataObject) -> None:
        if caller := self.some_caller(data):
            self.sent.append(Sent(caller, Release(caller.slot_key, caller.token), self.now))

    @rule(key=st.sampled_from(KEYS))
    def an_operator_force_releases(self, key: SlotKey) -> None:
        self.sent.append(Sent(None, ForceRelease(key), self.now))

    @rule(key=st.sampled_from(KEYS))
    def somebody_reads(self, key: SlotKey) -> None:
        self.sent.append(Sent(None, Read(key), self.now))

    @rule(data=st.data(), ttl=TTLS, kind=st.sampled_from([Acquire, Renew, Release]))
    def a_caller_does_something_at_once(
        self, data: st.DataObject, ttl: int, kind: type[Acquire | Renew | Release]
    ) -> None:
        """The usual case: sent, decided and answered with nothing in between."""
        if caller := self.some_caller(data):
            if kind is Release:
                self.sent.append(Sent(caller, Release(caller.slot_key, caller.token), self.now))
            elif kind is Renew:
                self.send(caller, Renew(caller.slot_key, caller.token, ttl), ttl)
            else:
                self.send(caller, Acquire(caller.slot_key, caller.token, ttl), ttl)
            self.decide([self.sent[-1]])
            self.hear(self.answered[-1])

    # The network.

    @rule(data=st.data())
    def the_server_decides_a_batch(self, data: st.DataObject) -> None:
        if not self.sent:
            return
        batch = data.draw(
            st.lists(st.sampled_from(self.sent), min_size=1, max_size=6, unique_by=id)
        )
        self.decide(batch)

    @rule()
    def the_server_decides_all_that_was_sent(self) -> None:
        self.decide(list(self.sent))

    @rule(data=st.data())
    def a_request_is_lost(self, data: st.DataObject) -> None:
        if self.sent:
            self.sent.remove(data.draw(st.sampled_from(self.sent)))

    @rule(data=st.data())
    def an_answer_is_lost(self, data: st.DataObject) -> None:
        if self.answered:
            self.answered.remove(data.draw(st.sampled_from(self.answered)))

    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        if not self.answered:
            return
        self.hear(data.draw(st.sampled_from(self.answered)))

    def decide(self, batch: list[Sent]) -> None:
        for sent in batch:
            self.sent.remove(sent)
        before = dict(self.slots)
        floor = fencing.floor(highest_swept=0, wall=self.wall, opened_at=0)
        commands = [sent.command for sent in batch]
        answers, changed = decide_all(self.slots, commands, self.now, floor)
        assert self.slots == before | changed
        self.check_batch(before, batch, answers, floor)
        self.answered += [Answered(*pair) for pair in zip(batch, answers, strict=True)]

    def hear(self, answered: Answered) -> None:
        self.answered.remove(answered)
        caller, answer = answered.sent.caller, answered.answer
        if caller is None or not isinstance(answer, Granted):
            return
        expires_in = answer.expires_in // 1000 * 1000  # X-Volcano-Expires-In has milliseconds
        worth = answered.sent.sent_at + min(caller.shortest_ttl * SECOND, expires_in)
        worth = min(worth, caller.first_sent + TRUST_AT_MOST)
        caller.deadline = worth if caller.deadline is None else max(caller.deadline, worth)

    def send(self, caller: Caller, command: Acquire | Renew, ttl: int) -> None:
        caller.shortest_ttl = min(caller.shortest_ttl, ttl)
        if caller.deadline is not None:
            caller.deadline = min(caller.deadline, self.now + ttl * SECOND)
        self.sent.append(Sent(caller, command, self.now))

    def some_caller(self, data: st.DataObject) -> Caller | None:
        return data.draw(st.sampled_from(self.callers)) if self.callers else None

    # The laws.

    def check_batch(
        self, before: dict[SlotKey, Slot], batch: list[Sent], answers: list[Answer], floor: int
    ) -> None:
        """Follow the batch, command by command, in a model that knows only who holds what."""
        live = {key: live_lease(slot, self.now) for key, slot in before.items()}
        for sent, answer in zip(batch, answers, strict=True):
            key = sent.command.slot_key
            lease = live.get(key)
            match answer:
                case Granted():
                    live[key] = self.check_grant(sent, answer, lease, floor)
                case Released():
                    if lease is not None:
                        assert sent.caller is None or sent.caller.token == lease.token
                        self.grants[key][-1].released = True
                    live[key] = None
                case Held():
                    assert lease is not None
                    assert answer.expires_at == lease.expires_at
                case Free():
                    assert lease is None
                case Problem():
                    assert not isinstance(sent.command, ForceRelease)
                    assert lease is not None or isinstance(sent.command, Renew)
        for key, slot in self.slots.items():
            assert live_lease(slot, self.now) == live.get(key)

    def check_grant(self, sent: Sent, answer: Granted, lease: Lease | None, floor: int) -> Lease:
        """The lease that the model holds from now on."""
        assert sent.caller is not None
        grants = self.grants[sent.command.slot_key]
        if lease is not None:
            assert sent.caller.token == lease.token, "never two holders"
            assert answer.fencing_token == grants[-1].fencing_token
        else:
            assert isinstance(sent.command, Acquire), "a renewal never creates"
            assert answer.fencing_token >= floor
            assert not grants or answer.fencing_token > grants[-1].fencing_token, "tokens rise"
            assert (
                not grants or grants[-1].released or self.now >= grants[-1].expires_at + SECOND
            ), "nobody takes a key within the grace"
            grants.append(Grant(sent.caller, answer.fencing_token, self.now))
        hard_deadline = grants[-1].granted_at + LONGEST
        grants[-1].expires_at = answer.expires_at
        assert answer.expires_at == self.now + answer.expires_in <= hard_deadline
        assert answer.expires_in >= 0
        return Lease(sent.caller.token, answer.expires_at, hard_deadline)

    @invariant()
    def no_holder_trusts_its_lease_past_the_grant_of_the_next(self) -> None:
        for grants in self.grants.values():
            displaced = {grant.caller for grant in grants if grant.released}
            latest = {grant.caller: place for place, grant in enumerate(grants)}
            for holder, place in latest.items():
                if holder in displaced or holder.deadline is None or grants[place] is grants[-1]:
                    continue
                assert holder.deadline <= grants[place + 1].granted_at

    @invariant()
    def a_repeated_release_changes_nothing(self) -> None:
        for key, slot in self.slots.items():
            for command in (ForceRelease(key), Release(key, "nobody")):
                slots = {key: slot}
                decide_all(slots, [command], self.now, 0)
                (again,), changed = decide_all(slots, [command], self.now, 0)
                assert not changed
                assert isinstance(again, Released) == (live_lease(slots[key], self.now) is None)


def live_lease(slot: Slot, now: int) -> Lease | None:
    return None if slot.is_free(now) else slot.lease


LeaseMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestLeaseLaws = LeaseMachine.TestCase
