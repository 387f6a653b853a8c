"""Takes a wait of 0 for a short one."""

from typing import Any

from reference_driver import Lease, Sdk, main

CAUGHT_BY = "wait/zero_never_waits"


class Broken(Sdk):
    async def _granted_within(
        self, wait: Any, *given: Any, **options: Any
    ) -> tuple[Lease, float, float]:
        return await super()._granted_within(wait or 0.001, *given, **options)


if __name__ == "__main__":
    main(Broken)
