"""When to renew, and until when to trust a lease.  Pure: `now`, jitter and answers go in.

    send          ttl/3 ±10 %        stop time    deadline                        + 1 s
    |--- trusted --- renewal due --- tries --- | -- margin -- | server: lapsed -- | somebody else's
    ^ the deadline counts from here: the send of the try that was answered well

All times are seconds of the local suspend-aware clock; the server's `expires_at` is for people.
The rules in words: docs/semantics.md#local-deadline, #renewal, #retries.
The formulas as data, the same in every SDK: conformance/tables/renewal_delay.json.
"""

import math
from dataclasses import dataclass, replace

from volcano_sdk import operations
from volcano_sdk.errors import LockLostError, VolcanoError
from volcano_sdk.lease import LockLease
from volcano_sdk.operations import Acquired, Failure, Grant, Outcome, Request, Try

LONGEST_TRUST = 89.91 * 86_400
"""The server's hard deadline of 90 days less a thousandth: clocks may have drifted apart."""

LONGEST_LEAD = 0.5
"""Seconds by which a renewal may be brought forward at most."""

_FINAL = frozenset({400, 401, 403, 404, 409})


def renewal_delay(ttl: float, remaining: float, jitter: float) -> float:
    """Seconds from the send of the last success to the next renewal.

    A third of the TTL, ±10 % by `jitter` (-1 to 1).  Where the server left less than the TTL, half
    of what `remaining` from that send to the stop time, so that a renewal still fits.
    """
    return max(min(ttl / 3 * (1 + 0.1 * jitter), remaining / 2), 0.5)


def retry_delay(ttl: float, failures: int, remaining: float, jitter: float) -> float:
    """Seconds from the send of a failed try to the next; `failures` in a row, 1 or more.

    `remaining`: from the send of the failed try to the stop time.  `jitter`: -1 to 1.
    """
    longest = min(ttl / 10, max(5.0, ttl / 100))
    delay = min(0.1 * 2.0 ** min(failures - 1, 60), longest) * (1 + 0.5 * jitter)
    return min(delay, max(remaining / 2, 0.1))


def longest_lead(ttl: float) -> float:
    """By how much a renewal may be brought forward, to share a request with others."""
    return min(LONGEST_LEAD, ttl / 30)


def try_timeout(remaining: float, client_timeout: float) -> float:
    """How long one renewal try may take: room for two more in what `remaining` to the stop time."""
    return min(max(remaining / 3, min(0.5, remaining / 2)), client_timeout)


@dataclass(frozen=True, slots=True)
class Trust:
    """Until when the holder may act.  `ttl`: the shortest that any request of the lease carried."""

    first_sent_at: float
    ttl: int
    deadline: float

    @staticmethod
    def begun(acquired: Acquired, ttl: int) -> "Trust":
        """From a good acquire; of two tries of it, the lease is as old as the first."""
        unproven = Trust(acquired.first_sent_at, ttl, deadline=-math.inf)
        return unproven.answered(acquired.grant)

    @property
    def stop_at(self) -> float:
        """From here on no renewal can help."""
        return self.deadline - max(1.0, self.ttl / 1000)

    def sent(self, at: float, ttl: int) -> "Trust":
        """A request with this TTL went out: if it shortens the lease, it does so from now on."""
        return replace(self, ttl=min(self.ttl, ttl), deadline=min(self.deadline, at + ttl))

    def answered(self, grant: Grant) -> "Trust":
        """A good answer, also a late one: worth its send time and the shortest TTL.

        It is never worth less than what was trusted before.
        """
        worth = grant.sent_at + self.ttl
        if grant.expires_in is not None:
            worth = min(worth, grant.sent_at + grant.expires_in)
        worth = min(worth, self.first_sent_at + LONGEST_TRUST)
        return replace(self, deadline=max(self.deadline, worth))


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the next renewal is sent; `due_at` is infinite when none will be."""

    due_at: float
    failures: int = 0
    is_last: bool = False

    @staticmethod
    def after_success(trust: Trust, *, sent_at: float, jitter: float) -> "Schedule":
        return Schedule(sent_at + renewal_delay(trust.ttl, trust.stop_at - sent_at, jitter))

    def after_failure(
        self,
        trust: Trust,
        *,
        sent_at: float,
        now: float,
        jitter: float,
        retry_after: float | None = None,
    ) -> "Schedule":
        if self.is_last:
            return Schedule(math.inf, self.failures + 1)
        remaining = trust.stop_at - sent_at
        due_at = sent_at + retry_delay(trust.ttl, self.failures + 1, remaining, jitter)
        if retry_after is not None and now + retry_after >= trust.stop_at:
            # The server wants us back when it is too late: one last try, midway.
            midway = now + (trust.stop_at - now) / 2
            return Schedule(max(due_at, midway), self.failures + 1, is_last=True)
        return Schedule(max(due_at, now + (retry_after or 0.0), now), self.failures + 1)


class Holding:
    """One held lock, from its grant to its end: what it knows, never what time it is.

    held ── refused, another fencing token, stop time, closed ──> lost      (announced once)
      └──── the body ended, or our own release was sent ────────> ended     (never lost any more)

    Not thread-safe; the sync client guards it with its lock.
    """

    def __init__(
        self,
        key: str,
        token: str,
        ttl: int,
        acquired: Acquired,
        *,
        jitter: float,
        shortest_ttl: int = operations.TTL_MAX,
    ) -> None:
        """`shortest_ttl`: of direct calls with the same lock token, if there were any."""
        self.ttl = ttl
        self.lease: LockLease = acquired.grant.lease(key, token)
        self.trust = Trust.begun(acquired, min(ttl, shortest_ttl))
        self.schedule = Schedule.after_success(
            self.trust, sent_at=acquired.grant.sent_at, jitter=jitter
        )
        self.loss: LockLostError | None = None
        self.ended = False
        self.released = False
        self._latest_failure: VolcanoError | None = None

    @property
    def live(self) -> bool:
        return self.loss is None and not self.ended

    def look(self, now: float) -> LockLostError | None:
        """The loss, if there is one by `now`.  Every question about the lock comes through here."""
        if self.live and now >= self.trust.stop_at:
            self.loss = self._lost("was not renewed in time", None)
            self.loss.__cause__ = self._latest_failure
        return self.loss

    def lose(self, how: str, cause: VolcanoError | None) -> None:
        """The first loss counts; after the end there is none."""
        if self.live:
            self.loss = self._lost(how, cause)

    def release_refused(self, cause: VolcanoError) -> LockLostError:
        """Our release was answered 409 and no loss was known: we had lost it unawares."""
        if self.loss is None:
            self.loss = self._lost("was lost: its release was refused", cause)
        return self.loss

    def _lost(self, how: str, cause: VolcanoError | None) -> LockLostError:
        loss = LockLostError(
            f"the lock {self.lease.key!r} (fencing token {self.lease.fencing_token}) {how}",
            status=cause.status if cause else None,
            code=cause.code if cause else None,
            request_id=cause.request_id if cause else None,
        )
        loss.__cause__ = cause
        return loss

    def renewal(self, request: Request, now: float, client_timeout: float) -> Try:
        """The try to send at `now`."""
        self.sent(now, self.ttl)
        return Try(request, try_timeout(self.trust.stop_at - now, client_timeout))

    def sent(self, at: float, ttl: int) -> None:
        """A request of this lease went out, also one of a direct call with the same token.

        One with a shorter TTL brings the next renewal forward, in case its answer is lost.
        """
        was, self.trust = self.trust, self.trust.sent(at, ttl)
        if self.trust.ttl < was.ttl:
            sooner = at + renewal_delay(self.trust.ttl, self.trust.stop_at - at, 0.0)
            self.schedule = replace(
                self.schedule, due_at=min(self.schedule.due_at, max(sooner, at))
            )

    def goes_along(self, now: float) -> bool:
        """Whether it shares a request that is sent now: it is due, or it is brought forward.

        A try after a failure is not brought forward: it waits for a reason.
        """
        lead = 0.0 if self.schedule.failures else longest_lead(self.trust.ttl)
        return now >= self.schedule.due_at - lead

    def renewed(self, request: Request, outcome: Outcome, *, now: float, jitter: float) -> None:
        """What became of a renewal try on the single route."""
        try:
            if isinstance(outcome, Failure):
                raise outcome.error
            result: Grant | VolcanoError = operations.granted(request, outcome)
        except VolcanoError as error:
            result = error
        self.settled(result, sent_at=outcome.sent_at, now=now, jitter=jitter)

    def settled(
        self, result: Grant | VolcanoError, *, sent_at: float, now: float, jitter: float
    ) -> None:
        """What became of a renewal try that was sent then."""
        if self.look(now) or self.ended:
            return
        if isinstance(result, Grant):
            self.answered(result, jitter=jitter)
        elif result.status in _FINAL:
            self.lose("was lost: its renewal was refused", result)
        else:
            self._latest_failure = result
            self.schedule = self.schedule.after_failure(
                self.trust,
                sent_at=sent_at,
                now=now,
                jitter=jitter,
                retry_after=result.retry_after,
            )

    def answered(self, grant: Grant, *, jitter: float) -> None:
        """A good answer about this lease, to its own renewal or to a direct call."""
        if not self.live:
            return
        if grant.fencing_token != self.lease.fencing_token:
            self.lose(f"was lost: it now has the fencing token {grant.fencing_token}", None)
            return
        self._latest_failure = None
        self.trust = self.trust.answered(grant)
        self.lease = grant.lease(self.lease.key, self.lease.token)
        self.schedule = Schedule.after_success(self.trust, sent_at=grant.sent_at, jitter=jitter)
