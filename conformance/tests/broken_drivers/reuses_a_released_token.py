"""Acquires again with a token that was released."""

from typing import Any

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/a_released_token_is_refused"


class Broken(Sdk):
    def _check(self, key: Any, **named: Any) -> None:
        self.spent.clear()
        super()._check(key, **named)


if __name__ == "__main__":
    main(Broken)
