"""Lets a lock token be used again that it has itself released."""

from reference_driver import Sdk, main

CAUGHT_BY = "acquire/the_callers_token_is_used_once"


class Broken(Sdk):
    async def _release_tries(self, key: str, token: str, tries: int) -> None:
        try:
            await super()._release_tries(key, token, tries)
        finally:
            self.spent.discard(token)


if __name__ == "__main__":
    main(Broken)
