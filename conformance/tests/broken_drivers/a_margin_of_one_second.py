"""Leaves a second before the deadline of a long lease too."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "guard/the_margin_of_a_long_lease"


class Flawed(Rules):
    def margin(self, ttl: float) -> float:
        return 1.0


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
