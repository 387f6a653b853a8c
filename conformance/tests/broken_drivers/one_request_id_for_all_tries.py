"""Each later try repeats the request id of the one before."""

from reference_driver import Sdk, main, new_id

CAUGHT_BY = "wait/each_try_is_an_operation"


class Broken(Sdk):
    kept = new_id()

    def _next_id(self) -> str:
        return self.kept


if __name__ == "__main__":
    main(Broken)
