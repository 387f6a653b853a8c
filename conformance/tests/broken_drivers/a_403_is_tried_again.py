"""Takes a refused credential for a passing failure."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/every_final_answer_is_a_loss"


class Broken(Sdk):
    final = frozenset({409})


if __name__ == "__main__":
    main(Broken)
