"""Takes a stream without events for lost, whatever its comments say."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/a_stream_with_comments_is_kept"


class Rules(WaitingRules):
    silence = 10.0


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
