"""Doubles its pauses without end."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/after_a_long_outage_the_stream_is_back_in_time"


class Rules(WaitingRules):
    def backoff(self, failures: int) -> float:
        return float(0.1 * 2 ** (failures - 1))


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
