"""Closes without telling the guards."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "release/closing_loses_first_and_releases_all"


class Broken(Sdk):
    def _lose_at_close(self, guard: Guard) -> None:
        guard.closed = True


if __name__ == "__main__":
    main(Broken)
