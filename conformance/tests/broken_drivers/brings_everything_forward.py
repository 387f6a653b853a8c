"""Takes every lease along, due or not."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/brought_forward_by_half_a_second_at_most"


class Broken(Sdk):
    def _brought_forward(self, ttl: float) -> float:
        return ttl


if __name__ == "__main__":
    main(Broken)
