"""The operations for one request: credentials, quota, validation, then the batch queue.

    LockRequest --> 401 403 --> 429 --> 400 413 --> the lease rules, or the hub --> Outcome

Each check costs only what comes before it: docs/semantics.md#order-of-checks.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from volcano_server import wire, wire_events
from volcano_server.access import Access, Caller
from volcano_server.batch import BatchQueue
from volcano_server.clock import HostClock, Movable
from volcano_server.hub import MOST_STREAMS, Hub, TooManyStreamsError
from volcano_server.lease import (
    Acquire,
    Answer,
    Command,
    ForceRelease,
    Read,
    Release,
    Renew,
    SlotKey,
)
from volcano_server.problems import (
    ANON_KEY_DENIED,
    INTERNAL_ERROR,
    PERMISSION_DENIED,
    Problem,
    invalid_request,
    payload_too_large,
    rate_limited,
    service_unavailable,
    too_many_streams,
)
from volcano_server.quota import Quota, Spent
from volcano_server.settings import Settings
from volcano_server.stores.store import SharedCounts, StoreUnavailableError
from volcano_server.subscription import Ending, Subscription

STORE_UNAVAILABLE = service_unavailable("The lock store cannot answer at the moment; try again.")
BODY_TOO_SLOW = service_unavailable("The body did not arrive in time; try again.")


class Operation(StrEnum):
    """One name for routes, logs and metrics."""

    ACQUIRE = "acquire"
    RENEW = "renew"
    RELEASE = "release"
    READ = "read"
    FORCE_RELEASE = "force_release"
    RENEW_MANY = "renew_many"
    EVENTS = "events"


class BodyTooLargeError(Exception):
    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class BodyTooSlowError(Exception):
    pass


class ClientGoneError(Exception):
    """The client hung up before its request was whole: there is nobody to answer."""


ReadBody = Callable[[], Awaitable[bytes]]
"""Raises BodyTooLargeError, BodyTooSlowError and ClientGoneError."""


@dataclass(slots=True)
class LockRequest:
    """What HTTP brought, unchecked.  Header values are None where the header is missing."""

    operation: Operation
    path: bytes
    key_segment: bytes  # where keys are in the body or the query: the query
    authorization: bytes | None
    lock_token: bytes | None
    request_id: bytes | None
    repeated: str | None
    """The name of one of these headers that came more than once."""
    last_event_id: str | None = None


class Outcome(NamedTuple):
    """`caller` is None before the credential was accepted, `spent` where no quota was counted.

    `reason` and `fault` are for the operator alone.  A Subscription has to be read, or left
    (`close_stream`).
    """

    answer: Answer | wire.Together | Subscription
    caller: Caller | None = None
    spent: Spent | None = None
    reason: str | None = None
    fault: Exception | None = None


class LockService:
    """Answers lock requests; the test controls of a development server are here too."""

    def __init__(
        self, access: Access, queue: BatchQueue, hub: Hub, clock: HostClock, settings: Settings
    ) -> None:
        self.settings = settings
        self._access = access
        self._queue = queue
        self._hub = hub
        self._clock = clock
        self._quota = Quota()
        self._streams: dict[Subscription, str] = {}  # whose: by the id of a credential
        self._touched: set[SlotKey] | None = set() if settings.test_controls else None

    async def answer(self, request: LockRequest, read_body: ReadBody) -> Outcome:
        """Raises ClientGoneError."""
        entered = self._enter(request)
        if isinstance(entered, Outcome):
            return entered
        caller, spent = entered
        answer: Answer | Subscription
        try:
            if request.operation is Operation.RENEW_MANY:
                return await self._renew_many(request, read_body, caller, spent)
            if request.operation is Operation.EVENTS:
                answer = await self._open_stream(request, read_body, caller)
            else:
                aim = self._aim(request, caller.project)
                answer = await self._queue.submit(_command(request, aim, await read_body()))
            return Outcome(answer, caller, spent)
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - each gets its answer
            return _refused(error, caller, spent)

    def answer_whole(
        self, request: LockRequest, body: bytes, tell: Callable[[Outcome], None]
    ) -> None:
        """The same for a request about one lock that is here in full, without a task or a future.

        Tells the outcome, now or later.
        """
        entered = self._enter(request)
        if isinstance(entered, Outcome):
            tell(entered)
            return
        caller, spent = entered
        waiting = _Waiting(tell, caller, spent)
        try:
            aim = self._aim(request, caller.project)
            if len(body) > wire.BODY_LIMIT:
                raise BodyTooLargeError(wire.BODY_LIMIT)
            self._queue.submit_for(waiting, _command(request, aim, body))
        except Exception as error:  # noqa: BLE001 - each gets its answer
            waiting.set_exception(error)

    def _enter(self, request: LockRequest) -> Outcome | tuple[Caller, Spent | None]:
        """401, 403, 429."""
        try:
            caller = self.admit(request.authorization)
            if isinstance(caller, Problem):
                return Outcome(caller)
            if not caller.quota:
                return caller, None
            spent = self._spend(caller)
        except Exception as error:  # noqa: BLE001 - each gets its answer
            return Outcome(INTERNAL_ERROR, fault=error)
        if not spent.allowed:
            refusal = rate_limited(caller.quota, retry_after=spent.retry_after)
            return Outcome(refusal, caller, spent)
        return caller, spent

    def _aim(self, request: LockRequest, project: str) -> tuple[SlotKey, str]:
        """The slot, and the lock token where one is needed: what the head says.

        Raises InvalidRequestError.
        """
        _refuse_repeated(request)
        slot_key = SlotKey(project, wire.parse_key(request.key_segment))
        wire.parse_request_id(request.request_id)
        token = ""
        if request.operation not in (Operation.READ, Operation.FORCE_RELEASE):
            token = wire.parse_lock_token(request.lock_token)
        if self._touched is not None:
            self._touched.add(slot_key)
        return slot_key, token

    async def _renew_many(
        self, request: LockRequest, read_body: ReadBody, caller: Caller, spent: Spent | None
    ) -> Outcome:
        """Each lease is one operation.  The first was counted as the request."""
        renewals = await _renewals(request, read_body, caller.project)
        allowed = len(renewals)
        if spent is not None:
            spent = self._spend(caller, len(renewals) - 1)
            allowed = 1 + spent.allowed
        if self._touched is not None:
            self._touched.update(renewal.slot_key for renewal in renewals[:allowed])
        try:
            answers = await self._queue.submit_all(renewals[:allowed])
        except StoreUnavailableError as error:
            return Outcome(STORE_UNAVAILABLE, caller, spent, reason=str(error))
        if spent is not None and allowed < len(renewals):
            refusal = rate_limited(caller.quota, retry_after=spent.retry_after)
            answers = [*answers, *[refusal] * (len(renewals) - allowed)]
        keys = [renewal.slot_key.key for renewal in renewals]
        return Outcome(wire.Together(keys, answers), caller, spent)

    async def _open_stream(
        self, request: LockRequest, read_body: ReadBody, caller: Caller
    ) -> Subscription | Problem:
        _refuse_repeated(request)
        wire.parse_request_id(request.request_id)
        filters = wire_events.parse_filters(request.key_segment)
        await read_body()  # which it does not take, like a read
        try:
            stream = await self._hub.open(caller.project, filters, request.last_event_id)
        except TooManyStreamsError:
            return too_many_streams(MOST_STREAMS)
        now = self.admit(request.authorization)
        if isinstance(now, Problem):  # revoked meanwhile
            self._hub.leave(stream)
            return now
        self._streams[stream] = caller.credential_id
        return stream

    def close_stream(self, subscription: Subscription) -> None:
        """Its reader is gone, or has had everything."""
        self._streams.pop(subscription, None)
        self._hub.leave(subscription)

    def end_streams(self, credential_ids: frozenset[str]) -> None:
        """Of credentials that were changed or removed: who may still listen comes back."""
        for subscription, credential_id in list(self._streams.items()):
            if credential_id in credential_ids:
                subscription.end(Ending.REFUSED)

    def _spend(self, caller: Caller, operations: int = 1) -> Spent:
        now = self._clock.wall()
        return self._quota.spend(caller.project, operations, limit=caller.quota, now=now)

    def admit(self, authorization: bytes | None) -> Caller | Problem:
        """The caller, if it may manage locks."""
        caller = self._access.authenticate(authorization)
        if isinstance(caller, Problem) or caller.may_manage_locks():
            return caller
        return ANON_KEY_DENIED if caller.kind == "anon" else PERMISSION_DENIED

    async def store_trouble(self) -> str | None:
        """Why the store cannot answer, if so.

        Tried with a key that no project can have: it is read, and freed, which goes the way of all
        writes (a standby of a database refuses that) and changes nothing.
        """
        nobodys = SlotKey(project="", key="")

        async def ask(command: Command) -> None:
            await self._queue.submit(command)

        try:
            await asyncio.gather(ask(Read(nobodys)), ask(ForceRelease(nobodys)))
        except StoreUnavailableError as error:
            return str(error)
        return None

    async def exchange_counts(self, counts: SharedCounts) -> None:
        """Tell the other replicas what the projects have used here, and hear what elsewhere."""
        told = self._quota.untold(self._clock.wall())
        if not told:
            return
        try:
            self._quota.exchange(told, await counts.add(told))
        except StoreUnavailableError:
            pass  # Told again next time: what was added all the same then counts twice.

    def wall(self) -> int:
        """The server's wall clock in µs since 1970."""
        return self._clock.wall()

    async def advance_clock(self, seconds: float) -> None:
        """For tests: time passes, and what became due by it is done."""
        assert isinstance(self._clock, Movable)
        self._clock.advance(seconds)
        await self._hub.catch_up()

    async def reset(self) -> None:
        """For tests: free every key that was touched since the start, and forget the quotas."""
        assert self._touched is not None
        touched, self._touched = self._touched, set()
        for slot_key in touched:
            await self._queue.submit(ForceRelease(slot_key))
        self._quota = Quota()


class _Waiting:
    """Takes what the queue answers, and tells the outcome."""

    __slots__ = ("_caller", "_is_told", "_spent", "_tell")

    def __init__(
        self, tell: Callable[[Outcome], None], caller: Caller, spent: Spent | None
    ) -> None:
        self._tell = tell
        self._caller = caller
        self._spent = spent
        self._is_told = False

    def done(self) -> bool:
        return self._is_told

    def set_result(self, answers: Sequence[Answer]) -> None:
        self._is_told = True
        self._tell(Outcome(answers[0], self._caller, self._spent))

    def set_exception(self, error: Exception) -> None:
        self._is_told = True
        self._tell(_refused(error, self._caller, self._spent))


def _refused(error: Exception, caller: Caller, spent: Spent | None) -> Outcome:
    match error:
        case wire.InvalidRequestError():
            return Outcome(invalid_request(str(error)), caller, spent)
        case BodyTooLargeError():
            return Outcome(payload_too_large(error.limit), caller, spent)
        case BodyTooSlowError():
            return Outcome(BODY_TOO_SLOW, caller, spent, reason="the body did not arrive in time")
        case StoreUnavailableError():
            return Outcome(STORE_UNAVAILABLE, caller, spent, reason=str(error))
        case _:
            return Outcome(INTERNAL_ERROR, fault=error)


def _command(request: LockRequest, aim: tuple[SlotKey, str], body: bytes) -> Command:
    """Raises InvalidRequestError."""
    slot_key, token = aim
    match request.operation:
        case Operation.ACQUIRE:
            return Acquire(slot_key, token, wire.parse_ttl(body))
        case Operation.RENEW:
            return Renew(slot_key, token, wire.parse_ttl(body))
        # The rest takes no body; what some HTTP clients send all the same is not looked at.
        case Operation.RELEASE:
            return Release(slot_key, token)
        case Operation.READ:
            return Read(slot_key)
        case _:
            return ForceRelease(slot_key)


async def _renewals(request: LockRequest, read_body: ReadBody, project: str) -> list[Renew]:
    """Raises InvalidRequestError, and what `read_body` does."""
    _refuse_repeated(request)
    wire.parse_request_id(request.request_id)
    return [
        Renew(SlotKey(project, each.key), each.token.lower(), each.ttl_seconds)
        for each in wire.parse_renewals(await read_body())
    ]


def _refuse_repeated(request: LockRequest) -> None:
    if request.repeated is not None:
        raise wire.InvalidRequestError(f"{request.repeated}: the header came twice; send it once.")
