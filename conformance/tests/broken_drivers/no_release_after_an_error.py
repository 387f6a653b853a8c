"""Releases after a good body only."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "release/after_the_bodys_error"


class Broken(Sdk):
    async def _exit(self, guard: Guard, raised: BaseException | None) -> None:
        guard.over = True
        if raised is None:
            await super()._exit(guard, raised)


if __name__ == "__main__":
    main(Broken)
