"""Tries a release again although the lock was lost."""

from reference_driver import Sdk, main

CAUGHT_BY = "release/once_after_a_loss"


class Broken(Sdk):
    def _tries_to_release(self, *, lost: bool) -> int:
        return 2


if __name__ == "__main__":
    main(Broken)
