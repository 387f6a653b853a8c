"""Waits long for the answer to a release."""

from reference_driver import Sdk, main

CAUGHT_BY = "release/is_bounded"


class Broken(Sdk):
    exit_seconds = 30.0


if __name__ == "__main__":
    main(Broken)
