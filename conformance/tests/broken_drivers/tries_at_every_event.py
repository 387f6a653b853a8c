"""Tries when somebody else has just got the key."""

from reference_driver import Sdk, main
from reference_waiting import Ears, LockEvent

CAUGHT_BY = "wait/what_does_not_free_the_key_is_no_reason"


class BrokenEars(Ears):
    def _is_worth_a_try(self, event: LockEvent) -> bool:
        return event.type != "reset"


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
