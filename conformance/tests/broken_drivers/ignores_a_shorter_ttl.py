"""Goes by its own TTL although a shorter one was sent for the lease."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/a_shorter_ttl_counts_from_its_send"


class Flawed(Guard):
    def shorten(self, sent: float, ttl: float) -> None:
        pass


class Broken(Sdk):
    guard_class = Flawed


if __name__ == "__main__":
    main(Broken)
