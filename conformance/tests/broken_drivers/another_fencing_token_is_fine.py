"""Does not look at the fencing token of a renewal."""

from reference_driver import Lease, Sdk, main

CAUGHT_BY = "renew/another_fencing_token_is_a_loss"


class Broken(Sdk):
    def _is_same(self, old: Lease, new: Lease) -> bool:
        return True


if __name__ == "__main__":
    main(Broken)
