"""Does not look whose lease it is given."""

from typing import Any

from reference_driver import Sdk, main

CAUGHT_BY = "renew/a_lease_of_another_key_is_not_sent"


class Broken(Sdk):
    def _check(self, key: Any, **named: Any) -> None:
        super()._check(key, **{**named, "lease": None})


if __name__ == "__main__":
    main(Broken)
