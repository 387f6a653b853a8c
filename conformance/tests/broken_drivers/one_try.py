"""Does not try an acquire again."""

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/a_lost_request_is_sent_again"


class Broken(Sdk):
    acquire_tries = 1


if __name__ == "__main__":
    main(Broken)
