# ruff: noqa: ASYNC109 - timeouts run on the SDK's own clock
"""A whole driver in one file, around a small but honest SDK: what the suite's own tests play with.

It shows the author of a further language what a driver is (protocol.md), and the broken drivers
beside it are this one with a single flaw.  Top to bottom: the clock, the wire, the pure rules, the
SDK, the driver; waiting and watching are in reference_waiting.py.  Everything runs on one asyncio
loop; nothing but `Clock.sleep` waits for time.
"""

import asyncio
import json
import random
import re
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from reference_waiting import Ears, Filters, LockEvent, Stream, Waiter, WaitingRules, is_wait, watch

T = TypeVar("T")

# ---------------------------------------------------------------- errors


class VolcanoError(Exception):
    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = (
            facts  # {"status": 409, "code": "lock_held", "request_id": "…"}
        )
        self.beside: list[BaseException] = []


class ValidationError(VolcanoError): ...


class AuthenticationError(VolcanoError): ...


class PermissionDeniedError(AuthenticationError): ...


class NotFoundError(VolcanoError): ...


class ConflictError(VolcanoError): ...


class LockLostError(VolcanoError): ...


class RateLimitedError(VolcanoError): ...


class ServerError(VolcanoError): ...


class ClosedError(VolcanoError): ...


class TransportError(VolcanoError):
    """`sent`: the request may have reached the server."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class BodyError(Exception):
    """What the driver's own body raises."""


ERRORS = {
    400: ValidationError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: ValidationError,
    429: RateLimitedError,
}
FINAL = frozenset({400, 401, 403, 404, 409})

# ---------------------------------------------------------------- time


class VirtualClock:
    """Stands still until `advance`."""

    def __init__(self, wall: str) -> None:
        self.now = 0.0
        self._wall = datetime.fromisoformat(wall).timestamp()
        self._asked = 0
        self._sleeps: dict[int, tuple[float, float, asyncio.Future[None]]] = {}  # due, length

    @property
    def wall(self) -> float:
        """In seconds since 1970."""
        return self._wall + self.now

    async def sleep(self, seconds: float) -> None:
        self._asked += 1
        number, woken = self._asked, asyncio.get_running_loop().create_future()
        self._sleeps[number] = (self.now + max(0.0, seconds), seconds, woken)
        try:
            await woken
        finally:
            self._sleeps.pop(number, None)

    def lengths(self) -> list[float]:
        return [length for _, length, _ in self._sleeps.values()]

    async def advance(self, seconds: float, *, blocked: bool) -> None:
        end = self.now + seconds
        if blocked:
            self.now = end
            return
        await quiet()
        while due := sorted((at, n) for n, (at, _, _) in self._sleeps.items() if at <= end):
            at, number = due[0]
            self.now = max(self.now, at)
            self._sleeps.pop(number)[2].set_result(None)
            await quiet()
        self.now = end
        await quiet()


class RealClock:
    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


async def quiet() -> None:
    """Until no callback of the loop is ready, a few turns in a row: all tasks wait."""
    loop: Any = asyncio.get_running_loop()
    turns = 0
    while turns < 5:
        await asyncio.sleep(0)
        turns = 0 if loop._ready else turns + 1


# ---------------------------------------------------------------- the wire


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    request_id: str

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def error(self) -> VolcanoError:
        body = self.json()
        body = body if isinstance(body, dict) else {}
        kind = ERRORS.get(self.status, ServerError)
        facts: dict[str, Any] = {"status": self.status, "request_id": self.request_id}
        if isinstance(body.get("code"), str):
            facts["code"] = body["code"]
        if (wait := self.retry_after()) is not None:
            facts["retry_after"] = wait
        return kind(str(body.get("error", "")), **facts)

    def retry_after(self) -> int | None:
        text = self.headers.get("retry-after", "").strip()
        return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


class Wire:
    def __init__(self, base_url: str, clock: VirtualClock | RealClock) -> None:
        self.address, self.clock, self.in_flight = urlsplit(base_url), clock, 0
        self.streams: set[Stream] = set()  # those that are open

    async def exchange(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout: float
    ) -> Response:
        """One try.  When `timeout` is over on the SDK's clock, its socket is closed."""
        return await self._in_time(self._talk(method, path, headers, body), timeout)

    async def open(self, path: str, headers: dict[str, str], timeout: float) -> Response | Stream:
        """One try to open an event stream, until its head has come."""
        return await self._in_time(self._listen(path, headers), timeout)

    async def _in_time(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        self.in_flight += 1
        talk = asyncio.ensure_future(work)
        bell = asyncio.ensure_future(self.clock.sleep(timeout))
        try:
            await asyncio.wait({talk, bell}, return_when=asyncio.FIRST_COMPLETED)
            if not talk.done():
                raise TransportError(f"no answer within {timeout:g} s", sent=True)
            return talk.result()
        finally:
            bell.cancel()
            talk.cancel()
            await asyncio.gather(talk, bell, return_exceptions=True)
            self.in_flight -= 1

    async def _talk(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Response:
        reader, writer = await self._connect()
        try:
            self._ask(writer, method, path, headers, body)
            raw = await reader.read()
        except OSError as error:
            raise TransportError(str(error), sent=True) from error
        finally:
            writer.close()
        head, found, payload = raw.partition(b"\r\n\r\n")
        if not found:
            raise TransportError("the connection was closed", sent=True)
        return response_of(head, payload, headers)

    async def _listen(self, path: str, headers: dict[str, str]) -> Response | Stream:
        reader, writer = await self._connect()
        is_open = False
        try:
            self._ask(writer, "GET", path, headers, b"")
            head = await reader.readuntil(b"\r\n\r\n")
            response = response_of(head.removesuffix(b"\r\n\r\n"), b"", headers)
            kind = response.headers.get("content-type", "").partition(";")[0]
            is_open = response.status == 200 and kind == "text/event-stream"
            if not is_open:
                return replace(response, body=await reader.read())
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TransportError(str(error), sent=True) from error
        finally:
            if not is_open:
                writer.close()
        stream = Stream(reader, writer, self.streams.discard)
        self.streams.add(stream)
        return stream

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_connection(self.address.hostname, self.address.port)
        except OSError as error:
            raise TransportError(str(error), sent=False) from error

    def _ask(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
    ) -> None:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode() + body)


def response_of(head: bytes, payload: bytes, headers: dict[str, str]) -> Response:
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = dict(line.split(": ", 1) for line in rest)
    return Response(
        int(first.split()[1]),
        {name.lower(): value for name, value in fields.items()},
        payload,
        headers["X-Volcano-Request-Id"],
    )


# ---------------------------------------------------------------- the pure rules

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", re.ASCII)
LONGEST = 89.91 * 86_400


class Rules:
    def renewal_delay(self, ttl: float, remaining: float, jitter: float) -> float:
        return max(min(ttl / 3 * (1 + 0.1 * jitter), remaining / 2), 0.5)

    def retry_delay(self, ttl: float, failures: int, remaining: float, jitter: float) -> float:
        most = min(ttl / 10, max(5, ttl / 100))
        delay = min(0.1 * 2 ** (failures - 1), most) * (1 + 0.5 * jitter)
        return float(min(delay, max(remaining / 2, 0.1)))

    def try_timeout(self, remaining: float, client_timeout: float) -> float:
        return max(min(max(remaining / 3, min(0.5, remaining / 2)), client_timeout), 0.0)

    def margin(self, ttl: float) -> float:
        return max(1.0, ttl / 1000)

    def worth(self, sent: float, answered: float, ttl: float, expires_in: float | None) -> float:
        """The deadline that an answer gives: it counts from the send."""
        return sent + (ttl if expires_in is None else min(ttl, expires_in))


# ---------------------------------------------------------------- the SDK


@dataclass(frozen=True)
class Lease:
    key: str
    token: str
    expires_at: str
    fencing_token: int


@dataclass
class Guard:
    """What the body receives.  `deadline` is on the SDK's clock."""

    lease: Lease
    ttl: float
    deadline: float
    hard: float
    sent: float  # of the last success
    clock: VirtualClock | RealClock
    rules: Rules
    on_lost: Callable[[LockLostError], None]
    loss: LockLostError | None = None
    last_failure: VolcanoError | None = None
    over: bool = False
    closed: bool = False
    joins_from: float | None = None  # while it waits for its next try, and nothing else
    taken_along: "asyncio.Future[asyncio.Task[Shared]] | None" = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    shortened: asyncio.Event = field(default_factory=asyncio.Event)
    renew_by: float = inf  # since a shorter TTL was sent

    @property
    def stop(self) -> float:
        return min(self.deadline, self.hard) - self.rules.margin(self.ttl)

    def look(self) -> bool:
        if not self.over and self.loss is None and self.clock.now >= self.stop:
            self.lose(self.last_failure)
        return self.loss is not None

    @property
    def lost(self) -> bool:
        """What the user asks."""
        return self.look()

    def lose(self, cause: VolcanoError | None) -> None:
        if self.loss is not None or self.over:
            return
        self.loss = LockLostError("the lock was lost")
        self.loss.__cause__ = cause
        self.on_lost(self.loss)

    def extend(self, deadline: float) -> None:
        self.deadline = max(self.deadline, deadline)
        self.moved.set()

    def shorten(self, sent: float, ttl: float) -> None:
        """A request that carries `ttl` goes out: the shortest counts, from now on."""
        is_shorter, self.ttl = ttl < self.ttl, min(self.ttl, ttl)
        self.deadline = min(self.deadline, sent + ttl)
        self.moved.set()
        if is_shorter:
            self.hurry(sent)

    def hurry(self, sent: float) -> None:
        """The next renewal comes sooner, in case the answer to that request is lost."""
        self.renew_by = sent + self.rules.renewal_delay(self.ttl, self.stop - sent, 0.0)
        self.shortened.set()


@dataclass(frozen=True)
class Shared:
    """What became of a request that renewed many: for all of it, or by lock token."""

    sent: float
    whole: "Response | VolcanoError | None" = None
    answers: dict[str, Response] = field(default_factory=dict)


STATUS_OF = {"lock_ownership_lost": 409, "lock_rate_limited": 429}


class Sdk:
    """Its attributes and small methods are the places where the broken drivers are broken."""

    rules = Rules()
    waiting_rules = WaitingRules()
    ears_class = Ears
    guard_class = Guard
    final = FINAL
    acquire_tries = 2
    exit_seconds = 2.0
    longest = LONGEST
    renews_many = True
    """Until the server turns out to have no such route."""

    def __init__(
        self,
        base_url: str,
        service_key: str | None,
        clock: VirtualClock | RealClock,
        timeout: float = 10.0,
    ) -> None:
        self.clock, self.service_key, self.timeout = clock, service_key, timeout
        self.wire = Wire(base_url, clock)
        self.guards: dict[str, Guard] = {}  # by lock token
        self.spent: set[str] = set()  # tokens for which a release was sent
        self.background: set[asyncio.Task[Any]] = set()
        self.ears = self.ears_class(self)
        self.closing = asyncio.Event()  # of those who watch

    # -------------------------------------------------------- direct calls

    async def acquire(
        self,
        key: Any,
        ttl: Any,
        token: str | None = None,
        request_id: str | None = None,
        wait: Any = 0,
    ) -> Lease:
        lease, sent, worth = await self._granted_within(
            wait, key, ttl, token, request_id, give_back=token is None
        )
        if self.clock.now >= worth - self.rules.margin(ttl):
            if not self._is_the_callers(token):
                await self._give_back(lease.key, lease.token)
            raise TransportError("the answer came too late: not held", sent=True)
        del sent
        return lease

    def _is_the_callers(self, token: str | None) -> bool:
        """Who can recover the lease with it, and might already."""
        return token is not None

    async def renew(self, key: Any, lease: Lease, ttl: Any, request_id: str | None = None) -> Lease:
        self._check(key, ttl=ttl, lease=lease)
        sent, guard = self.clock.now, self.guards.get(lease.token)
        if guard:
            guard.shorten(sent, ttl)
        response = await self._send(
            "PATCH", key, lease.token, ttl, request_id or new_id(), self.timeout
        )
        renewed = self._lease_of(response, key, lease.token, 200)
        if guard:
            guard.extend(self.rules.worth(sent, self.clock.now, guard.ttl, expires_in(response)))
        return renewed

    async def release(self, key: Any, lease: Lease, request_id: str | None = None) -> None:
        self._check(key, lease=lease)
        response = await self._send(
            "DELETE", key, lease.token, None, request_id or new_id(), self.timeout
        )
        if response.status != 204:
            raise response.error()

    async def get(self, key: Any, request_id: str | None = None) -> dict[str, Any]:
        self._check(key)
        response = await self._send("GET", key, None, None, request_id or new_id(), self.timeout)
        body = response.json()
        if response.status != 200 or not isinstance(body, dict):
            raise response.error()
        return body

    async def force_release(self, key: Any, request_id: str | None = None) -> None:
        self._check(key)
        response = await self._send(
            "DELETE", key, None, None, request_id or new_id(), self.timeout, path="/locks/{}"
        )
        if response.status != 204:
            raise response.error()

    async def close(self) -> None:
        self.ears.close()
        self._end_watches()
        held = [guard for guard in self.guards.values() if not guard.over]
        for guard in held:
            self._lose_at_close(guard)
        outcomes = await asyncio.gather(
            *(self._leave(guard) for guard in held), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _end_watches(self) -> None:
        self.closing.set()

    def _lose_at_close(self, guard: Guard) -> None:
        guard.closed = True
        guard.lose(None)

    # -------------------------------------------------------- with_lock

    async def with_lock(
        self,
        key: Any,
        ttl: Any,
        body: Callable[[Guard], Awaitable[Any]],
        on_lost: Callable[[LockLostError], None],
        token: str | None = None,
        request_id: str | None = None,
        wait: Any = 0,
    ) -> Any:
        lease, sent, worth = await self._granted_within(
            wait, key, ttl, token, request_id, give_back=True
        )
        guard = self.guard_class(
            lease, ttl, worth, self.first_sent + self.longest, sent, self.clock, self.rules, on_lost
        )
        if not self._may_start(guard):
            await self._give_back(lease.key, lease.token)
            raise LockLostError("the answer came after the stop time: the body did not start")
        self.guards[lease.token] = guard
        chores = [self.spawn(self._watch(guard))]
        try:
            if self._is_due(guard):
                await self._renew_once(guard)
            if not self._may_start(guard):
                raise guard.loss or LockLostError()
            chores.append(self.spawn(self._renew_for_ever(guard)))
            return await self._run(guard, body)
        finally:
            await self._stop(chores)
            self.guards.pop(lease.token, None)
            await self._exit(guard, sys.exc_info()[1])

    def _may_start(self, guard: Guard) -> bool:
        return guard.loss is None and self.clock.now < guard.stop

    def _is_due(self, guard: Guard) -> bool:
        return self.clock.now >= self._next_renewal(guard)

    async def _run(self, guard: Guard, body: Callable[[Guard], Awaitable[Any]]) -> Any:
        try:
            result = await body(guard)
        except BaseException as error:
            if guard.look() and isinstance(error, Exception):
                error.beside = [guard.loss]  # type: ignore[attr-defined]
            raise
        if guard.look():
            assert guard.loss is not None
            raise guard.loss
        return result

    async def _stop(self, chores: list[asyncio.Task[Any]]) -> None:
        for task in chores:
            task.cancel()

    async def _exit(self, guard: Guard, raised: BaseException | None) -> None:
        """Shielded from a cancellation; the body's own error is never masked."""
        if guard.closed:
            return
        try:
            await self._shielded(self._leave(guard))
        except LockLostError:
            if raised is None:
                raise
        except VolcanoError as error:  # the lease ends with its TTL; the result stands
            if isinstance(raised, BodyError):
                raised.beside = [*getattr(raised, "beside", []), error]  # type: ignore[attr-defined]

    async def _leave(self, guard: Guard) -> None:
        lost, guard.over = guard.loss is not None, True
        try:
            await self._release_tries(
                guard.lease.key, guard.lease.token, self._tries_to_release(lost=lost)
            )
        except ConflictError as conflict:
            if not lost:
                raise LockLostError("the lock was no longer ours at its release") from conflict

    def _tries_to_release(self, *, lost: bool) -> int:
        return 1 if lost else 2

    def _means_released(self, status: int, number: int) -> bool:
        """A 409 to the second try: the first one worked."""
        return status == 204 or (status == 409 and number > 0)

    async def _release_tries(self, key: str, token: str, tries: int) -> None:
        request_id = new_id()
        failure: VolcanoError | None = None
        for number in range(tries):
            if number:
                request_id = self._retry_id(request_id)
            try:
                response = await self._send(
                    "DELETE", key, token, None, request_id, self.exit_seconds
                )
            except TransportError as error:
                failure = error
                continue
            if self._means_released(response.status, number):
                return
            failure = response.error()
            if response.status < 500:
                break
        assert failure is not None
        raise failure

    async def _give_back(self, key: str, token: str) -> None:
        with suppress(VolcanoError):  # bounded and best-effort: the lease ends with its TTL
            await self._shielded(self._release_tries(key, token, tries=2))

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.spawn(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    # -------------------------------------------------------- renewal

    def _next_renewal(self, guard: Guard) -> float:
        jitter = random.uniform(-1, 1)
        return guard.sent + self.rules.renewal_delay(guard.ttl, guard.stop - guard.sent, jitter)

    async def _renew_for_ever(self, guard: Guard) -> None:
        while True:
            shared = await self._until_due(guard, self._next_renewal(guard))
            if not await self._renew_once(guard, shared):
                return

    async def _renew_once(self, guard: Guard, shared: "asyncio.Task[Shared] | None" = None) -> bool:
        """One due renewal with all its tries; False when there is nothing left to renew."""
        request_id, failures, last = self._renewal_id(guard), 0, False
        while not guard.over and not guard.look():
            remaining = guard.stop - self.clock.now
            sent, answer = await self._try_to_renew(guard, request_id, shared)
            wait: float | None = None
            if isinstance(answer, VolcanoError):
                guard.last_failure = answer
                wait = answer.facts.get("retry_after")
            else:
                if self._accept(guard, answer, sent):
                    return True
                if guard.loss is not None:
                    return False
                wait = answer.retry_after()
            failures += 1
            if last:
                break
            pause = self.rules.retry_delay(guard.ttl, failures, remaining, random.uniform(-1, 1))
            next_try = max(sent + pause, self.clock.now)
            if wait is not None:
                left = guard.stop - self.clock.now
                last = wait >= left
                next_try = max(next_try, self.clock.now + (left / 2 if last else wait))
            shared = await self._until_due(guard, next_try, is_retry=True)
        return False

    async def _try_to_renew(
        self, guard: Guard, request_id: str, shared: "asyncio.Task[Shared] | None"
    ) -> "tuple[float, Response | VolcanoError]":
        """When it was sent, and what became of it: alone, or with all that are due as well."""
        shared = shared or self._share(guard)
        if shared is not None:
            # Shielded: the others go on when the one that sent it ends.
            outcome = await asyncio.shield(shared)
            if outcome.whole is None:
                return outcome.sent, outcome.answers[guard.lease.token]
            if not self._renews_singly_after(outcome.whole):
                return outcome.sent, outcome.whole
        sent = self.clock.now
        timeout = self.rules.try_timeout(guard.stop - sent, self.timeout)
        lease, ttl = guard.lease, int(guard.ttl)
        try:
            return sent, await self._send("PATCH", lease.key, lease.token, ttl, request_id, timeout)
        except TransportError as error:
            return sent, error

    async def _until_due(
        self, guard: Guard, due: float, *, is_retry: bool = False
    ) -> "asyncio.Task[Shared] | None":
        """Sleeps, unless another lease's renewal takes this one along: then that.

        A retry is never brought forward: it waits for its turn, or for `Retry-After`.
        """
        taken_along: asyncio.Future[asyncio.Task[Shared]]
        taken_along = asyncio.get_running_loop().create_future()
        guard.joins_from = due - (0 if is_retry else self._brought_forward(guard.ttl))
        guard.taken_along = taken_along
        bell = asyncio.ensure_future(self.clock.sleep(due - self.clock.now))
        shortened = asyncio.ensure_future(guard.shortened.wait())
        things: set[asyncio.Future[Any]] = {bell, taken_along, shortened}
        try:
            await asyncio.wait(things, return_when=asyncio.FIRST_COMPLETED)
        finally:
            bell.cancel()
            shortened.cancel()
            guard.joins_from = guard.taken_along = None
        if taken_along.done():
            return taken_along.result()
        if not bell.done():
            guard.shortened.clear()
            return await self._until_due(guard, min(due, guard.renew_by), is_retry=is_retry)
        return None

    # -------------------------------------------------------- many renewals in one request

    def _share(self, guard: Guard) -> "asyncio.Task[Shared] | None":
        others = [each for each in self.guards.values() if self._rides_along(each)]
        others = others[:499]
        if not self.renews_many or not others:
            return None
        shared = self.spawn(self._renew_together([guard, *others]))
        for other in others:
            assert other.taken_along is not None
            other.joins_from = None
            other.taken_along.set_result(shared)
        return shared

    def _rides_along(self, guard: Guard) -> bool:
        if guard.joins_from is None or guard.over or guard.look():
            return False
        return self.clock.now >= guard.joins_from

    def _brought_forward(self, ttl: float) -> float:
        """At most, in seconds."""
        return min(0.5, ttl / 30)

    async def _renew_together(self, guards: list[Guard]) -> Shared:
        sent = self.clock.now
        asked = [
            {"key": each.lease.key, "token": each.lease.token, "ttl_seconds": int(each.ttl)}
            for each in guards
        ]
        try:
            response = await self.wire.exchange(
                "PATCH",
                "/lock-leases",
                self._headers(new_id()),
                json.dumps({"leases": asked}).encode(),
                self._shared_timeout([each.stop - sent for each in guards]),
            )
        except TransportError as error:
            return Shared(sent, error)
        if response.status != 200:
            return Shared(sent, self._of_the_whole(response))
        answers = self._by_position(response, [each.lease for each in guards])
        if answers is None:
            return Shared(sent, ServerError("not an answer for each lease", status=200))
        return Shared(sent, None, answers)

    def _shared_timeout(self, remaining: list[float]) -> float:
        return self.rules.try_timeout(min(remaining), self.timeout)

    def _of_the_whole(self, response: Response) -> "Response | VolcanoError":
        """A response is final for each of the leases or makes them renew singly."""
        if response.status in (404, 405):
            self.renews_many = False
        if response.status in (400, 401, 403, 404, 405, 413):
            return response
        return response.error()

    def _renews_singly_after(self, whole: "Response | VolcanoError") -> bool:
        return isinstance(whole, Response) and whole.status in (400, 404, 405, 413)

    def _by_position(self, response: Response, asked: list[Lease]) -> dict[str, Response] | None:
        body = response.json()
        items = body.get("leases") if isinstance(body, dict) else None
        if not isinstance(items, list) or len(items) != len(asked):
            return None
        answers = {}
        for lease, item in zip(asked, items, strict=True):
            if not self._is_for(lease, item):
                return None
            answers[lease.token] = self._single(item, response.request_id)
        return answers

    def _is_for(self, lease: Lease, item: Any) -> bool:
        return isinstance(item, dict) and item.get("key") == lease.key

    def _single(self, item: dict[str, Any], request_id: str) -> Response:
        """The answer that a renewal of this lease alone would have had."""
        status = STATUS_OF.get(item["code"], 500) if "code" in item else 200
        headers = {}
        if "expires_in" in item:
            headers["x-volcano-expires-in"] = str(item["expires_in"])
        if "retry_after" in item:
            headers["retry-after"] = str(item["retry_after"])
        return Response(status, headers, json.dumps(item).encode(), request_id)

    def _accept(self, guard: Guard, response: Response, sent: float) -> bool:
        if response.status in self.final:
            guard.lose(response.error())
            return False
        try:
            lease = self._lease_of(response, guard.lease.key, guard.lease.token, 200)
        except VolcanoError as error:
            guard.last_failure = error
            return False
        if not self._is_same(guard.lease, lease):
            guard.lose(None)
            return False
        guard.lease, guard.sent = lease, sent
        guard.shortened.clear()
        guard.extend(self.rules.worth(sent, self.clock.now, guard.ttl, expires_in(response)))
        return True

    def _is_same(self, old: Lease, new: Lease) -> bool:
        return old.fencing_token == new.fencing_token

    async def _watch(self, guard: Guard) -> None:
        """Announces the loss at the stop time, whatever the network does."""
        while not guard.look():
            guard.moved.clear()
            bell = asyncio.ensure_future(self.clock.sleep(guard.stop - self.clock.now))
            moved = asyncio.ensure_future(guard.moved.wait())
            try:
                await asyncio.wait({bell, moved}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                bell.cancel()
                moved.cancel()

    # -------------------------------------------------------- waiting

    async def _granted_within(
        self,
        wait: Any,
        key: Any,
        ttl: Any,
        token: str | None,
        request_id: str | None,
        *,
        give_back: bool,
    ) -> tuple[Lease, float, float]:
        """As `_granted`, and again whenever the key may be free, until `wait` is over."""
        if not is_wait(wait):
            raise ValueError(f"wait must be a number of seconds from 0 on: {wait!r}")
        self._check(key, ttl=ttl, token=token)
        end, own = self.clock.now + wait, token
        token = token or new_id()
        try:
            return await self._granted(key, ttl, token, request_id, give_back=give_back)
        except ConflictError:
            if wait == 0:
                raise
        return await self._next_granted(end, key, ttl, token, own, give_back=give_back)

    async def _next_granted(
        self, end: float, key: str, ttl: int, token: str, own: str | None, *, give_back: bool
    ) -> tuple[Lease, float, float]:
        waiter, failures, not_before = Waiter(key), 0, 0.0
        last: VolcanoError = ConflictError("somebody else holds it", status=409, code="lock_held")
        self.ears.enter(waiter)
        try:
            while await self.ears.until_worth_a_try(waiter, not_before, end):
                if token in self.spent:
                    if own is not None:
                        raise waiter.trouble or last
                    token = new_id()
                not_before = 0.0
                try:
                    return await self._granted(
                        key, ttl, token, self._next_id(), give_back=give_back
                    )
                except ConflictError as conflict:
                    last, failures = conflict, 0
                    self._was_answered(waiter)
                except (RateLimitedError, ServerError, TransportError) as passing:
                    waiter.trouble, failures = passing, failures + 1
                    pause = self._pause_after(passing, failures)
                    not_before = self.clock.now + pause
                    waiter.tell(not_before)
        finally:
            self.ears.leave(waiter)
        if self.ears.is_closed:
            raise ClosedError("this client was closed")
        raise waiter.error or waiter.trouble or last

    def _was_answered(self, waiter: Waiter) -> None:
        waiter.trouble = None

    def _next_id(self) -> str:
        return new_id()

    def _pause_after(self, error: VolcanoError, failures: int) -> float:
        return self.passing(error) or self.waiting_rules.backoff(failures)

    def passing(self, error: BaseException) -> float | None:
        """How long it wants to be left alone, in seconds; None: it will not pass."""
        if isinstance(error, RateLimitedError | ServerError | TransportError):
            return float(error.facts.get("retry_after", 0.0))
        return None

    async def open_stream(self, filters: Filters, last_id: str) -> "Stream | VolcanoError":
        headers = self._headers(new_id()) | {"Accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        try:
            outcome = await self.wire.open(f"/lock-events?{filters.query()}", headers, self.timeout)
        except TransportError as error:
            return error
        return outcome if isinstance(outcome, Stream) else outcome.error()

    # -------------------------------------------------------- watching

    def watch(self, key: Any = None, prefix: Any = None) -> AsyncGenerator[LockEvent, None]:
        filters = Filters(frozenset(self._filters(key)), frozenset(self._filters(prefix)))
        if not 1 <= len(filters.keys) + len(filters.prefixes) <= 64:
            raise ValueError("watch takes 1 to 64 keys and prefixes")
        return watch(self, filters)

    async def unless_closing(self, work: Awaitable[T]) -> T | None:
        """None when the client was closed first."""
        working, closing = asyncio.ensure_future(work), asyncio.ensure_future(self.closing.wait())
        try:
            await asyncio.wait({working, closing}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            closing.cancel()
            await asyncio.gather(working, closing, return_exceptions=True)

    def _filters(self, given: Any) -> list[Any]:
        filters = [] if given is None else given if isinstance(given, list) else [given]
        for each in filters:
            self._check(each)
        return filters

    def ends_a_watch(self, error: VolcanoError) -> bool:
        """A server without events is a NotFoundError, whichever of its two answers it gives."""
        if error.facts.get("status") == 405:
            raise NotFoundError("this server has no events", **error.facts) from error
        return error.facts.get("status") in (400, 401, 403, 404)

    # -------------------------------------------------------- acquiring

    async def _granted(
        self, key: Any, ttl: Any, token: str | None, request_id: str | None, *, give_back: bool
    ) -> tuple[Lease, float, float]:
        """The lease, when the try that got it was sent, and its deadline."""
        self._check(key, ttl=ttl, token=token)
        if self.ears.is_closed:
            raise ClosedError("this client was closed")
        token, request_id = token or new_id(), request_id or new_id()
        attempt = self.spawn(self._acquire_tries(key, ttl, token, request_id))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            bell = asyncio.ensure_future(self.clock.sleep(2.0))
            await asyncio.wait({attempt, bell}, return_when=asyncio.FIRST_COMPLETED)
            bell.cancel()
            known_not_held = (
                attempt.done()
                and attempt.exception() is not None
                and not getattr(attempt.exception(), "unknown", False)
            )
            attempt.cancel()
            if give_back and not known_not_held:
                await self._give_back(key, token)
            raise
        except VolcanoError as error:
            if give_back and getattr(error, "unknown", False):
                await self._give_back(key, token)
            raise

    async def _acquire_tries(
        self, key: str, ttl: int, token: str, request_id: str
    ) -> tuple[Lease, float, float]:
        self.first_sent = self.clock.now
        unknown, failure = False, VolcanoError()
        for number in range(self.acquire_tries):
            if number:
                token, request_id = self._retry_token(token), self._retry_id(request_id)
            sent = self.clock.now
            try:
                response = await self._send(
                    "POST", key, token, ttl, request_id, min(ttl - 1, self.timeout)
                )
            except TransportError as error:
                failure, unknown = error, unknown or error.sent
                continue
            if response.status == 409:
                unknown = False
            try:
                lease = self._lease_of(response, key, token, 201)
            except VolcanoError as error:
                failure = error
                unknown = unknown or response.status >= 500 or response.status == 201
                if response.status == 503:
                    continue
                break
            worth = self.rules.worth(sent, self.clock.now, ttl, expires_in(response))
            return lease, sent, worth
        failure.unknown = unknown  # type: ignore[attr-defined]
        raise failure

    # -------------------------------------------------------- requests

    def _retry_token(self, token: str) -> str:
        return token

    def _retry_id(self, request_id: str) -> str:
        return request_id

    def _renewal_id(self, guard: Guard) -> str:
        del guard
        return new_id()

    def _is_key(self, key: str) -> bool:
        return KEY.fullmatch(key) is not None

    def _check(
        self, key: Any, *, ttl: Any = 5, lease: Lease | None = None, token: str | None = None
    ) -> None:
        if not isinstance(key, str) or not self._is_key(key):
            raise ValueError(f"key must match {KEY.pattern}, not {key!r}")
        if not isinstance(ttl, int) or isinstance(ttl, bool) or not 5 <= ttl <= 7_776_000:
            raise ValueError(f"ttl must be a whole number of seconds from 5 to 7776000: {ttl!r}")
        if lease is not None and lease.key != key:
            raise ValueError(f"the lease is of {lease.key!r}, not of {key!r}")
        if token is not None and str(uuid.UUID(token)) in self.spent:
            raise ValueError("the lock token was used for a lease that was released")
        if self.service_key is None:
            raise AuthenticationError("no service key")

    async def _send(
        self,
        method: str,
        key: str,
        token: str | None,
        ttl: int | None,
        request_id: str,
        timeout: float,
        path: str | None = None,
    ) -> Response:
        headers = self._headers(request_id)
        if token is not None:
            headers["X-Volcano-Lock-Token"] = token
        route = path or ("/locks/{}/lease" if token else "/locks/{}")
        body = b"" if ttl is None else json.dumps({"ttl_seconds": ttl}).encode()
        segment = route.format(quote(key, safe=""))
        if method == "DELETE" and token is not None:
            self.spent.add(token)
        return await self.wire.exchange(method, segment, headers, body, timeout)

    def _headers(self, request_id: str) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.service_key}",
            "X-Volcano-Request-Id": request_id,
            "Content-Type": "application/json",
        }

    def _lease_of(self, response: Response, key: str, token: str, status: int) -> Lease:
        body = response.json()
        if response.status != status:
            raise response.error()
        match body:
            case {"expires_at": str() as at, "fencing_token": int() as number}:
                return Lease(key, token, at, number)
        raise ServerError("the answer is not a lease", status=response.status)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        if not task.cancelled():
            task.exception()  # seen by whoever awaits it


def new_id() -> str:
    return str(uuid.uuid4())


def expires_in(response: Response) -> float | None:
    try:
        return float(response.headers["x-volcano-expires-in"])
    except (KeyError, ValueError):
        return None


# ---------------------------------------------------------------- the driver

CAPABILITIES = [
    "with_lock",
    "direct_calls",
    "virtual_clock",
    "pushed_loss",
    "cancel",
    "close",
    "renew_many",
    "wait",
    "events",
]


EPOCH = "1970-01-01T00:00:00.000Z"


class ReferenceDriver:
    sdk_class: type[Sdk] = Sdk

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        self.clock: VirtualClock | RealClock = RealClock()
        self.sdk: Sdk | None = None
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.bodies: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.guards: dict[str, Guard] = {}
        self.leases: dict[str, Lease] = {}

    def write(self, line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            command = json.loads(line)
            number, name = command.pop("id"), command.pop("cmd")
            try:
                ok = await getattr(self, f"do_{name}")(**command)
                self.write({"id": number, "ok": ok or {}})
            except NotImplementedError as error:
                self.write({"id": number, "unsupported": str(error)})
            except Exception as error:  # noqa: BLE001 - a driver's fault is reported, whatever it is
                self.write({"id": number, "error": repr(error)})

    async def do_hello(
        self,
        protocol: int,
        base_url: str,
        service_key: str | None,
        clock: str,
        timeout: float = 10.0,
        now: str | None = None,
    ) -> dict[str, Any]:
        del protocol
        for task in [*self.tasks.values(), *(self.sdk.background if self.sdk else ())]:
            task.cancel()
        for stream in list(self.sdk.wire.streams) if self.sdk else ():
            stream.close()
        await quiet()
        self.start_over()
        self.clock = VirtualClock(now or EPOCH) if clock == "virtual" else RealClock()
        self.sdk = self.sdk_class(base_url, service_key, self.clock, timeout)
        return {
            "sdk": "reference",
            "version": "1",
            "runtime": f"python {sys.version.split()[0]}",
            "capabilities": CAPABILITIES,
        }

    async def do_with_lock(self, call: str, **given: Any) -> None:
        async def body(guard: Guard) -> Any:
            self.guards[call] = guard
            lease = guard.lease
            self.write(
                {
                    "event": "entered",
                    "call": call,
                    "token": lease.token,
                    "fencing_token": lease.fencing_token,
                    "expires_at": lease.expires_at,
                }
            )
            cancelled: asyncio.CancelledError | None = None
            while not self.bodies[call].done():  # a body ends on `finish` alone
                try:
                    await asyncio.wait({self.bodies[call]})
                except asyncio.CancelledError as error:
                    cancelled = error
            end = self.bodies[call].result()
            if "raise" in end:
                raise BodyError(end["raise"])
            if cancelled is not None:
                raise cancelled
            return end["return"]

        def on_lost(error: LockLostError) -> None:
            self.write({"event": "lost", "call": call, **describe(error)})

        assert self.sdk is not None
        self.bodies[call] = asyncio.get_running_loop().create_future()
        self.start(call, self.sdk.with_lock(**given, body=body, on_lost=on_lost))

    async def do_finish(self, call: str, **end: Any) -> None:
        self.bodies[call].set_result(end)

    async def do_look(self, call: str) -> dict[str, Any]:
        guard = self.guards[call]
        lost, lease = guard.lost, guard.lease
        return {"lost": lost, "fencing_token": lease.fencing_token, "expires_at": lease.expires_at}

    async def do_acquire(self, call: str, **given: Any) -> None:
        assert self.sdk is not None
        self.start(call, self.keep(call, self.sdk.acquire(**given)))

    async def do_renew(self, call: str, lease: Any, **given: Any) -> None:
        assert self.sdk is not None
        self.start(call, self.keep(call, self.sdk.renew(lease=self.lease(lease), **given)))

    async def do_release(self, call: str, lease: Any, **given: Any) -> None:
        assert self.sdk is not None
        self.start(call, self.sdk.release(lease=self.lease(lease), **given))

    async def do_get(self, call: str, **given: Any) -> None:
        assert self.sdk is not None
        self.start(call, self.sdk.get(**given))

    async def do_force_release(self, call: str, **given: Any) -> None:
        assert self.sdk is not None
        self.start(call, self.sdk.force_release(**given))

    async def do_watch(self, call: str, **given: Any) -> None:
        assert self.sdk is not None
        self.start(call, self.tell_events(call, given))

    async def tell_events(self, call: str, given: dict[str, Any]) -> None:
        assert self.sdk is not None
        try:
            async with aclosing(self.sdk.watch(**given)) as events:
                async for event in events:
                    self.write({"event": "watched", "call": call, **vars(event)})
        except asyncio.CancelledError:
            return  # `cancel` is how a watch ends

    async def do_close(self, call: str) -> None:
        assert self.sdk is not None
        self.start(call, self.sdk.close())

    async def do_cancel(self, call: str) -> None:
        self.tasks[call].cancel()

    async def do_sleeping(self) -> dict[str, Any]:
        assert self.sdk is not None
        await quiet()
        wire = self.sdk.wire
        streaming = [stream.taken for stream in wire.streams]
        return {
            "seconds": self.virtual().lengths(),
            "in_flight": wire.in_flight,
            "streaming": streaming,
        }

    async def do_advance(self, seconds: float, *, blocked: bool = False) -> None:
        await self.virtual().advance(seconds, blocked=blocked)

    def virtual(self) -> VirtualClock:
        if not isinstance(self.clock, VirtualClock):
            raise NotImplementedError("the clock is real")
        return self.clock

    def lease(self, named: Any) -> Lease:
        if isinstance(named, str):
            return self.leases[named]
        return Lease(
            named["key"],
            named["token"],
            named.get("expires_at", EPOCH),
            named.get("fencing_token", 1),
        )

    async def keep(self, call: str, work: Awaitable[Lease]) -> dict[str, Any]:
        self.leases[call] = lease = await work
        return dict(vars(lease))

    def start(self, call: str, work: Coroutine[Any, Any, Any]) -> None:
        async def to_the_end() -> None:
            try:
                value = await work
                self.write({"event": "returned", "call": call, "value": value})
            except BaseException as error:  # noqa: BLE001 - the user hears of it, whatever it is
                self.write({"event": "raised", "call": call, **describe(error)})

        self.tasks[call] = asyncio.ensure_future(to_the_end())


def describe(error: BaseException) -> dict[str, Any]:
    errors, more = [], [error]
    while more:
        one = more.pop(0)
        errors.append(fields_of(one))
        more += [e for e in (one.__cause__, *getattr(one, "beside", [])) if e is not None]
    return {**errors[0], "errors": errors}


def fields_of(error: BaseException) -> dict[str, Any]:
    match error:
        case ClosedError():
            return {"error": "Closed"}
        case VolcanoError():
            return {"error": type(error).__name__, "message": str(error), **error.facts}
        case BodyError():
            return {"error": "BodyError", "message": str(error)}
        case asyncio.CancelledError():
            return {"error": "Cancelled"}
        case ValueError():
            return {"error": "InvalidArgument", "message": str(error)}
    return {"error": "Unexpected", "message": repr(error)}


def main(sdk_class: type[Sdk] = Sdk) -> None:
    ReferenceDriver.sdk_class = sdk_class
    asyncio.run(ReferenceDriver().run())


if __name__ == "__main__":
    main()
