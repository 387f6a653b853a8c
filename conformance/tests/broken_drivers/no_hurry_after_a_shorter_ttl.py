"""Renews when it would have, although a shorter TTL was sent since."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/a_shorter_ttl_without_an_answer_is_renewed_sooner"


class Slow(Guard):
    def hurry(self, sent: float) -> None:
        del sent


class Broken(Sdk):
    guard_class = Slow


if __name__ == "__main__":
    main(Broken)
