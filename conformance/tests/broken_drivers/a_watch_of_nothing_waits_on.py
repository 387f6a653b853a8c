"""Watches on though the server has no events."""

from reference_driver import Sdk, VolcanoError, main

CAUGHT_BY = "watch/a_server_without_events"


class Broken(Sdk):
    def ends_a_watch(self, error: VolcanoError) -> bool:
        del error
        return False


if __name__ == "__main__":
    main(Broken)
