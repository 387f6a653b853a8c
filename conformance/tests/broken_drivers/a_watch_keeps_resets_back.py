"""A watch does not say that events may be missing."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from reference_driver import Sdk, main
from reference_waiting import LockEvent

CAUGHT_BY = "watch/a_reset_is_passed_on"


class Broken(Sdk):
    async def watch(self, key: Any = None, prefix: Any = None) -> AsyncGenerator[LockEvent, None]:
        async with aclosing(super().watch(key, prefix)) as events:
            async for event in events:
                if event.type != "reset":
                    yield event


if __name__ == "__main__":
    main(Broken)
