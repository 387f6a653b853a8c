"""The next fencing token.  Pure.

It rises strictly per key.  Four terms keep the order, each where the others cannot:

    the slot's last token + 1   when the clock steps back, and within one batch
    the highest swept token + 1 when the slot was deleted after a day of being free
    the wall clock in µs        when the store forgot: a restored backup, a lost replica
    the store's `now` at open   when it forgot and the wall clock had been set back: a backup that
                                is restored within the same boot goes on with the same time line,
                                whose `now` is past every moment in which it can have made a token
"""


def floor(*, highest_swept: int, wall: int, opened_at: int) -> int:
    """The least token that any new lease of the store may get.

    `wall`: µs since 1970; `opened_at`: the store's `now` when it was opened.
    """
    return max(highest_swept + 1, wall, opened_at)


def next_token(last: int, floor: int) -> int:
    """The token of the next lease of a key whose last one was `last` (0: none known)."""
    return max(last + 1, floor)
