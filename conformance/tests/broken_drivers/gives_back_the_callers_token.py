"""Gives back a lease that the caller could have recovered."""

from typing import Any

from reference_driver import Lease, Sdk, main

CAUGHT_BY = "acquire/the_callers_token_is_left_to_the_caller"


class Broken(Sdk):
    async def _granted(self, *given: Any, give_back: bool) -> tuple[Lease, float, float]:
        return await super()._granted(*given, give_back=True)


if __name__ == "__main__":
    main(Broken)
