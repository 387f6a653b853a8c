"""Tries a lease that was over the quota again at once."""

from typing import Any

from reference_driver import Response, Sdk, main

CAUGHT_BY = "renew/together_one_is_over_the_quota"


class Broken(Sdk):
    def _single(self, item: dict[str, Any], request_id: str) -> Response:
        return super()._single({**item, "retry_after": "soon"}, request_id)


if __name__ == "__main__":
    main(Broken)
