"""What the agents' reports add up to.  Pure: reports in, a verdict out.

A claim is the time in which one agent held one ticket: from its grant to the earlier of its release
and its expiry.  All times are seconds of one clock that the processes of this machine share.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any


@dataclass(slots=True)
class Claim:
    """`expires_at` moves on with each renewal; `released_at` stays None for an agent that died."""

    agent: str
    ticket: int
    fencing_token: int
    granted_at: float
    expires_at: float
    released_at: float | None = None

    @property
    def ended_at(self) -> float:
        return (
            self.expires_at if self.released_at is None else min(self.released_at, self.expires_at)
        )

    def overlaps(self, other: "Claim") -> bool:
        return (
            self.ticket == other.ticket
            and self.granted_at < other.ended_at
            and other.granted_at < self.ended_at
        )


def concurrent(claims: Iterable[Claim]) -> list[tuple[Claim, Claim]]:
    """Each pair of claims on one ticket that were alive at the same time."""
    return [pair for pair in combinations(claims, 2) if pair[0].overlaps(pair[1])]


def next_claim(claims: Iterable[Claim], after: Claim) -> Claim | None:
    """Who took the ticket over."""
    later = [c for c in claims if c.ticket == after.ticket and c.granted_at > after.granted_at]
    return min(later, key=lambda claim: claim.granted_at, default=None)


def by_language(claims: Iterable[Claim], languages: Mapping[str, str]) -> dict[str, int]:
    """How many claims each language's agents made.  `languages`: {"agent-01": "python"}."""
    counts = Counter(languages[claim.agent] for claim in claims)
    return {language: counts[language] for language in dict.fromkeys(languages.values())}


@dataclass(frozen=True, slots=True)
class Summary:
    """What happened.  `answers`: ticket -> how often it was answered; `claims`: by language."""

    answers: dict[int, int]
    claims: dict[str, int]
    overlaps: int
    crashed: int
    reclaimed_after: float | None
    reclaim_limit: float
    stale_writes_refused: int
    seconds: float
    agents_failed: list[str] = field(default_factory=list)
    requests: Mapping[str, int] = field(default_factory=dict)
    """What the server has answered: {"acquire": 139, "events": 12}."""

    @property
    def answered(self) -> int:
        return sum(1 for count in self.answers.values() if count)

    def faults(self) -> list[str]:
        """Why this run proves nothing or the wrong thing; empty when all is well."""
        checks = [
            (
                self.answers and all(count == 1 for count in self.answers.values()),
                "not every ticket was answered exactly once",
            ),
            (self.overlaps == 0, "two agents held one ticket at the same time"),
            (self.crashed == 1, "no agent was killed while it held a ticket"),
            (
                self.reclaimed_after is not None and self.reclaimed_after <= self.reclaim_limit,
                f"the killed agent's ticket was not taken over within {self.reclaim_limit:g} s",
            ),
            (self.stale_writes_refused == 1, "the stalled agent's late write was not refused"),
            (
                all(self.claims.values()),
                f"no claims by {', '.join(each for each, n in self.claims.items() if not n)}",
            ),
            (not self.agents_failed, f"agents failed: {', '.join(self.agents_failed)}"),
        ]
        return [fault for holds, fault in checks if not holds]

    def line(self) -> str:
        reclaimed = "crashed and reclaimed" if self.reclaimed_after is not None else "crashed"
        refused = self.stale_writes_refused
        return (
            f"{self.answered} answered, {self.overlaps} concurrent claims,"
            f" {self.crashed} {reclaimed}, {refused} stale write{'s'[: refused != 1]} refused"
        )

    def asked(self) -> str:
        """How often the agents asked the server, and for what."""
        tries, streams, reads = (self.requests.get(n, 0) for n in ("acquire", "events", "read"))
        return (
            f"{tries} tries for {sum(self.claims.values())} claims,"
            f" {streams} event streams, {reads} reads{': nobody polled' * (reads == 0 < streams)}"
        )

    def as_json(self) -> dict[str, Any]:
        """For programs; what each name means is in README.md."""
        return {
            "ok": not self.faults(),
            "tickets": len(self.answers),
            "answered": self.answered,
            "claims": self.claims,
            "concurrent_claims": self.overlaps,
            "crashed": self.crashed,
            "reclaimed_after_seconds": self.reclaimed_after,
            "stale_writes_refused": self.stale_writes_refused,
            "seconds": self.seconds,
            "requests": dict(self.requests),
            "faults": self.faults(),
        }
