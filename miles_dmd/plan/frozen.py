"""Frozen containers, dataclasses and fingerprints: what a plan is made of.

A plan holds strings, whole and real numbers, booleans, None, and frozen containers of these: then equality, hash,
pickle and fingerprint are those of the content, in every process. Changing a plan on purpose through
``object.__setattr__`` is out of scope; every ordinary way is refused.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, dataclass_transform

from miles_dmd.errors import PlanTypeError
from miles_dmd.validators import string

T = TypeVar("T")


class FrozenDict(Mapping[str, Any]):
    """A mapping that is frozen down to its leaves. ``data`` is a read-only view of it."""

    __slots__ = ("data",)
    data: Mapping[str, Any]

    def __init__(self, values: Any = (), /, *, path: str = "value") -> None:
        if hasattr(self, "data"):
            raise FrozenInstanceError("a FrozenDict is built once; make a new one")
        frozen = {
            string(f"a key of {path}", key): freeze(value, f"{path}.{key}") for key, value in dict(values).items()
        }
        object.__setattr__(self, "data", MappingProxyType(frozen))

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({dict(self.data)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self.data),)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign {name!r}: a FrozenDict does not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete {name!r}: a FrozenDict does not change")


def freeze(value: Any, path: str = "value") -> Any:
    """``value`` with every container in it frozen; PlanTypeError names the path of a leaf that a plan cannot hold."""
    if value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return FrozenDict(value, path=path)
    if isinstance(value, list | tuple):
        return tuple(freeze(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, set | frozenset):
        return frozenset(freeze(item, f"{path}{{{item!r}}}") for item in value)
    raise PlanTypeError(
        f"{path} holds {value!r} of type {type(value).__name__}; a plan holds only str, int, finite float, bool, None "
        "and containers of these: pass a name or a number instead"
    )


@dataclass_transform(frozen_default=True)
def immutable(cls: type[T]) -> type[T]:
    """A frozen dataclass with slots that can be initialised only once and pickles through its constructor.

    A plain frozen dataclass lets ``plan.__init__(...)`` and ``vars(plan)[...] = ...`` change it, and unpickles
    without being validated again.
    """
    made: Any = dataclass(frozen=True, slots=True)(cls)
    first = fields(made)[0].name
    init = made.__init__

    @functools.wraps(init)
    def init_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(self, first):
            raise FrozenInstanceError(f"this {made.__name__} is built; use dataclasses.replace to make another")
        init(self, *args, **kwargs)

    def state(self: Any, _: Any = None) -> NoReturn:
        raise FrozenInstanceError(f"a {made.__name__} is restored through its constructor")

    made.__init__ = init_once
    made.__setstate__ = state
    made.__reduce__ = lambda self: (type(self), tuple(getattr(self, field.name) for field in fields(made)))
    return made


def assign(self: Any, **values: Any) -> None:
    """For ``__post_init__`` alone: put the normal form of a field in its place."""
    for name, value in values.items():
        object.__setattr__(self, name, value)


def fingerprint(value: Any) -> str:
    """SHA-256 over canonical JSON: the same in every process, whatever the order of keys and sets."""
    return sha256(_json(plain(value)).encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` as JSON takes it: dataclasses and mappings as objects, tuples as lists, sets as sorted lists."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, frozenset):
        return {"set": sorted((plain(item) for item in value), key=_json)}
    return value
