"""Does not look at `expires_at` when it polls."""

from reference_driver import Sdk, main
from reference_waiting import WaitingRules

CAUGHT_BY = "wait/polling_asks_when_the_lease_runs_out"


class Rules(WaitingRules):
    def until_free(self, expires_at: str, now: float) -> float:
        del expires_at, now
        return 60.0

    def poll_delay(self) -> float:
        return 4.5


class Broken(Sdk):
    waiting_rules = Rules()


if __name__ == "__main__":
    main(Broken)
