"""Validators of single values: whole number, flag, text, choice, instance, sequence. PlanError says what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from miles_dmd.errors import PlanError, PlanTypeError
from miles_dmd.shown import shown

T = TypeVar("T")


def count(name: str, value: Any, least: int = 0) -> int:
    """``value`` if it is a whole number of at least ``least``. True is an int to Python and a typo to us."""
    if type(value) is not int:
        raise PlanTypeError(
            f"{name} must be a whole number of at least {least}, got {shown(value)} of type {type(value).__name__}"
        )
    if value < least:
        raise PlanError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise PlanTypeError(f"{name} must be true or false, got {shown(value)} of type {type(value).__name__}")
    return value


def text(name: str, value: Any, *, may_be_empty: bool = False) -> str:
    if type(value) is not str:
        raise PlanTypeError(f"{name} must be a string, got {shown(value)} of type {type(value).__name__}")
    if not value and not may_be_empty:
        raise PlanError(f"{name} must not be empty")
    return value


def choice(name: str, value: Any, known: Collection[str]) -> str:
    if type(value) is not str or value not in known:
        raise PlanError(f"{name} must be one of {', '.join(known)}; got {shown(value)}")
    return value


def instance(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise PlanTypeError(f"{name} must be a {kind.__name__}, got {shown(value)} of type {type(value).__name__}")
    return value


def sequence(name: str, values: Any, kind: type[T]) -> tuple[T, ...]:
    """``values`` as a tuple of ``kind``; a string is no sequence of strings."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise PlanTypeError(f"{name} must be a sequence of {kind.__name__}, got {shown(values)}")
    return tuple(instance(f"{name}[{i}]", value, kind) for i, value in enumerate(values))


def repeated(values: Iterable[Any]) -> list[Any]:
    """What occurs more than once, sorted."""
    values = list(values)
    return sorted({value for value in values if values.count(value) > 1})
