"""Does not spread out when a crowd waits."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/a_crowd_spreads_out"


class Rules(WaitingRules):
    def pause(self, watchers: int) -> float:
        del watchers
        return 0.0


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
