"""Counts a lease's time from when the waiting began."""

from typing import Any

from reference_driver import Lease, Sdk, main

CAUGHT_BY = "wait/the_lease_begins_with_the_try_that_got_it"


class Broken(Sdk):
    async def _next_granted(
        self, end: float, key: str, ttl: int, *given: Any, **options: Any
    ) -> tuple[Lease, float, float]:
        began = self.clock.now
        lease, _, _ = await super()._next_granted(end, key, ttl, *given, **options)
        return lease, began, began + ttl


if __name__ == "__main__":
    main(Broken)
