"""How the calls of one async client are carried out: one try, a flow of tries, and those that must
come to an end although their caller is cancelled.
"""

import math
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import anyio

from volcano_sdk import operations
from volcano_sdk.async_clock import AsyncClock
from volcano_sdk.async_renewal import Held, Renewals, log
from volcano_sdk.async_shield import finish
from volcano_sdk.async_transport import AsyncTransport
from volcano_sdk.errors import ConflictError, TransportError, VolcanoError
from volcano_sdk.operations import (
    EXIT_TRY_SECONDS,
    Acquired,
    AcquireFailedError,
    Answer,
    Failure,
    Outcome,
    Request,
    Try,
)
from volcano_sdk.settings import Settings
from volcano_sdk.tokens import Tokens

T = TypeVar("T")

_PLACES = 100
"""Requests in flight at once, renewals apart; the others wait for a place."""


@dataclass(frozen=True, slots=True)
class Acquisition:
    """An acquire, all of it fixed before the first send.

    `is_recoverable`: the caller chose the token and can try again with it.
    """

    request: Request
    key: str
    ttl: int
    token: str
    is_recoverable: bool


class Calls:
    def __init__(
        self,
        transport: AsyncTransport,
        renewals: Renewals,
        settings: Settings,
        clock: AsyncClock,
    ) -> None:
        self._transport = transport
        self._renewals = renewals
        self._settings = settings
        self._clock = clock
        self.is_closed = False
        self._places = anyio.Semaphore(_PLACES)
        self.tokens = Tokens()

    def request_id(self, chosen: object) -> str:
        return str(uuid.uuid4()) if chosen is None else operations.checked_request_id(chosen)

    @property
    def credential(self) -> str:
        """The service key; RuntimeError once the client is closed, AuthenticationError without."""
        self.check_open()
        return self._settings.credential

    def check_open(self) -> None:
        if self.is_closed:
            raise self.closed()

    def closed(self) -> RuntimeError:
        return RuntimeError("this client was closed: make a new one")

    def acquisition(self, key: str, ttl: int, token: object, request_id: object) -> Acquisition:
        """Checked arguments; ValueError or AuthenticationError."""
        operations.checked_key(key)
        operations.checked_ttl(ttl)
        fixed = str(uuid.uuid4()) if token is None else operations.checked_token(token)
        self.tokens.refuse_released(fixed)
        request = operations.acquire(
            key,
            ttl=ttl,
            token=fixed,
            request_id=self.request_id(request_id),
            service_key=self.credential,
        )
        return Acquisition(request, key, ttl, fixed, is_recoverable=token is not None)

    def is_used_up(self, acquisition: Acquisition) -> bool:
        """A release was sent for the caller's own lock token."""
        return acquisition.is_recoverable and self.tokens.is_released(acquisition.token)

    def again(self, acquisition: Acquisition) -> Acquisition:
        """The next operation, with the same lock token unless a release was sent for it."""
        is_new = not acquisition.is_recoverable and self.tokens.is_released(acquisition.token)
        token = None if is_new else acquisition.token
        again = self.acquisition(acquisition.key, acquisition.ttl, token, None)
        return replace(again, is_recoverable=acquisition.is_recoverable)

    # --- tries ------------------------------------------------------------------------------------

    async def ask(
        self,
        request: Request,
        holders: Sequence[Held] = (),
        ttl: int = 0,
        *,
        patience: float = math.inf,
    ) -> Answer:
        """One try of a direct call; TransportError when no answer came, within seconds."""
        attempt = Try(request, min(self._settings.timeout, patience))
        outcome = await self._send(attempt, holders, ttl)
        if isinstance(outcome, Failure):
            raise outcome.error
        return outcome

    async def _run(
        self, flow: Generator[Try, Outcome, T], holders: Sequence[Held] = (), ttl: int = 0
    ) -> T:
        attempt = next(flow)
        while True:
            outcome = await self._send(attempt, holders, ttl)
            try:
                attempt = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result

    async def _send(self, attempt: Try, holders: Sequence[Held], ttl: int) -> Outcome:
        """One try.  The `with_lock`s that live on this lease hear of a TTL that may shorten it."""
        asked_at = self._clock.now()
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            with self._clock.move_on_at(asked_at + self._settings.timeout) as waiting:
                await self._places.acquire()
            if waiting.cancelled_caught:
                return _no_place(attempt, asked_at)
        try:
            sent_at = self._clock.now()
            for held in holders:
                held.holding.sent(sent_at, ttl)
                self._renewals.moved(held)
            return await self._transport.exchange(attempt, sent_at=sent_at)
        finally:
            self._places.release()

    # --- calls that come to an end whatever happens to their caller ------------------------------

    async def obtain(self, acquisition: Acquisition, *, gives_back: bool) -> Acquired:
        """Acquire.  With `gives_back`, what may have been granted to nobody is released again."""

        async def work() -> Acquired | AcquireFailedError:
            flow = operations.acquire_flow(
                acquisition.request, ttl=acquisition.ttl, timeout=self._settings.timeout
            )
            try:
                return await self._run(flow, holders, acquisition.ttl)
            except AcquireFailedError as error:
                return error

        holders = self._renewals.holders(acquisition.key, acquisition.token)
        patience = EXIT_TRY_SECONDS if gives_back else 0.0
        result, interruption = await finish(work, clock=self._clock, patience=patience)
        if isinstance(result, Acquired) and interruption is None:
            for held in holders:
                self._renewals.answered(held, result.grant)
            return result
        is_refused = isinstance(result, AcquireFailedError) and not result.unknown
        if gives_back and not is_refused:
            interruption = await self.give_back(acquisition) or interruption
        if interruption is not None:
            raise interruption
        assert isinstance(result, AcquireFailedError)
        if isinstance(result.error, ConflictError):
            for held in holders:
                self._renewals.refused(held, result.error)
        raise result.error from None

    async def give_back(self, acquisition: Acquisition) -> BaseException | None:
        """Release what nobody will use; a failure is only logged.  Returns an interruption."""
        failure, interruption = await self.release(acquisition.key, acquisition.token, tries=2)
        if failure is not None and not isinstance(failure, ConflictError):
            log.warning("%r may stay locked until its TTL is over: %s", acquisition.key, failure)
        return interruption

    async def release(
        self, key: str, token: str, *, tries: int
    ) -> tuple[VolcanoError | None, BaseException | None]:
        """Release on the way out, in bounded time.  Returns why it failed, and an interruption."""
        self.tokens.release(token)
        request = operations.release(
            key,
            token=token,
            request_id=self.request_id(None),
            service_key=self._settings.credential,
        )

        async def work() -> VolcanoError | None:
            try:
                await self._run(operations.release_flow(request, tries=tries))
            except VolcanoError as error:
                return error
            return None

        return await finish(work, clock=self._clock)

    async def close(self) -> None:
        """Running `with_lock`s are lost, then each lease is released; raises the first failure."""
        self.is_closed = True
        given_up = [held for held in self._renewals.kept if held.holding.live]
        for held in given_up:
            held.holding.lose("was given up: its client was closed", None)
            held.holding.released = True  # by us, below: the exit of the body sends nothing
        for held in given_up:
            held.look()
        failures: list[VolcanoError] = []

        async def release(held: Held) -> None:
            lease = held.holding.lease
            failure, _ = await self.release(lease.key, lease.token, tries=1)
            if failure is not None:
                failures.append(failure)

        async def work() -> None:
            async with anyio.create_task_group() as tasks:
                for held in given_up:
                    tasks.start_soon(release, held)

        _, interruption = await finish(work, clock=self._clock)
        if interruption is not None:
            raise interruption
        if failures:
            raise failures[0]


def _no_place(attempt: Try, asked_at: float) -> Failure:
    error = TransportError(
        f"{attempt.request.operation} was not sent: {_PLACES} requests were in flight all the time",
        request_id=attempt.request.request_id,
    )
    return Failure(asked_at, error, reached=False)
