"""Raises at the end of a wait that a try had failed, though a later one was answered."""

from reference_driver import Sdk, main
from reference_waiting import Waiter

CAUGHT_BY = "wait/a_failed_try_that_is_over_is_not_told"


class Broken(Sdk):
    def _was_answered(self, waiter: Waiter) -> None:
        del waiter


if __name__ == "__main__":
    main(Broken)
