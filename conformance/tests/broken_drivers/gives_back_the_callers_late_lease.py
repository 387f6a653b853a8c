"""Releases what came too late, although its caller may recover it with a token of its own."""

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/too_late_an_answer_with_the_callers_token_is_left"


class Broken(Sdk):
    def _is_the_callers(self, token: str | None) -> bool:
        del token
        return False


if __name__ == "__main__":
    main(Broken)
