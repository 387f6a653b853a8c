"""Does not try when a lease has lapsed."""

from reference_driver import Sdk, main
from reference_waiting import Ears, LockEvent

CAUGHT_BY = "wait/a_lapse_wakes"


class BrokenEars(Ears):
    def _is_worth_a_try(self, event: LockEvent) -> bool:
        return event.type in ("released", "force_released")


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
