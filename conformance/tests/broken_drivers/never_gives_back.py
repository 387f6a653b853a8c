"""Leaves behind what may have been granted."""

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/twice_lost_is_given_back"


class Broken(Sdk):
    async def _give_back(self, key: str, token: str) -> None:
        pass


if __name__ == "__main__":
    main(Broken)
