"""Tries again every tenth of a second."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "renew/failures_back_off"


class Flawed(Rules):
    def retry_delay(self, ttl: float, failures: int, remaining: float, jitter: float) -> float:
        return 0.1


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
