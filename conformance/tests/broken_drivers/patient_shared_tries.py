"""Waits for a shared renewal as long as the lease with most left may."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/together_as_long_as_the_least_may_wait"


class Broken(Sdk):
    def _shared_timeout(self, remaining: list[float]) -> float:
        return self.rules.try_timeout(max(remaining), self.timeout)


if __name__ == "__main__":
    main(Broken)
