"""Leaves the lease to its TTL."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "acquire/a_free_key_is_held_while_the_body_runs"


class Broken(Sdk):
    async def _exit(self, guard: Guard, raised: BaseException | None) -> None:
        guard.over = True


if __name__ == "__main__":
    main(Broken)
