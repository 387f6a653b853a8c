"""Waits at the end of the body for the renewal under way."""

from asyncio import Task
from typing import Any

from reference_driver import Sdk, main

CAUGHT_BY = "release/while_a_renewal_hangs"


class Broken(Sdk):
    async def _stop(self, chores: list[Task[Any]]) -> None:
        while self.wire.in_flight:
            await self.clock.sleep(0.1)
        await super()._stop(chores)


if __name__ == "__main__":
    main(Broken)
