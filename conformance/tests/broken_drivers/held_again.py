"""Takes a guard for held again when a later answer is good."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/lost_is_lost"


class Flawed(Guard):
    def extend(self, deadline: float) -> None:
        super().extend(deadline)
        self.loss = None


class Broken(Sdk):
    guard_class = Flawed


if __name__ == "__main__":
    main(Broken)
