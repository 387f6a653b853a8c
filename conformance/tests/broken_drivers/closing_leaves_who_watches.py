"""Closing the client does not end its watches."""

from reference_driver import Sdk, main

CAUGHT_BY = "watch/closing_ends_it"


class Broken(Sdk):
    def _end_watches(self) -> None: ...


if __name__ == "__main__":
    main(Broken)
