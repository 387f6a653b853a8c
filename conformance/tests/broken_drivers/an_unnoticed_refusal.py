"""Takes a refused release for a good end."""

from reference_driver import Sdk, main

CAUGHT_BY = "release/a_refusal_without_a_known_loss_is_a_loss"


class Broken(Sdk):
    def _means_released(self, status: int, number: int) -> bool:
        return status in (204, 409)


if __name__ == "__main__":
    main(Broken)
