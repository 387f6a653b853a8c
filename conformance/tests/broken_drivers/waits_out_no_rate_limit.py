"""A later try over the quota is made again at once."""

from reference_driver import Sdk, main

CAUGHT_BY = "wait/a_later_rate_limit_is_waited_out"


class Broken(Sdk):
    def passing(self, error: BaseException) -> float | None:
        return None if super().passing(error) is None else 0.0


if __name__ == "__main__":
    main(Broken)
