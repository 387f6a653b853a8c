"""Raises at the end of a wait that a read had failed, though a later one was answered."""

from reference_driver import Sdk, main
from reference_waiting import Ears, Waiter

CAUGHT_BY = "wait/a_failure_that_is_over_is_not_told"


class BrokenEars(Ears):
    def _was_read(self, waiter: Waiter) -> None:
        pass


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
