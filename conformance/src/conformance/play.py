"""Plays one scenario: one actor after the other does, sends, sleeps and sees what the script says.

In virtual mode nothing waits: between two steps the actors are brought to rest (*settled*: each
driver is quiet and has no request under way that its gate does not hold), so what is not there then
will never come.  The only real timer is the patience that turns a hang into a failure.
While an event stream is open, time goes on in pieces, so that the comments come in time.
In real mode `advance` sleeps.
"""

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import quote, quote_from_bytes, urlencode

from conformance.driver import Driver, DriverError, UnsupportedError
from conformance.gate import Gate, Parked
from conformance.match import Bindings, MismatchError, match
from conformance.relay import Relay
from conformance.scenario import Actor, Scenario, Step
from conformance.stream import Event, EventStream
from conformance.target import Answer, Headers, Target

T = TypeVar("T")

STILL = 0.15
"""So long must everything be settled in vain, in seconds, before a wait is given up."""

SLICE, SLICES = 0.05, 300
"""While requests are answered as they come, time goes on in slices, in seconds, so that an answer
is there before the try's timeout is; at most so many of them."""

SOON = 1.0
"""So long may an event of the server take, in seconds, after what it tells of."""

UNTOLD = 0.5
"""In real time so long must pass without an event, in seconds, to say that there is none."""

COMMENTS = 15.0
"""Between two comments on an open stream, in seconds, as a server sends them."""

_ROUTES = {
    "acquire": ("POST", "/locks/{}/lease"),
    "renew": ("PATCH", "/locks/{}/lease"),
    "release": ("DELETE", "/locks/{}/lease"),
    "get": ("GET", "/locks/{}"),
    "force_release": ("DELETE", "/locks/{}"),
    "renew_many": ("PATCH", "/lock-leases"),
}


_BY_HAND = {"fencing_token": 1, "expires_at": "2030-01-01T00:00:00.000Z"}
"""What a lease that is built by hand has where the script does not say."""


_TOLD = {"key": "", "fencing_token": 1, "at": "2030-01-01T00:00:00.000Z", "watchers": 1}
"""What an event has that is made up, where the script does not say."""


_GOOD = {"status": {"between": [200, 299]}}


class Mode(StrEnum):
    VIRTUAL = "virtual"
    REAL = "real"


class SkipError(Exception):
    """It cannot be played here; the text is the reason."""


@dataclass
class Player:
    """An actor on the stage: its driver process, its gate, and what the script has it remember."""

    actor: Actor
    driver: Driver
    gate: Gate
    credential: str | None
    calls: int = 0
    lock_call: str = ""  # of its last with_lock
    lease_call: str = ""  # of its last acquire
    last_came_at: float = 0.0  # its last named request, on the monotonic clock
    crashed: bool = False
    blocked: bool = False  # stands still: what is due must not run yet
    running: set[str] = field(default_factory=set)  # calls that have not ended

    def new_call(self, name: str | None) -> str:
        self.calls += 1
        call = name or str(self.calls)
        self.running.add(call)
        return call


class Play:
    def __init__(
        self,
        scenario: Scenario,
        target: Target,
        cast: Callable[[Actor], Player],
        mode: Mode = Mode.VIRTUAL,
        patience: float = 5.0,
    ) -> None:
        self.scenario, self.target, self.mode, self.patience = scenario, target, mode, patience
        self.conversation: list[str] = []
        self.step: Step = {}
        self.step_number = 0
        self.is_over = False
        """It was played to its end without a fault."""
        self.bindings = Bindings()
        self._cast = cast
        self.players: dict[str, Player] = {}
        self._callers: dict[str, str] = {}  # {"rival": its lock token}
        self._listening: dict[str, EventStream] = {}  # {"observer": the stream it opened}
        self._now = 0.0

    def run(self) -> None:
        """Raises MismatchError, DriverError, SkipError or UnsupportedError."""
        try:
            for actor in self.scenario.actors:
                self._on_stage(actor)
            for steps in self.scenario.rounds:
                self.bindings = Bindings()
                for self.step_number, self.step in enumerate(steps, 1):
                    self._play_step()
                self._check_that_callers_heard_all()
            self.step = {}
            self._check_that_all_is_over()
        finally:
            for stream in self._listening.values():
                stream.close()
        self.is_over = True

    def say(self, line: str) -> None:
        self.conversation.append(f"{self._now:9.3f} s  {line}")

    def _on_stage(self, actor: Actor) -> None:
        player = self._cast(actor)
        self.players[actor.name] = player
        player.driver.on_line = lambda way, line: self.say(
            f"{actor.name} {way} {json.dumps(line, ensure_ascii=False)}"
        )

    # ------------------------------------------------------------ steps

    def _play_step(self) -> None:
        step, who = self.step, self.step["who"]
        if who == "clock":
            self._clock(step)
        elif who not in self.players:
            self._caller(step)
        elif "does" in step:
            self._does(self.players[who], step)
        elif "sends" in step:
            self._sends(self.players[who], step)
        elif "waits" in step:
            self._waits(self.players[who], step)
        elif "event" in step:
            self._event(self.players[who], step)
        elif "hears" in step:
            self._hears(self.players[who], step["hears"])
        elif "sleeps" in step:
            self._sleeps(self.players[who], step["sleeps"])
        else:
            self._sees(self.players[who], step)

    def _does(self, player: Player, step: Step) -> None:
        verb, given = step["does"], dict(step.get("with", {}))
        if verb in ("crash", "exit"):
            self._leaves(player, verb)
        elif verb in ("outage", "outage_over"):
            self._come_to_rest(player)  # what was sent before belongs to before
            self._cut_off(player, given.get("then"))
        elif verb == "block":
            self._advance(given["seconds"], blocked=player)
        elif verb == "wake":
            self._run_what_is_due(player)
        elif verb == "finish":
            player.driver.command("finish", call=step.get("call", player.lock_call), **given)
        elif verb == "cancel":
            self._come_to_rest(player)  # in mid-flight, not before
            player.driver.command("cancel", call=step.get("call") or _only(player.running))
        elif verb == "look":
            if self.mode is Mode.VIRTUAL and not player.blocked:
                self._settle(player)
            seen = player.driver.command("look", call=step.get("call", player.lock_call))
            match(step["gets"], seen, self.bindings, "gets")
        else:
            self._call(player, verb, given, step.get("call"))

    def _leaves(self, player: Player, verb: str) -> None:
        self.say(f"{player.actor.name} {'is killed' if verb == 'crash' else 'reaches EOF'}")
        player.crashed = True
        if verb == "crash":
            player.driver.crash()
            return
        try:
            player.driver.end()
        except DriverError as error:
            wanted = "the process to end by itself, with status 0"
            raise MismatchError("exit", wanted, str(error)) from None

    def _cut_off(self, player: Player, verdict: Any) -> None:
        """From now on every request meets the verdict; None: that is over."""
        how = f"on its own: {verdict}" if verdict else "watched again"
        self.say(f"{player.actor.name} is {how}")
        player.gate.outage_answers = verdict not in (None, "hang")
        player.gate.outage = verdict and (lambda parked: self._in_vain(player, parked, verdict))

    def _in_vain(self, player: Player, parked: Parked, verdict: Any) -> None:
        self.say(f"{player.actor.name}, on its own, sends {parked}")
        if verdict == "hang":
            parked.hang()
        elif verdict == "lose_request":
            parked.decide_at_once(None)
        elif verdict == "deliver" and parked.operation() == "waits":
            answer, stream = self.target.listen(parked.path, parked.headers)
            if stream is None:
                parked.decide_at_once(answer)
            else:
                player.gate.open_at_once(parked, answer, stream, self.patience)
        elif verdict == "deliver":
            sent = self.target.send(parked.method, parked.path, parked.headers, parked.body)
            parked.decide_at_once(sent)
        else:
            parked.decide_at_once(made_up(verdict["answer"]))

    def _call(self, player: Player, verb: str, given: dict[str, Any], name: str | None) -> None:
        """with_lock, close or a direct call: started, not waited for."""
        call = player.new_call(name)
        given = self.bindings.fill(given)
        if verb in ("renew", "release"):
            lease = given.setdefault("lease", player.lease_call)
            if isinstance(lease, dict):
                given["lease"] = {**_BY_HAND, **lease, "key": self._key(lease["key"])}
        for place in {"key", "prefix"} & given.keys():
            given[place] = self._keys(given[place])
        if verb == "with_lock":
            player.lock_call = call
        elif verb == "acquire":
            player.lease_call = call
        player.driver.command(verb, call=call, **given)

    def _sends(self, player: Player, step: Step) -> None:
        if step["sends"] == "nothing":
            self._come_to_rest(player)
            waiting = player.gate.waiting()
            if waiting:
                raise MismatchError("sends", "nothing", str(waiting[0]))
            return
        parked = self._request(player, step, step["sends"], step.get("with", {}))
        self._carry_out(parked, step)

    def _request(
        self, player: Player, step: Step, operation: str, wanted: dict[str, Any]
    ) -> Parked:
        """The one that the step names: it has come, and is as it is wanted."""
        wanted = self._wanted(wanted)
        parked = self._await(
            player,
            f"a request: {operation}",
            lambda: self._named_request(player, step, operation, wanted),
            player.gate.wait,
        )
        player.gate.take(parked)
        player.last_came_at = parked.came_at
        self.say(f"{player.actor.name} sends {parked}")
        if flaw := parked.flaw(player.credential):
            raise MismatchError("sends", "a request as the protocol has it", f"{parked}: {flaw}")
        if parked.operation() != operation:
            raise MismatchError("sends", operation, str(parked))
        match(wanted, parked.seen(), self.bindings, "with")
        return parked

    def _named_request(
        self, player: Player, step: Step, operation: str, wanted: dict[str, Any]
    ) -> Parked | None:
        waiting = player.gate.waiting()
        if step.get("order") == "any":
            for parked in waiting:
                try:
                    if parked.operation() == operation:
                        match(wanted, parked.seen(), self.bindings.copy())
                        return parked
                except MismatchError:
                    continue
            return None
        return waiting[0] if waiting else None

    def _carry_out(self, parked: Parked, step: Step) -> None:
        verdict = step.get("then", "deliver")
        if verdict == "hang":
            self.say("    it hangs")
            parked.hang()
            return
        answer: Answer | None = None
        if verdict in ("deliver", "lose_response"):
            answer = self.target.send(parked.method, parked.path, parked.headers, parked.body)
        elif isinstance(verdict, dict):
            answer = made_up(self._in_order(self.bindings.fill(verdict["answer"]), parked))
        if answer is not None:
            self.say(f"    the server answers {answer.status} {answer.body.decode('latin-1')}")
            match(self._wanted(step.get("gets", {})), _by_key(answer), self.bindings, "gets")
        if answer is not None and verdict != "lose_response":
            parked.answer(answer, self.patience)
        else:
            self.say(f"    {verdict}")
            parked.lose(self.patience)

    # ------------------------------------------------------------ event streams of actors

    def _waits(self, player: Player, step: Step) -> None:
        if step["waits"] == "nothing":
            self._come_to_rest(player)
            if streams := player.gate.streams():
                raise MismatchError("waits", "no event stream", f"{len(streams)} open")
            if opening := player.gate.opening():
                raise MismatchError("waits", "no event stream", str(opening[0]))
            return
        filters = {"keys": [], "prefixes": [], **step["waits"]}
        filters["keys"] = sorted(self._keys(filters["keys"]))
        filters["prefixes"] = sorted(self._keys(filters["prefixes"]))
        parked = self._request(player, step, "waits", filters)
        if step.get("then", "deliver") != "deliver":
            self._carry_out(parked, step)
            return
        answer, stream = self.target.listen(parked.path, parked.headers)
        self.say(f"    the server answers {answer.status} {answer.body.decode('latin-1')}")
        match(step.get("gets", {}), answer.seen(), self.bindings, "gets")
        if stream is None:
            parked.answer(answer, self.patience)
        else:
            player.gate.open(parked, answer, stream, self.patience)

    def _event(self, player: Player, step: Step) -> None:
        if step["event"] == "nothing":
            self._come_to_rest(player)
            self._let_events_come(player.gate.streams())
            if found := player.gate.parked_event():
                raise MismatchError("event", "nothing", str(found[1]))
            return
        gate = player.gate
        found = self._soon(gate.streams(), gate.parked_event, gate.wait_for_change)
        if found is None:
            raise MismatchError("event", step["event"], self._instead(player))
        relay, event = found
        self.say(f"the server tells {player.actor.name}: {event}")
        self._match_event(step, event)
        verdict = step.get("then", "deliver")
        if verdict != "deliver":
            self.say(f"    {verdict}")
        {"deliver": relay.deliver, "drop": relay.drop, "lose": relay.lose}[verdict]()

    def _match_event(self, step: Step, event: Event) -> None:
        if event.type != step["event"]:
            raise MismatchError("event", step["event"], str(event))
        match(self._wanted(step.get("with", {})), event.seen(), self.bindings, "with")

    def _hears(self, player: Player, said: Any) -> None:
        self._come_to_rest(player)
        streams = player.gate.streams()
        if not streams:
            raise MismatchError("hears", "an open event stream", "none")
        stream = streams[-1]
        self.say(f"{player.actor.name}'s stream: {said}")
        if said == "silence":
            stream.is_silent = True
        elif said == "end":
            stream.end()
        elif said == "loss":
            stream.lose()
        elif "text" in said:
            stream.write(said["text"].encode())
        else:
            stream.write(_event_text(self._wanted(self.bindings.fill(said))).encode())

    def _soon(
        self,
        streams: Sequence[EventStream | Relay],
        find: Callable[[], T | None],
        wait: Callable[[float], None],
    ) -> T | None:
        """What the server is about to tell on these streams."""
        if self.target.catch_up is not None:
            self._let_events_come(streams)
            return find()
        give_up = time.monotonic() + (SOON if self.mode is Mode.VIRTUAL else self.patience)
        while True:
            found = find()
            if found is not None or time.monotonic() > give_up:
                return found
            wait(0.05)

    def _let_events_come(self, streams: Sequence[EventStream | Relay]) -> None:
        """Whatever the server has to tell of what was done is there afterwards."""
        if not streams:
            return
        if self.target.catch_up is None:
            time.sleep(UNTOLD)
            return
        self.target.catch_up()
        for stream in streams:
            stream.take_in(self.patience)

    # ------------------------------------------------------------ answers

    def _in_order(self, answer: dict[str, Any], parked: Parked) -> dict[str, Any]:
        """A made-up answer's `leases` as its body, in the order in which they were asked for."""
        if "leases" not in answer:
            return answer
        asked = [lease["key"] for lease in parked.json["leases"]]
        leases = [{**lease, "key": self._key(lease["key"])} for lease in answer.pop("leases")]
        leases.sort(key=lambda lease: asked.index(lease["key"]) if lease["key"] in asked else -1)
        return {**answer, "body": {"leases": leases}}

    def _sleeps(self, player: Player, wanted: Any) -> None:
        if self.mode is Mode.REAL:
            return
        self._settle(player)
        seconds = player.driver.command("sleeping")["seconds"]
        for asked in seconds:
            try:
                match(wanted, asked, self.bindings.copy())
                return
            except MismatchError:
                continue
        raise MismatchError("sleeps", wanted, seconds)

    def _sees(self, player: Player, step: Step) -> None:
        if step["sees"] == "nothing":
            self._come_to_rest(player)
            if events := player.driver.events():
                raise MismatchError("sees", "nothing", events[0])
            return
        wanted_call = step.get("call")

        def find() -> dict[str, Any] | None:
            events = player.driver.events()
            if wanted_call is not None:
                events = [event for event in events if event["call"] == wanted_call]
            return events[0] if events else None

        event = self._await(player, f"an event: {step['sees']}", find, player.driver.wait_for_event)
        player.driver.take(event)
        if event["event"] in ("returned", "raised"):
            player.running.discard(event["call"])
        if event["event"] != step["sees"]:
            raise MismatchError("sees", step["sees"], event)
        match(self._wanted(step.get("with", {})), event, self.bindings, "with")

    # ------------------------------------------------------------ callers

    def _caller(self, step: Step) -> None:
        if "event" in step:
            self._told(step)
            return
        if step["does"] == "watch":
            self._listen(step)
            return
        if step["does"] == "unwatch":
            self._stop_listening(step["who"])
            return
        repeat = step.get("repeat", {})
        if "until" in repeat:
            for _ in range(repeat["at_most"]):
                answer = self._exchange(step)
                try:
                    match(repeat["until"], answer.seen(), self.bindings.copy())
                except MismatchError:
                    match(step.get("gets", {}), answer.seen(), self.bindings, "gets")
                    continue
                return
            raise MismatchError("repeat", repeat["until"], f"not within {repeat['at_most']} times")
        times = int(self.bindings.fill(repeat.get("times", 1)))
        for _ in range(times):
            seen = self._exchange(step).seen()
            match(self._wanted(step.get("gets", _GOOD)), seen, self.bindings, "gets")

    def _listen(self, step: Step) -> None:
        who = step["who"]
        self._stop_listening(who)
        _, path, headers, _ = self._request_of(step)
        answer, stream = self.target.listen(path, headers)
        if stream is not None:
            self._listening[who] = stream
            stream.start(self.patience)
        self.say(f"{who} sends GET {path}")
        self.say(f"    the server answers {answer.status} {answer.body.decode('latin-1')}")
        begins = {"begins_with_a_comment": stream is not None and stream.begins_with_a_comment}
        match(step.get("gets", _GOOD), answer.seen() | begins, self.bindings, "gets")

    def _stop_listening(self, who: str) -> None:
        if stream := self._listening.pop(who, None):
            self._check_that_it_was_told(who, stream)
            stream.close()
            if self.target.catch_up is not None:
                self.target.catch_up()  # it has noticed

    def _told(self, step: Step) -> None:
        """An event on a caller's own stream."""
        stream = self._listening[step["who"]]
        if step["event"] == "nothing":
            self._check_that_it_was_told(step["who"], stream)
            return
        event = self._soon([stream], stream.first, stream.wait)
        if event is None:
            raise MismatchError("event", step["event"], "nothing")
        self.say(f"the server tells {step['who']}: {stream.take()}")
        self._match_event(step, event)

    def _check_that_it_was_told(self, who: str, stream: EventStream) -> None:
        self._let_events_come([stream])
        if event := stream.first():
            raise MismatchError(f"{who}'s stream", "no event that was not named", str(event))

    def _check_that_callers_heard_all(self) -> None:
        for who in list(self._listening):
            self._stop_listening(who)

    def _exchange(self, step: Step) -> Answer:
        method, path, headers, body = self._request_of(step)
        answer = self.target.send(method, path, headers, body)
        while answer.status == 429 and self._waits_for_quota(step):
            time.sleep(float(answer.seen()["headers"].get("retry-after", "1")))
            answer = self.target.send(method, path, headers, body)
        shown = f"{method} {path} {body.decode('utf-8', 'replace')}".rstrip()
        token = next((v for n, v in headers if n == "X-Volcano-Lock-Token"), None)
        self.say(f"{step['who']} sends {shown} token={token}")
        self.say(f"    the server answers {answer.status} {answer.body.decode('latin-1')}")
        return answer

    def _waits_for_quota(self, step: Step) -> bool:
        """A lasting server's quota is not the subject of steps that do not name it.

        Also where it is that of the scenario: the one before may have used the window up.
        """
        return self.mode is Mode.REAL and "429" not in str(step)

    def _request_of(self, step: Step) -> tuple[str, str, Headers, bytes]:
        given = self.bindings.fill(step.get("with", {}))
        verb = step["does"]
        if verb == "request":
            method, path = given["method"], given["path"]
        elif verb == "watch":
            method, path = "GET", given.get("path") or f"/lock-events?{self._query(given)}"
        else:
            method, path = _ROUTES[verb]
            path = path.format(self._segment(given.get("key", "")))
        credential = self.target.credentials[given.get("credential", "valid")]
        headers: dict[str, Any] = {
            "Authorization": credential and f"Bearer {credential}",
            "X-Volcano-Request-Id": given.get("request_id", str(uuid.uuid4())),
            "Content-Type": "application/json",
        }
        own = self._callers.setdefault(step["who"], str(uuid.uuid4()))
        if verb in ("acquire", "renew", "release"):
            headers["X-Volcano-Lock-Token"] = given.get("token", own)
        if "last_event_id" in given:
            headers["Last-Event-ID"] = given["last_event_id"]
        headers |= given.get("headers", {})
        body = b""
        if "body_text" in given:
            body = given["body_text"].encode()
        elif "body" in given:
            body = json.dumps(given["body"]).encode()
        elif verb in ("acquire", "renew"):
            body = json.dumps({"ttl_seconds": given["ttl"]}).encode()
        elif verb == "renew_many":
            leases = [self._renewal(lease, own) for lease in given["leases"]]
            leases *= int(given.get("times", 1))
            body = json.dumps({"leases": leases}).encode()
        return method, path, [(n, v) for n, v in headers.items() if v is not None], body

    def _query(self, given: dict[str, Any]) -> str:
        filters = []
        for name in ("key", "prefix"):
            values = self._keys(given.get(name, []))
            values = [values] if isinstance(values, str) else values
            filters += [(name, value) for value in values]
        return urlencode(filters)

    def _renewal(self, lease: dict[str, Any], own_token: str) -> dict[str, Any]:
        token = lease.get("token", own_token)
        return {"key": self._key(lease["key"]), "token": token, "ttl_seconds": lease["ttl"]}

    def _segment(self, key: Any) -> str:
        """One path segment; `{"raw": "…"}` goes out as it is."""
        if isinstance(key, dict):
            return str(key["raw"])
        return quote(self._key(key), safe="")

    def _key(self, key: Any) -> Any:
        """On a lasting server every run has keys of its own, but where keys are the subject."""
        if self.scenario.table == "keys":
            return key
        plain = isinstance(key, str) and 0 < len(key) <= 64 and key.isascii() and key.isprintable()
        own = plain and quote_from_bytes(key.encode(), safe=":") == key
        return self.target.key_prefix + key if own else key

    def _keys(self, keys: Any) -> Any:
        return [self._key(key) for key in keys] if isinstance(keys, list) else self._key(keys)

    def _wanted(self, wanted: dict[str, Any]) -> dict[str, Any]:
        wanted = dict(wanted)
        if isinstance(wanted.get("key"), str):
            wanted["key"] = self._key(wanted["key"])
        if isinstance(wanted.get("leases"), list):
            wanted["leases"] = [self._wanted(lease) for lease in wanted["leases"]]
        return wanted

    # ------------------------------------------------------------ time and rest

    def _clock(self, step: Step) -> None:
        given = step["with"]
        if "until" not in given:
            self._advance(given["seconds"], blocked=None)
            return
        player, taken = self.players[given["until"]], 0.0
        while not player.gate.waiting():
            if taken > given["seconds"] + (self.patience if self.mode is Mode.REAL else 0):
                wanted = f"a request of {player.actor.name} within {given['seconds']:g} s"
                raise MismatchError("until", wanted, "none")
            taken = round(taken + given["step"], 6)
            self._advance(given["step"], blocked=None)
            if self.mode is Mode.VIRTUAL:
                self._settle(player)
        if self.mode is Mode.VIRTUAL:
            match(step["takes"], taken, self.bindings, "takes")
        else:
            self._check_that_it_is_not_early(player, step["takes"])

    def _check_that_it_is_not_early(self, player: Player, takes: Any) -> None:
        """In real time far too early fails; too late fails only where the lease has lapsed.

        A request comes later than it was sent, on a busy machine by much; so half is allowed.
        """
        earliest = (takes["between"][0] if isinstance(takes, dict) else takes) / 2
        taken = player.gate.waiting()[0].came_at - player.last_came_at
        if taken < earliest:
            raise MismatchError("takes", f"{earliest:g} s or more since the last request", taken)

    def _advance(self, seconds: float, *, blocked: Player | None) -> None:
        name = blocked.actor.name if blocked else "clock"
        self.say(f"{name} {'stands still for' if blocked else '+'} {seconds:g} s")
        if self.mode is Mode.REAL:
            self._sleep(seconds, blocked)
            return
        while any(player.gate.streams() for player in self.players.values()):
            if seconds <= COMMENTS:
                break
            self._advance_in_slices(COMMENTS, blocked)
            seconds -= COMMENTS
        self._advance_in_slices(seconds, blocked)

    def _advance_in_slices(self, seconds: float, blocked: Player | None) -> None:
        slices = 1
        if any(player.gate.outage_answers for player in self.players.values()) and not blocked:
            slices = min(SLICES, math.ceil(seconds / SLICE)) or 1
        for _ in range(slices):
            self._advance_at_once(seconds / slices, blocked)

    def _advance_at_once(self, seconds: float, blocked: Player | None) -> None:
        players = [player for player in self.players.values() if not player.crashed]
        for player in players:
            self._settle(player)
        self._now += seconds
        if self.target.advance is not None:
            self.target.advance(seconds)
        self._let_events_come([s for player in players for s in player.gate.streams()])
        for player in players:
            player.blocked = player is blocked
            how = {"blocked": True} if player.blocked else {}
            player.driver.command("advance", seconds=seconds, **how)

    def _run_what_is_due(self, player: Player) -> None:
        if self.mode is Mode.VIRTUAL:
            player.blocked = False
            player.driver.command("advance", seconds=0)

    def _sleep(self, seconds: float, blocked: Player | None) -> None:
        self._now += seconds
        if blocked:
            blocked.driver.pause()
        time.sleep(seconds)
        if blocked:
            blocked.driver.resume()

    def _is_settled(self, player: Player) -> bool:
        held, written = player.gate.open_count(), player.gate.written()
        seen = player.driver.command("sleeping")
        return bool(
            seen["in_flight"] == held == player.gate.open_count()
            and sorted(seen.get("streaming", [])) == written == player.gate.written()
        )

    def _settle(self, player: Player) -> None:
        give_up = time.monotonic() + self.patience
        while not self._is_settled(player):
            if time.monotonic() > give_up:
                seen = player.driver.command("sleeping")
                raise MismatchError(
                    player.actor.name,
                    f"to come to rest with {player.gate.open_count()} requests under way"
                    f" and streams of {player.gate.written()} bytes",
                    f"{seen['in_flight']} under way, streams of {seen.get('streaming', [])}",
                )
            time.sleep(0.001)

    def _come_to_rest(self, player: Player) -> None:
        """Settled, and what was sent and given up within one `advance` has come too."""
        if self.mode is Mode.VIRTUAL:
            self._settle(player)
        player.gate.flush(self.patience)

    def _await(
        self,
        player: Player,
        what: str,
        find: Callable[[], T | None],
        wait: Callable[[float], None],
    ) -> T:
        give_up = time.monotonic() + self.patience
        settled_since: float | None = None
        while True:
            found = find()
            if found is not None:
                return found
            now = time.monotonic()
            still = settled_since is not None and now - settled_since > STILL
            if still or now > give_up:
                raise MismatchError("", what, self._instead(player))
            if self.mode is Mode.VIRTUAL and self._is_settled(player):
                if settled_since is None and not player.blocked:
                    self._run_what_is_due(player)
                settled_since = settled_since or now
            else:
                settled_since = None
            wait(0.01)

    def _instead(self, player: Player) -> str:
        parked = [f"a request: {parked}" for parked in player.gate.waiting()]
        events = [f"an event: {event}" for event in player.driver.events()]
        told = player.gate.parked_event()
        events += [f"an event of the server: {told[1]}"] if told else []
        return ", ".join(parked + events) or "nothing"

    def _check_that_all_is_over(self) -> None:
        for name, player in self.players.items():
            if player.crashed:
                continue
            self._come_to_rest(player)
            left = self._instead(player)
            if left != "nothing":
                raise MismatchError(f"{name}, at the end", "nothing more", left)
            if player.gate.streams():
                raise MismatchError(f"{name}, at the end", "no event stream", "one that is open")


def _by_key(answer: Answer) -> dict[str, Any]:
    """As `seen`, with `leases` in the order of their keys, as a step lists them."""
    seen = answer.seen()
    leases = seen.get("leases")
    if isinstance(leases, list) and all(isinstance(lease, dict) for lease in leases):
        seen["leases"] = sorted(leases, key=lambda lease: str(lease.get("key")))
    return seen


def made_up(answer: dict[str, Any]) -> Answer:
    """An answer that the script gives in the server's place."""
    if "body_text" in answer:
        body = answer["body_text"].encode()
    elif "body" in answer:
        body = json.dumps(answer["body"]).encode()
    elif "code" in answer:
        body = json.dumps({"error": "As the script has it.", "code": answer["code"]}).encode()
    else:
        body = b""
    headers = {"Content-Type": "application/json", **answer.get("headers", {})}
    return Answer(answer["status"], list(headers.items()), body)


def _event_text(said: dict[str, Any]) -> str:
    """An event that the script tells in the server's place."""
    facts = {} if said["type"] == "reset" else {**_TOLD, **said}
    kind, number = said["type"], said.get("id", "made-up")
    data = json.dumps({name: facts[name] for name in _TOLD if name in facts})
    return f"event: {kind}\nid: {number}\ndata: {data}\n\n"


def _only(calls: set[str]) -> str:
    if len(calls) != 1:
        raise DriverError(f"the script must name the call: {sorted(calls)} are running")
    return next(iter(calls))


__all__ = ["Mode", "Play", "Player", "SkipError", "UnsupportedError", "made_up"]
