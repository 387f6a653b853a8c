"""Takes the 409 to a second release try for a loss."""

from reference_driver import Sdk, main

CAUGHT_BY = "release/a_409_to_the_second_try_is_released"


class Broken(Sdk):
    def _means_released(self, status: int, number: int) -> bool:
        return status == 204


if __name__ == "__main__":
    main(Broken)
