"""What a scenario wants against what came.

    literal            equal, booleans never equal to numbers
    "$Name"            the first use binds; later uses are equal; different names, different values
    {…}                an object that has these fields, each matching; others do not matter
    […]                a list of the same length, item by item
    {"between": [a, b]}, {"greater_than": v}, {"less_than": v}      numbers, or instants as text
    {"not": v}, {"one_of": [v, …]}, {"matches": "regex"}, {"absent": true}
    {"number": v}      the text is a number that matches v
    {"includes": [v, …]}  a list in which each v is matched by an item of its own
    {"members": [name, …]} an object with exactly these fields

In `greater_than` and its kind a bound name stands for its value.
"""

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

ABSENT = object()
"""Stands for a field that did not come."""


class MismatchError(Exception):
    """`where` is a path such as `with.token`; `wanted` and `got` are for people."""

    def __init__(self, where: str, wanted: Any, got: Any) -> None:
        self.where, self.wanted, self.got = where, wanted, got
        super().__init__(f"{where or 'it'}: wanted {show(wanted)}, got {show(got)}")


def show(value: Any) -> str:
    return "nothing" if value is ABSENT else repr(value)


class Bindings:
    """The variables of one playing of a scenario."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})  # {"$T": "0d6f…", "$F": 7}

    def copy(self) -> "Bindings":
        return Bindings(self._values)

    def take(self, other: "Bindings") -> None:
        """Keep what a trial match has bound."""
        self._values = dict(other._values)  # noqa: SLF001 - of its own class

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def bind(self, name: str, value: Any, where: str) -> None:
        """A new name takes a value that no other name has."""
        for other, taken in self._values.items():
            if _equal(taken, value):
                raise MismatchError(where, f"{name}, another value than {other}", value)
        self._values[name] = value

    def value_of(self, name: str) -> Any:
        return self._values[name]

    def fill(self, value: Any) -> Any:
        """A value to be sent: names are replaced; an unbound one becomes a new UUID."""
        if is_name(value):
            if value not in self._values:
                self._values[value] = str(uuid.uuid4())
            return self._values[value]
        if isinstance(value, dict):
            return {name: self.fill(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        return value

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._values.items())


def is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\$[A-Z][A-Za-z0-9]*", value) is not None


def match(wanted: Any, got: Any, bindings: Bindings, where: str = "") -> None:
    """Raises MismatchError.  Binds names as it goes, so a failed match may leave some bound."""
    if is_name(wanted):
        if got is ABSENT:
            raise MismatchError(where, wanted, got)
        if wanted not in bindings:
            bindings.bind(wanted, got, where)
        elif not _equal(bindings.value_of(wanted), got):
            raise MismatchError(where, f"{wanted} = {bindings.value_of(wanted)!r}", got)
    elif isinstance(wanted, dict):
        _match_object(wanted, got, bindings, where)
    elif isinstance(wanted, list):
        if not isinstance(got, list) or len(got) != len(wanted):
            raise MismatchError(where, wanted, got)
        for index, (item, came) in enumerate(zip(wanted, got, strict=True)):
            match(item, came, bindings, f"{where}[{index}]")
    elif not _equal(wanted, got):
        raise MismatchError(where, wanted, got)


def _match_object(wanted: dict[str, Any], got: Any, bindings: Bindings, where: str) -> None:
    if len(wanted) == 1:
        ((name, operand),) = wanted.items()
        if name in _OPERATORS:
            _OPERATORS[name](operand, got, bindings, where)
            return
    if not isinstance(got, dict):
        raise MismatchError(where, wanted, got)
    for field, value in wanted.items():
        match(value, got.get(field, ABSENT), bindings, f"{where}.{field}" if where else field)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    return bool(a == b)


def _comparable(bound: Any, got: Any, bindings: Bindings, where: str) -> tuple[Any, Any]:
    bound = bindings.fill(bound)
    both_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (bound, got))
    if not both_numbers and not (isinstance(bound, str) and isinstance(got, str)):
        raise MismatchError(where, f"something to compare with {bound!r}", got)
    return bound, got


def _between(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    low, high = operand
    low, _ = _comparable(low, got, bindings, where)
    high, _ = _comparable(high, got, bindings, where)
    if not low <= got <= high:
        raise MismatchError(where, f"between {low!r} and {high!r}", got)


def _greater_than(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    bound, got = _comparable(operand, got, bindings, where)
    if not got > bound:
        raise MismatchError(where, f"greater than {bound!r}", got)


def _less_than(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    bound, got = _comparable(operand, got, bindings, where)
    if not got < bound:
        raise MismatchError(where, f"less than {bound!r}", got)


def _not(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    try:
        match(operand, got, bindings.copy(), where)
    except MismatchError:
        return
    raise MismatchError(where, f"not {bindings.fill(operand)!r}", got)


def _one_of(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    for choice in operand:
        trial = bindings.copy()
        try:
            match(choice, got, trial, where)
        except MismatchError:
            continue
        bindings.take(trial)
        return
    raise MismatchError(where, f"one of {operand!r}", got)


def _matches(operand: Any, got: Any, _: Bindings, where: str) -> None:
    if not isinstance(got, str) or re.fullmatch(operand, got, re.ASCII) is None:
        raise MismatchError(where, f"text of the form {operand}", got)


def _absent(operand: Any, got: Any, _: Bindings, where: str) -> None:
    if (got is ABSENT) is not operand:
        raise MismatchError(where, ABSENT if operand else "something", got)


def _number(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    try:
        number = float(got)
    except (TypeError, ValueError):
        raise MismatchError(where, "text that is a number", got) from None
    match(operand, int(number) if number.is_integer() else number, bindings, where)


def _includes(operand: Any, got: Any, bindings: Bindings, where: str) -> None:
    if not isinstance(got, list):
        raise MismatchError(where, f"a list with {operand!r}", got)
    left = list(got)
    for wanted in operand:
        for item in left:
            trial = bindings.copy()
            try:
                match(wanted, item, trial, where)
            except MismatchError:
                continue
            bindings.take(trial)
            left.remove(item)
            break
        else:
            raise MismatchError(where, f"a list with {wanted!r} in it", got)


def _members(operand: Any, got: Any, _: Bindings, where: str) -> None:
    if not isinstance(got, dict) or sorted(got) != sorted(operand):
        raise MismatchError(where, f"exactly the members {operand!r}", got)


_OPERATORS: dict[str, Callable[[Any, Any, Bindings, str], None]] = {
    "between": _between,
    "greater_than": _greater_than,
    "less_than": _less_than,
    "not": _not,
    "one_of": _one_of,
    "matches": _matches,
    "absent": _absent,
    "number": _number,
    "includes": _includes,
    "members": _members,
}
