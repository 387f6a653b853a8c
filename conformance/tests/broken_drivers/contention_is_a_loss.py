"""Raises LockLostError where somebody else holds the lock."""

from typing import Any

from reference_driver import ConflictError, LockLostError, Sdk, main

CAUGHT_BY = "acquire/a_held_key_is_a_conflict"


class Broken(Sdk):
    async def with_lock(self, *given: Any, **named: Any) -> Any:
        try:
            return await super().with_lock(*given, **named)
        except ConflictError as error:
            raise LockLostError(str(error), **error.facts) from error


if __name__ == "__main__":
    main(Broken)
