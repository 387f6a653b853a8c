"""Goes on opening a stream for who no longer waits."""

from reference_driver import Sdk, main
from reference_waiting import Ears

CAUGHT_BY = "wait/a_wait_that_is_cancelled_while_the_stream_is_opened"


class BrokenEars(Ears):
    def _stop(self) -> None:
        if self.open:
            super()._stop()


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
