"""Renews each lease in a request of its own."""

from reference_driver import Sdk, main

CAUGHT_BY = "renew/together_when_due_together"


class Broken(Sdk):
    renews_many = False


if __name__ == "__main__":
    main(Broken)
