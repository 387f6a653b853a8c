"""Starts the body whenever the grant came."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "acquire/too_late_an_answer_to_with_lock_is_given_back"


class Broken(Sdk):
    def _may_start(self, guard: Guard) -> bool:
        return True


if __name__ == "__main__":
    main(Broken)
