"""Starts the body although a renewal is due."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "acquire/a_slow_answer_is_renewed_before_the_body"


class Broken(Sdk):
    def _is_due(self, guard: Guard) -> bool:
        return False


if __name__ == "__main__":
    main(Broken)
