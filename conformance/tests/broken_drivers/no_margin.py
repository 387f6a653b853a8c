"""Trusts a lease up to its very deadline."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "renew/nothing_but_resets_is_a_loss_at_the_stop_time"


class Flawed(Rules):
    def margin(self, ttl: float) -> float:
        return 0.0


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
