"""Validators of values and documents: whole number, flag, text, choice, list, mapping, object of given fields.

Each takes the name of a value and the value, and raises PlanError in one line that begins with the name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from miles_dmd.errors import PlanError, PlanTypeError
from miles_dmd.shown import short_repr

T = TypeVar("T")
Check = Callable[[str, Any], object]


def _type_error(name: str, words: str, value: Any) -> PlanTypeError:
    return PlanTypeError(f"{name} must be {words}, got {short_repr(value)} of type {type(value).__name__}")


def count(name: str, value: Any, least: int = 0) -> int:
    """``value`` if it is a whole number of at least ``least``. True is an int to Python and a typo to us."""
    words = f"a whole number of at least {least}"
    if type(value) is not int:
        raise _type_error(name, words, value)
    if value < least:
        raise PlanError(f"{name} must be {words}, got {short_repr(value)}")
    return value


def positive(name: str, value: Any) -> int:
    return count(name, value, 1)


def number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise _type_error(name, "a finite number", value)
    if not abs(value) <= sys.float_info.max:  # of NaN too, and of whole numbers that no float holds
        raise PlanError(f"{name} must be a finite number, got {short_repr(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _type_error(name, "true or false", value)
    return value


def string(name: str, value: Any) -> str:
    if type(value) is not str:
        raise _type_error(name, "a string", value)
    return value


def text(name: str, value: Any) -> str:
    if not string(name, value):
        raise PlanError(f"{name} must not be empty")
    return value


def choice(name: str, value: Any, known: Collection[str]) -> str:
    if type(value) is not str or value not in known:
        raise PlanError(f"{name} must be one of {', '.join(known)}; got {short_repr(value)}")
    return value


def instance(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _type_error(name, f"a {kind.__name__}", value)
    return value


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _type_error(name, "a mapping", value)
    return value


def sequence(name: str, values: Any, kind: type[T]) -> tuple[T, ...]:
    """``values`` as a tuple of ``kind``; a string is no sequence of strings."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise PlanTypeError(f"{name} must be a sequence of {kind.__name__}, got {short_repr(values)}")
    return tuple(instance(f"{name}[{i}]", value, kind) for i, value in enumerate(values))


def a(kind: type) -> Check:
    """A check for an instance of ``kind``."""
    return lambda name, value: instance(name, value, kind)


def each(check: Check, *kinds: type[Collection[Any]]) -> Check:
    """A check for a list, or for one of ``kinds`` instead, whose items pass ``check``."""
    allowed: tuple[type[Collection[Any]], ...] = kinds or (list,)

    def check_each(name: str, value: Any) -> None:
        if not isinstance(value, allowed):
            raise _type_error(name, f"a {' or '.join(kind.__name__ for kind in allowed)}", value)
        for index, item in enumerate(value):
            check(f"{name}[{index}]", item)

    return check_each


def table(check: Check) -> Check:
    """A check for a mapping of any names to values that pass ``check``."""

    def check_table(name: str, value: Any) -> None:
        for key, item in mapping(name, value).items():
            check(_inside(name, string(f"a key of {name}", key)), item)

    return check_table


def fields(checks: Mapping[str, Check], *, open_ended: bool = False) -> Check:
    """A check for a mapping with exactly these keys; with ``open_ended`` there may be others."""

    def check_fields(name: str, value: Any) -> None:
        keys = mapping(name or "it", value).keys()
        if missing := [key for key in checks if key not in keys]:
            raise PlanError(f"{name or 'it'} lacks {missing[0]!r}")
        if not open_ended and (unknown := sorted(keys - checks.keys())):
            raise PlanError(f"{name or 'it'} has an unknown {short_repr(unknown[0])}")
        for key, check in checks.items():
            check(_inside(name, key), value[key])

    return check_fields


def optional(check: Check, empty: Any = None) -> Check:
    """A check for ``empty``, or for what passes ``check``."""
    return lambda name, value: value == empty or check(name, value)


def _inside(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def repeated(values: Iterable[Any]) -> list[Any]:
    """Values that occur more than once, sorted."""
    values = list(values)
    return sorted({value for value in values if values.count(value) > 1})
