"""Lets another's renewal take a lease along that was told when to come back."""

from asyncio import Task

from reference_driver import Guard, Sdk, Shared, main

CAUGHT_BY = "renew/together_a_retry_is_not_brought_forward"


class Broken(Sdk):
    async def _until_due(
        self, guard: Guard, due: float, *, is_retry: bool = False
    ) -> Task[Shared] | None:
        del is_retry
        return await super()._until_due(guard, due)


if __name__ == "__main__":
    main(Broken)
