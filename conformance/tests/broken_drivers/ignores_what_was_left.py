"""Does not read X-Volcano-Expires-In."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "renew/less_than_the_ttl_was_left"


class Flawed(Rules):
    def worth(self, sent: float, answered: float, ttl: float, expires_in: float | None) -> float:
        return sent + ttl


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
