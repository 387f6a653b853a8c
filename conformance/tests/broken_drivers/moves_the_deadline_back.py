"""Lets an answer shorten what was trusted before."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/a_renewal_that_leaves_less_does_not_shorten"


class Flawed(Guard):
    def extend(self, deadline: float) -> None:
        self.deadline = deadline
        self.moved.set()


class Broken(Sdk):
    guard_class = Flawed


if __name__ == "__main__":
    main(Broken)
