"""Leaves behind the lease of a cancelled acquire."""

from collections.abc import Coroutine
from typing import Any

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/a_cancelled_acquire_is_given_back"


class Broken(Sdk):
    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()


if __name__ == "__main__":
    main(Broken)
