"""Trusts that each answer is where it belongs."""

from typing import Any

from reference_driver import Lease, Sdk, main

CAUGHT_BY = "renew/together_passing_answers"


class Broken(Sdk):
    def _is_for(self, lease: Lease, item: Any) -> bool:
        del lease
        return isinstance(item, dict)


if __name__ == "__main__":
    main(Broken)
