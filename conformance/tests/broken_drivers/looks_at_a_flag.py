"""Answers `lost` from a flag that a timer has to set."""

from reference_driver import Guard, Sdk, main

CAUGHT_BY = "guard/a_paused_holder_sees_it_on_the_first_look"


class Flawed(Guard):
    @property
    def lost(self) -> bool:
        return self.loss is not None


class Broken(Sdk):
    guard_class = Flawed


if __name__ == "__main__":
    main(Broken)
