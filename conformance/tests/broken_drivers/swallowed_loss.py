"""Returns the body's result although the lock was lost."""

from collections.abc import Awaitable, Callable
from typing import Any

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/a_refusal_is_a_loss"


class Broken(Sdk):
    async def _run(self, guard: Guard, body: Callable[[Guard], Awaitable[Any]]) -> Any:
        return await body(guard)


if __name__ == "__main__":
    main(Broken)
