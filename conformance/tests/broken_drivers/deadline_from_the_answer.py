"""Trusts a lease from when the answer came."""

from reference_driver import Rules, Sdk, main

CAUGHT_BY = "guard/the_deadline_counts_from_the_acquires_send"


class Flawed(Rules):
    def worth(self, sent: float, answered: float, ttl: float, expires_in: float | None) -> float:
        return super().worth(answered, answered, ttl, expires_in)


class Broken(Sdk):
    rules = Flawed()


if __name__ == "__main__":
    main(Broken)
