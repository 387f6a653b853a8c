"""Tries when another key is released."""

from reference_driver import Sdk, main
from reference_waiting import Ears, LockEvent, Waiter

CAUGHT_BY = "wait/what_does_not_free_the_key_is_no_reason"


class BrokenEars(Ears):
    def _concerns(self, event: LockEvent, waiter: Waiter) -> bool:
        del event, waiter
        return True


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
