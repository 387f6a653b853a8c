"""Does not wait for Retry-After."""

from typing import Any

from reference_driver import Response, Sdk, main

CAUGHT_BY = "renew/survives_429"


class Broken(Sdk):
    async def _send(self, *given: Any, **named: Any) -> Response:
        response = await super()._send(*given, **named)
        response.headers.pop("retry-after", None)
        return response


if __name__ == "__main__":
    main(Broken)
