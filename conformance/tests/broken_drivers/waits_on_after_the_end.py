"""Waits for 5 s more than it was asked to."""

from typing import Any

from reference_driver import Lease, Sdk, main

CAUGHT_BY = "wait/is_over_when_it_runs_out"


class Broken(Sdk):
    async def _next_granted(
        self, end: float, *given: Any, **options: Any
    ) -> tuple[Lease, float, float]:
        return await super()._next_granted(end + 5, *given, **options)


if __name__ == "__main__":
    main(Broken)
