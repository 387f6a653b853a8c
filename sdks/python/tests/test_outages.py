"""Every lease outlives one outage of a third of its TTL (half from TTL 15), whatever it looks like.

A simulation of the pure half: the server is away for that long from a random moment on, and each
try that meets the outage hangs, is reset or is refused at random.  docs/semantics.md#retries
"""

import random
from datetime import UTC, datetime

import pytest

from volcano_sdk import operations
from volcano_sdk.errors import TransportError
from volcano_sdk.operations import Acquired, Answer, Failure, Grant, Outcome, Request, Try
from volcano_sdk.renewal import Holding

KEY, TOKEN = "nightly", "6f1c2a52-58a8-4ac9-9d2e-0f0f5a3a8a11"
LATENCY = 0.01


class Outage:
    """Away from `start` to `end`; `kinds` are the ways in which a try may notice."""

    def __init__(
        self, start: float, end: float, kinds: tuple[str, ...], dice: random.Random
    ) -> None:
        self.start, self.end, self.kinds, self.dice = start, end, kinds, dice

    def send(self, attempt: Try, at: float, ttl: int) -> tuple[float, Outcome]:
        """When the outcome is known, and the outcome."""
        if not self.start <= at < self.end:
            body = b'{"expires_at":"2026-11-29T12:00:00.000Z","fencing_token":7}'
            headers = {"x-volcano-expires-in": f"{ttl}.000"}
            return at + LATENCY, Answer(at, 200, headers, body)
        kind = self.dice.choice(self.kinds)
        failure = Failure(at, TransportError(kind), reached=kind != "refused")
        return at + (attempt.timeout if kind == "hang" else LATENCY), failure


def held_until(ttl: int, outage: Outage, dice: random.Random, *, end: float) -> float | None:
    """When the lease was lost; None: never."""
    grant = Grant(0.0, datetime(2026, 11, 29, tzinfo=UTC), 7, float(ttl))
    holding = Holding(KEY, TOKEN, ttl, Acquired(grant, 0.0), jitter=dice.uniform(-1, 1))
    while (now := holding.schedule.due_at) < end:
        if now >= holding.trust.stop_at:
            return holding.trust.stop_at
        request: Request = operations.renew(
            KEY, ttl=ttl, token=TOKEN, request_id="r", service_key="sk-test"
        )
        known_at, outcome = outage.send(holding.renewal(request, now, 10.0), now, ttl)
        holding.renewed(request, outcome, now=known_at, jitter=dice.uniform(-1, 1))
        if holding.loss is not None:
            return known_at
    return None


@pytest.mark.parametrize("ttl", [5, 6, 8, 15, 20, 30, 60])
@pytest.mark.parametrize(
    "kinds", [("hang",), ("reset",), ("refused",), ("hang", "reset", "refused")]
)
def test_one_outage_costs_no_lease(ttl: int, kinds: tuple[str, ...]) -> None:
    dice = random.Random(f"{ttl}{kinds}")
    away = ttl / 2 if ttl >= 15 else ttl / 3
    for _ in range(100):
        start = dice.uniform(0, 2 * ttl)
        outage = Outage(start, start + away, kinds, dice)

        assert held_until(ttl, outage, dice, end=6 * ttl) is None


def test_an_outage_as_long_as_the_ttl_costs_the_lease() -> None:
    dice = random.Random(1)
    outage = Outage(0.5, 5.5, ("reset",), dice)

    assert held_until(5, outage, dice, end=30) is not None
