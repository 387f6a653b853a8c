"""Opens a lost stream as if it were a new one."""

from reference_driver import Sdk, main
from reference_waiting import Ears

CAUGHT_BY = "wait/a_lost_stream_is_opened_again"


class BrokenEars(Ears):
    def _resume_from(self) -> str:
        return ""


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
