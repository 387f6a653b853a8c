"""Says at the end of a wait that the lock is held, though its last read had failed."""

from typing import Any

from reference_driver import Sdk, main
from reference_waiting import Ears, Waiter

CAUGHT_BY = "wait/a_failed_read_at_the_end_is_told"


class BrokenEars(Ears):
    def _not_read(self, waiter: Waiter, error: Any) -> None:
        pass


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
