"""Opens its stream again without a pause."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/the_stream_comes_back_more_slowly_each_time"


class Rules(WaitingRules):
    def backoff(self, failures: int) -> float:
        del failures
        return 0.0


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
