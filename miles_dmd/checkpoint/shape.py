"""JSON schema checks: fields and types of a document, refused by file and place in one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Is:
    """A leaf: what it has to be, in words, and the question."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Each:
    """A list of ``shape``."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Named:
    """An object of any names, each holding ``shape``."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Maybe:
    """Nothing ({}), or ``shape``."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Open:
    """An object with at least these keys."""

    shape: Mapping[str, Any]


TEXT = Is("a text", lambda value: isinstance(value, str))
NATURAL = Is("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
NATURAL_OR_NULL = Is("a whole number or null", lambda value: value is None or NATURAL.holds(value))
POSITIVE = Is("a whole number of at least 1", lambda value: type(value) is int and value >= 1)
NUMBER = Is("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
NUMBER_OR_NULL = Is("a finite number or null", lambda value: value is None or NUMBER.holds(value))
OBJECT = Is("an object", lambda value: isinstance(value, dict))


def require_shape(value: Any, shape: Any, file: Path, place: str = "") -> None:
    """``shape`` is one of the above, or a dictionary of them: an object with exactly these keys. Raises
    CheckpointError that names ``file`` and the first place that differs."""
    if isinstance(shape, Is):
        if not shape.holds(value):
            raise _malformed(file, place, f"is {_shown(value)}, and has to be {shape.words}")
        return
    if isinstance(shape, Maybe):
        shape = {} if value == {} else shape.shape
    if isinstance(shape, Each):
        _require_kind(value, list, "a list", file, place)
        for index, item in enumerate(value):
            require_shape(item, shape.shape, file, f"{place}[{index}]")
        return
    _require_kind(value, dict, "an object", file, place)
    if isinstance(shape, Named):
        for name, item in value.items():
            require_shape(item, shape.shape, file, f"{place}.{name}".lstrip("."))
    else:
        _require_keys(value, shape, file, place)


def _require_kind(value: Any, kind: type, words: str, file: Path, place: str) -> None:
    if not isinstance(value, kind):
        raise _malformed(file, place, f"is {_shown(value)}, and has to be {words}")


def _require_keys(value: Mapping[str, Any], shape: Any, file: Path, place: str) -> None:
    keys: Mapping[str, Any] = shape.shape if isinstance(shape, Open) else shape
    more = set() if isinstance(shape, Open) else value.keys() - keys.keys()
    if apart := sorted(keys.keys() - value.keys()) or sorted(more):
        raise _malformed(file, place, f"{'lacks' if apart[0] in keys else 'has an unknown'} {apart[0]!r}")
    for name, inner in keys.items():
        require_shape(value[name], inner, file, f"{place}.{name}".lstrip("."))


def _malformed(file: Path, place: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file} does not have the fields of its format: {place or 'it'} {what}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
