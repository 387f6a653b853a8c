"""Uses the route for many where one lease is due."""

from typing import Any

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "renew/alone_when_due_alone"


class Broken(Sdk):
    def _share(self, guard: Guard) -> Any:
        return super()._share(guard) or self.spawn(self._renew_together([guard]))


if __name__ == "__main__":
    main(Broken)
