"""Does not try again when its stream is open."""

from reference_driver import Sdk, main
from reference_waiting import Ears, Waiter

CAUGHT_BY = "wait/a_release_before_the_stream_is_open"


class BrokenEars(Ears):
    def _opened(self, waiter: Waiter) -> None:
        pass


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
