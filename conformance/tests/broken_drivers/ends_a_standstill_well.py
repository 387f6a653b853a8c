"""Takes the end of the body for good when no timer has told of the loss."""

from collections.abc import Awaitable, Callable
from typing import Any

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "guard/a_paused_holder_that_ends_without_a_look"


class Broken(Sdk):
    async def _run(self, guard: Guard, body: Callable[[Guard], Awaitable[Any]]) -> Any:
        result = await body(guard)
        if guard.loss is not None:
            raise guard.loss
        return result


if __name__ == "__main__":
    main(Broken)
