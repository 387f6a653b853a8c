"""Reads ten times a second a key whose lease is over by its own clock alone."""

from reference_driver import Sdk, main
from reference_waiting import Ears, Waiter

CAUGHT_BY = "wait/a_lease_that_is_over_by_our_clock_alone"


class BrokenEars(Ears):
    def _is_reason_to_hurry(self, expires_at: str, waiter: Waiter) -> bool:
        return True


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
