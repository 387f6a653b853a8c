"""What matches what, and what is said when it does not."""

from typing import Any

import pytest

from conformance.match import ABSENT, Bindings, MismatchError, match


def matches(wanted: Any, got: Any, **names: Any) -> bool:
    try:
        match(wanted, got, Bindings({f"${name}": value for name, value in names.items()}))
    except MismatchError:
        return False
    return True


@pytest.mark.parametrize(
    ("wanted", "got", "expected"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (None, None, True),
        (None, ABSENT, False),
        ("a", "b", False),
        ([1, 2], [1, 2], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"b": 2}, False),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, False),
        ({"between": [1, 2]}, 2, True),
        ({"between": [1, 2]}, 2.1, False),
        ({"between": [1, 2]}, "1", False),
        ({"between": [0, 2]}, True, False),
        ({"greater_than": 1}, 1, False),
        ({"less_than": "2026-02"}, "2026-01", True),
        ({"less_than": "2026-02"}, 3, False),
        ({"not": 1}, 2, True),
        ({"not": 1}, 1, False),
        ({"one_of": [1, {"between": [5, 6]}]}, 5.5, True),
        ({"one_of": [1, 2]}, 3, False),
        ({"matches": "[a-z]+"}, "abc", True),
        ({"matches": "[a-z]+"}, "abc\n", False),
        ({"matches": "[a-z]+"}, 7, False),
        ({"absent": True}, ABSENT, True),
        ({"absent": True}, None, False),
        ({"absent": False}, None, True),
        ({"number": 7}, "7", True),
        ({"number": {"between": [1, 2]}}, "1.500", True),
        ({"number": 7}, "seven", False),
        ({"includes": [{"error": "B"}, {"error": "A"}]}, [{"error": "A"}, {"error": "B"}], True),
        ({"includes": [{"error": "A"}, {"error": "A"}]}, [{"error": "A"}], False),
        ({"includes": [1]}, 1, False),
        ({"members": ["a", "b"]}, {"b": 1, "a": 2}, True),
        ({"members": ["a"]}, {"a": 1, "b": None}, False),
    ],
)
def test_a_value_matches_or_does_not(wanted: Any, got: Any, expected: bool) -> None:
    assert matches(wanted, got) is expected


def test_the_first_use_of_a_name_binds_and_later_ones_are_equal() -> None:
    bindings = Bindings()

    match({"a": "$T", "b": "$T"}, {"a": 1, "b": 1}, bindings)

    with pytest.raises(MismatchError, match=r"\$T = 1"):
        match("$T", 2, bindings)


def test_different_names_have_different_values() -> None:
    bindings = Bindings({"$R": "same"})

    with pytest.raises(MismatchError, match=r"another value than \$R"):
        match("$S", "same", bindings)


def test_a_name_does_not_bind_to_what_did_not_come() -> None:
    assert not matches({"a": "$T"}, {})


def test_operators_may_name_bound_values() -> None:
    assert matches({"greater_than": "$F"}, 8, F=7)
    assert not matches({"greater_than": "$F"}, 7, F=7)


def test_a_failed_choice_binds_nothing() -> None:
    bindings = Bindings()

    match({"one_of": [{"a": "$X", "b": 1}, {"a": 2}]}, {"a": 2, "b": 3}, bindings)

    assert "$X" not in bindings


def test_what_is_sent_has_its_names_replaced_and_new_ones_made() -> None:
    bindings = Bindings({"$T": "known"})

    filled = bindings.fill({"token": "$T", "more": ["$U", "$U", "text"]})

    assert filled["token"] == "known"
    assert filled["more"][0] == filled["more"][1] == bindings.value_of("$U")
    assert filled["more"][2] == "text"


def test_a_mismatch_says_where_and_what() -> None:
    with pytest.raises(MismatchError) as caught:
        match({"errors": [{"status": 409}]}, {"errors": [{"status": 410}]}, Bindings())

    assert str(caught.value) == "errors[0].status: wanted 409, got 410"
