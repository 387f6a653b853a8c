"""Half a second is much of a short lease."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/brought_forward_by_a_thirtieth_at_most"


class Broken(Sdk):
    def _brought_forward(self, ttl: float) -> float:
        del ttl
        return 0.5


if __name__ == "__main__":
    main(Broken)
