"""Reads the key every 5 s to 10 s."""

import random

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/a_405_means_polling"


class Rules(WaitingRules):
    def poll_delay(self) -> float:
        return random.uniform(5.5, 10.0)


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
