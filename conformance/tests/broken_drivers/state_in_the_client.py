"""Keeps the lock token in the client, so that an overrun frees the next holder's lock."""

from reference_driver import Sdk, main

CAUGHT_BY = "guard/an_overrun_does_not_free_the_next_holder"


class Broken(Sdk):
    async def _release_tries(self, key: str, token: str, tries: int) -> None:
        await super()._release_tries(key, list(self.guards)[-1] if self.guards else token, tries)


if __name__ == "__main__":
    main(Broken)
