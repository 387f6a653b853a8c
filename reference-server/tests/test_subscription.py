"""One reader's blocks: what waits, what is cut off, how it ends."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest

from volcano_server.subscription import MOST_WAITING, Ending, Subscription
from volcano_server.wire_events import COMMENT, Filters

pytestmark = pytest.mark.anyio

RESET = b"event: reset\n\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def subscription() -> Subscription:
    return Subscription("shop", Filters(("nightly",), ()), Counter())


async def rest(subscription: Subscription) -> list[bytes]:
    return [block async for block in subscription.blocks()]


async def test_a_comment_comes_first_and_what_waits_comes_together(
    subscription: Subscription,
) -> None:
    subscription.tell(b"one", RESET)
    subscription.tell(b"two", RESET)

    async with aclosing(subscription.blocks()) as blocks:
        assert await anext(blocks) == COMMENT + b"onetwo"

    assert subscription.told == 2


async def test_a_reader_that_waits_is_woken(subscription: Subscription) -> None:
    async with aclosing(subscription.blocks()) as blocks:
        await anext(blocks)
        waiting = asyncio.ensure_future(anext(blocks))
        await asyncio.sleep(0)
        assert not waiting.done()

        subscription.tell(b"one", RESET)

        assert await waiting == b"one"


async def test_a_comment_is_left_out_where_something_waits(subscription: Subscription) -> None:
    subscription.comment()
    async with aclosing(subscription.blocks()) as blocks:
        assert await anext(blocks) == COMMENT
        subscription.comment()
        subscription.comment()
        assert await anext(blocks) == COMMENT


async def test_one_too_many_is_a_reset_and_the_end(subscription: Subscription) -> None:
    endings: list[Ending] = []
    subscription.on_end = endings.append
    for _ in range(MOST_WAITING):
        subscription.tell(b"event", RESET)
    assert subscription.ending is None

    subscription.tell(b"one too many", RESET)
    subscription.tell(b"after the end", RESET)

    assert endings == [Ending.CUT_OFF]
    assert await rest(subscription) == [RESET]


async def test_what_was_taken_does_not_wait(subscription: Subscription) -> None:
    async with aclosing(subscription.blocks()) as blocks:
        for _ in range(3):
            for _ in range(MOST_WAITING):
                subscription.tell(b"e", RESET)
            await anext(blocks)

    assert subscription.ending is None
    assert subscription.told == 3 * MOST_WAITING


async def test_the_end_comes_after_what_waits_and_the_first_reason_counts(
    subscription: Subscription,
) -> None:
    endings: list[Ending] = []
    subscription.on_end = endings.append
    subscription.tell(b"one", RESET)

    subscription.end(Ending.STOPPING)
    subscription.end(Ending.READER_GONE)

    assert await rest(subscription) == [COMMENT + b"one"]
    assert subscription.ending is Ending.STOPPING
    assert subscription._endings == {Ending.STOPPING: 1}
    assert endings == [Ending.STOPPING, Ending.READER_GONE]


async def test_a_reader_that_was_cancelled_is_not_woken(subscription: Subscription) -> None:
    async with aclosing(subscription.blocks()) as blocks:
        await anext(blocks)
        waiting = asyncio.ensure_future(anext(blocks))
        await asyncio.sleep(0)
        waiting.cancel()

        subscription.tell(b"one", RESET)

        with pytest.raises(asyncio.CancelledError):
            await waiting
