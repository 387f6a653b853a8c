"""Renews after half of the TTL."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "renew/after_a_third_of_the_ttl"


class Flawed(Rules):
    def renewal_delay(self, ttl: float, remaining: float, jitter: float) -> float:
        return ttl / 2 * (1 + 0.1 * jitter)


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
