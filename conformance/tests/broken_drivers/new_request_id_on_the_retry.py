"""Retries an operation under another request id."""

from reference_driver import Sdk, main, new_id

CAUGHT_BY = "acquire/a_503_is_retried_once"


class Broken(Sdk):
    def _retry_id(self, request_id: str) -> str:
        return new_id()


if __name__ == "__main__":
    main(Broken)
