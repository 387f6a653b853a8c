"""The larger the crowd, the longer it pauses."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/a_crowd_spreads_out"


class Rules(WaitingRules):
    def pause(self, watchers: int) -> float:
        return max(watchers - 1, 0) * 0.002


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
