"""Reads the key though a stream tells of it."""

from reference_driver import Sdk, main
from reference_waiting import Ears, Waiter

CAUGHT_BY = "wait/no_polling_while_the_stream_is_open"


class BrokenEars(Ears):
    def _plan_poll(self, waiter: Waiter) -> None:
        if waiter.poll_at is None:
            waiter.poll_at = self.sdk.clock.now + self.rules.poll_delay()


class Broken(Sdk):
    ears_class = BrokenEars


if __name__ == "__main__":
    main(Broken)
