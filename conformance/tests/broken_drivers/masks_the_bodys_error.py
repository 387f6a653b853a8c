"""Raises the release's error in place of the body's."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "release/that_fails_does_not_mask_the_bodys_error"


class Broken(Sdk):
    async def _exit(self, guard: Guard, raised: BaseException | None) -> None:
        await self._leave(guard)


if __name__ == "__main__":
    main(Broken)
