"""Trusts a stream that says that it may have missed something."""

from reference_driver import Sdk, main
from reference_waiting import Ears, LockEvent

CAUGHT_BY = "wait/a_reset_is_worth_a_try"


class BrokenEars(Ears):
    def _tell(self, event: LockEvent) -> None:
        if event.type != "reset":
            super()._tell(event)


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
