"""Lets renewals carry a lease past the hard deadline."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/the_hard_deadline_is_counted_locally"


class Broken(Sdk):
    longest = 1e12


if __name__ == "__main__":
    main(Broken)
