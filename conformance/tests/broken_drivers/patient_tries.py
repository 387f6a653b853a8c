"""Gives a renewal try all the time that is left."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "renew/survives_a_try_without_an_answer"


class Flawed(Rules):
    def try_timeout(self, remaining: float, client_timeout: float) -> float:
        return remaining


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
