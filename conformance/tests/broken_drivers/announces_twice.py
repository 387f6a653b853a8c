"""Announces a loss at every look."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "guard/a_loss_is_announced_once"


class Flawed(Guard):
    def look(self) -> bool:
        known = self.loss is not None
        if super().look() and known and self.loss is not None:
            self.on_lost(self.loss)
        return self.loss is not None


class Broken(Sdk):
    guard_class = Flawed


if __name__ == "__main__":
    main(Broken)
