"""Sends every renewal of a lease under one request id."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/again_and_again"


class Broken(Sdk):
    def _renewal_id(self, guard: Guard) -> str:
        return guard.lease.token


if __name__ == "__main__":
    main(Broken)
