"""What one client remembers of the lock tokens that it has used, so far as it has room.  Pure."""

from typing import TypeVar

from volcano_sdk.operations import TTL_MAX

REMEMBERED = 10_000

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Tokens:
    """Not thread-safe; the sync client guards it with its lock."""

    def __init__(self) -> None:
        self._released: dict[str, None] = {}  # {lock token: None}, the oldest first
        self._shortest: dict[tuple[str, str], int] = {}  # {(key, lock token): seconds}

    def sent(self, key: str, token: str, ttl: int) -> None:
        """A direct call asked for this TTL: a `with_lock` of the same lease must know of it."""
        _remember(self._shortest, (key, token), min(ttl, self.shortest(key, token)))

    def shortest(self, key: str, token: str) -> int:
        """The shortest TTL that a direct call asked for, or the longest that there is."""
        return self._shortest.get((key, token), TTL_MAX)

    def release(self, token: str) -> None:
        """A release with it is about to be sent."""
        _remember(self._released, token, None)

    def is_released(self, token: str) -> bool:
        return token in self._released

    def refuse_released(self, token: str) -> None:
        """ValueError for a lock token for which a release was sent."""
        if self.is_released(token):
            raise ValueError("token was used for a lease that was released; make a new one")


def _remember(memory: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
