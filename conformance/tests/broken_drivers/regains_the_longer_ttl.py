"""Counts with the longer TTL again once a renewal was answered."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/a_shorter_ttl_brings_the_renewal_forward"


class Forgetful(Guard):
    def extend(self, deadline: float) -> None:
        self.ttl = 30
        super().extend(deadline)


class Broken(Sdk):
    guard_class = Forgetful


if __name__ == "__main__":
    main(Broken)
