"""Retries an acquire with another lock token."""

from reference_driver import Sdk, main, new_id

CAUGHT_BY = "acquire/an_answer_that_was_lost_is_asked_for_again"


class Broken(Sdk):
    def _retry_token(self, token: str) -> str:
        return new_id()


if __name__ == "__main__":
    main(Broken)
