"""Notices a loss only when a renewal has ended."""

from reference_driver import Guard, Rules, Sdk, main

CAUGHT_BY = "renew/nothing_but_hung_requests_is_a_loss_at_the_stop_time"


class Flawed(Rules):
    def try_timeout(self, remaining: float, client_timeout: float) -> float:
        return 600.0


class Broken(Sdk):
    rules = Flawed()

    async def _watch(self, guard: Guard) -> None:
        pass


if __name__ == "__main__":
    main(Broken)
