"""Each term of the next fencing token decides alone in one of these."""

from volcano_server import fencing


def test_a_token_is_above_the_last_one_of_its_slot_even_when_the_clock_stepped_back() -> None:
    floor = fencing.floor(highest_swept=0, wall=50, opened_at=50)

    assert fencing.next_token(1000, floor) == 1001


def test_a_token_is_above_every_swept_one() -> None:
    assert fencing.floor(highest_swept=1000, wall=50, opened_at=50) == 1001


def test_a_token_is_not_below_the_wall_clock() -> None:
    assert fencing.floor(highest_swept=0, wall=1000, opened_at=50) == 1000


def test_a_token_is_not_below_the_store_clock_at_open() -> None:
    assert fencing.floor(highest_swept=0, wall=50, opened_at=1000) == 1000


def test_the_first_token_of_a_slot_is_the_floor() -> None:
    assert fencing.next_token(0, 1000) == 1000


def test_a_last_token_just_below_or_at_the_floor_leads_to_the_next_whole_number() -> None:
    assert fencing.next_token(999, 1000) == 1000
    assert fencing.next_token(1000, 1000) == 1001
