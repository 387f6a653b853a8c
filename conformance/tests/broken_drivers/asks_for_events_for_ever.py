"""Takes a server without events for one that is down."""

from reference_driver import Sdk, VolcanoError, main
from reference_waiting import Ears

CAUGHT_BY = "wait/a_404_means_polling"


class BrokenEars(Ears):
    def _is_without_events(self, error: VolcanoError) -> bool:
        del error
        return False


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
