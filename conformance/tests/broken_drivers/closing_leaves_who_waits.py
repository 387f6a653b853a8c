"""Closing the client does not end its waiting."""

from reference_driver import Sdk, main
from reference_waiting import Ears

CAUGHT_BY = "wait/closing_ends_it"


class BrokenEars(Ears):
    def close(self) -> None:
        pass


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
