"""Trusts each renewed lease for its whole TTL."""

from typing import Any

from reference_driver import Response, Sdk, main

CAUGHT_BY = "renew/together_less_was_left"


class Broken(Sdk):
    def _single(self, item: dict[str, Any], request_id: str) -> Response:
        known = {name: value for name, value in item.items() if name != "expires_in"}
        return super()._single(known, request_id)


if __name__ == "__main__":
    main(Broken)
