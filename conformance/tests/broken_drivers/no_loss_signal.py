"""Knows of a loss when it is asked, and tells nobody."""

from reference_driver import Guard, Sdk, VolcanoError, main

CAUGHT_BY = "guard/a_loss_is_pushed_at_the_stop_time"


class Flawed(Guard):
    def lose(self, cause: VolcanoError | None) -> None:
        self.on_lost = lambda error: None
        super().lose(cause)


class Broken(Sdk):
    guard_class = Flawed


if __name__ == "__main__":
    main(Broken)
