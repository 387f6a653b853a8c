"""Tries an acquire three times."""

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/twice_503_is_given_back"


class Broken(Sdk):
    acquire_tries = 3


if __name__ == "__main__":
    main(Broken)
