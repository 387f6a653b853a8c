"""Goes on with a lock token that it has given back."""

from reference_driver import Sdk, main

CAUGHT_BY = "wait/a_token_that_was_given_back_is_replaced"


class Broken(Sdk):
    async def _release_tries(self, key: str, token: str, tries: int) -> None:
        await super()._release_tries(key, token, tries)
        self.spent.discard(token)


if __name__ == "__main__":
    main(Broken)
