import pytest

from volcano_sdk.operations import TTL_MAX
from volcano_sdk.tokens import REMEMBERED, Tokens


def test_a_released_token_is_refused_and_not_shown() -> None:
    tokens = Tokens()
    tokens.release("a-secret")

    tokens.refuse_released("another")
    with pytest.raises(ValueError, match="make a new one") as refusal:
        tokens.refuse_released("a-secret")
    assert "secret" not in str(refusal.value)


def test_the_shortest_ttl_of_each_lease_is_known() -> None:
    tokens = Tokens()
    for ttl in (30, 6, 60):
        tokens.sent("a", "token", ttl)

    assert tokens.shortest("a", "token") == 6
    assert tokens.shortest("b", "token") == TTL_MAX
    assert tokens.shortest("a", "other") == TTL_MAX


def test_only_so_many_are_remembered_and_the_oldest_goes_first() -> None:
    tokens = Tokens()
    for number in range(REMEMBERED + 1):
        tokens.release(str(number))
        tokens.sent("a", str(number), 5)

    tokens.refuse_released("0")
    assert tokens.shortest("a", "0") == TTL_MAX
    assert tokens.shortest("a", "1") == 5
    with pytest.raises(ValueError, match="make a new one"):
        tokens.refuse_released("1")
