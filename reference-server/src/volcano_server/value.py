"""Dataclasses that nobody changes."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """What a request makes several of.

    mypy forbids any change; `frozen` would do so at run time, for 0.4 µs an object.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
