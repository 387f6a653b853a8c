"""Keeps the stream of those who no longer wait."""

from reference_driver import Sdk, main
from reference_waiting import Ears, Waiter

CAUGHT_BY = "wait/a_cancelled_wait_leaves_nothing"


class BrokenEars(Ears):
    def leave(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
