"""Trusts a silent stream for ever."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/a_silent_stream_is_lost"


class Rules(WaitingRules):
    silence = 1e9


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
