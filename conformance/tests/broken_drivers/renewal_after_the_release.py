"""Goes on renewing when the body has ended."""

from asyncio import Task
from typing import Any

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "release/nothing_is_renewed_after_it"


class Broken(Sdk):
    async def _stop(self, chores: list[Task[Any]]) -> None:
        pass

    async def _leave(self, guard: Guard) -> None:
        await super()._leave(guard)
        guard.over = False


if __name__ == "__main__":
    main(Broken)
