"""A later try that fails ends the waiting."""

from reference_driver import Sdk, VolcanoError, main

CAUGHT_BY = "wait/a_later_failure_is_tried_again"


class Broken(Sdk):
    def _pause_after(self, error: VolcanoError, failures: int) -> float:
        del failures
        raise error


if __name__ == "__main__":
    main(Broken)
