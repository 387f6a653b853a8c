"""Reads the key five times a second."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/a_404_means_polling"


class Rules(WaitingRules):
    def poll_delay(self) -> float:
        return 0.2


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
