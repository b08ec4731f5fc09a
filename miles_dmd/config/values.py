"""Value types of arguments: parsing from text (a flag) or data (YAML), bounds and error messages.

Arguments declare it in their type: ``num_rollout: Count``, ``lr: Positive``, ``solver: Literal["renoise", "euler"]``.
"""

import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import LONGEST_NUMBER, other_locale, unsound
from miles_dmd.registry import nearest
from miles_dmd.shown import short_repr

LARGEST = 10**9
"""Bound of counts and amounts where nothing else bounds them: nothing here needs more, and a clock, an index
or a thread pool that is given more fails later and says less."""


@dataclass(frozen=True, slots=True)
class Range:
    """An interval; ``open`` sides exclude their bound."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low}"
        if self.high >= LARGEST:
            return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low}, {self.high}{')' if self.open_high else ']'}"

    def missed_by(self, value: float) -> str:
        """Message for a value that is out of range: the high bound is no news where it is only for order's sake."""
        return f"at most {self.high:,}" if self.high >= LARGEST and value > self.high else str(self)


@dataclass(frozen=True, slots=True)
class IsPath:
    """Marks a path. One that is read is, where a preset names it, also looked for beside that preset."""

    read: bool


Count = Annotated[int, Range(1, LARGEST)]
Natural = Annotated[int, Range(0, LARGEST)]
Positive = Annotated[float, Range(0, LARGEST, open_low=True)]
NonNegative = Annotated[float, Range(0, LARGEST)]
Batch = Annotated[int, Range(1, 2**20)]
"""Samples: each has a row of its own in several tables before anything is drawn."""
Ranks = Annotated[int, Range(1, 2**16)]
Threads = Annotated[int, Range(1, 4096)]
Repeats = Annotated[int, Range(1, 1000)]
"""Number of batches of a phase in one cycle, which are all sampled at once."""
Seed = Annotated[int, Range(0, 2**63 - 1)]
Decay = Annotated[float, Range(0, 1, open_high=True)]
"""Decay of an EMA (moving average): [0, 1)."""
Guidance = Annotated[float, Range(1, LARGEST)]
"""1 is no guidance."""
Shift = Annotated[float, Range(1, 1000)]
Steps = Annotated[int, Range(1, 1000)]
ReadPath = Annotated[str, IsPath(read=True)]
OwnPath = Annotated[str, IsPath(read=False)]
"""Path of a run's own making, or with a meaning of its own beside paths, as --load latest has."""


ANY = -1
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|-?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
"""Numbers as people write them; Python's 1_000 and digits of other scripts are typing errors here, and +3 is elsewhere
"three more"."""


_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


@dataclass(frozen=True, slots=True)
class Kind:
    """Type, choices, length and range of a value, read from a type hint."""

    type: type
    optional: bool = False
    choices: tuple[str, ...] = ()
    bounds: Range | None = None
    length: int | None = None
    """Length of a tuple; None for a single value, ANY for as many as one likes."""
    path: IsPath | None = None

    def __str__(self) -> str:
        """Description of valid values."""
        return self._words(self.bounds)

    def in_words(self, value: float) -> str:
        """The same, to somebody who gave a ``value`` out of bounds."""
        return self._words(self.bounds and self.bounds.missed_by(value))

    def _words(self, bounds: object) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        one = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[self.type]
        number = "a list of" if self.length == ANY else self.length
        many = one if self.length is None else f"{number} values, each {one}"
        return f"{many}, {bounds}" if bounds else many


def kind_of(hint: Any) -> Kind:
    """Kind of a hint: int, float, bool, str, Literal of str, tuple[T, T], tuple[T, ...]; also Annotated, ``| None``."""
    extras: list[Any] = []
    optional = False
    while True:
        origin = typing.get_origin(hint)
        if origin is Annotated:
            extras += hint.__metadata__
            hint = hint.__origin__
        elif origin in (typing.Union, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
            optional = True
        else:
            break
    bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    path = next((extra for extra in extras if isinstance(extra, IsPath)), None)
    if origin is Literal:
        return Kind(str, optional, typing.get_args(hint))
    if origin is tuple:
        first, *others = typing.get_args(hint)
        item, length = kind_of(first), ANY if Ellipsis in others else 1 + len(others)
        return Kind(item.type, optional, item.choices, item.bounds, length, item.path)
    if hint not in (int, float, bool, str):
        raise ConfigError(
            f"an argument of type {short_repr(hint)} cannot be a flag: int, float, bool, str, a Literal, a tuple"
        )
    return Kind(hint, optional, (), bounds, None, path)


NOT_ASKED = {"asked": False}
"""Metadata of a field that is no argument: nobody can set it by flag, preset or override."""


def kinds(arguments: type) -> Mapping[str, Kind]:
    """argument -> kind, of a dataclass of arguments."""
    return _kinds(arguments)


@functools.cache
def _kinds(arguments: Any) -> Mapping[str, Kind]:
    hints = typing.get_type_hints(arguments, include_extras=True)
    asked = (row.name for row in dataclasses.fields(arguments) if row.metadata.get("asked", True))
    return types.MappingProxyType({name: kind_of(hints[name]) for name in asked})


def flag_name(argument: str, role: str = "") -> str:
    """``--critic-lr``, of lr and critic."""
    return "--" + "-".join(part.replace("_", "-") for part in (role, argument) if part)


def from_text(kind: Kind, texts: Sequence[str], name: str) -> Any:
    """The value of flag ``name``, of its words on the command line. Raises ConfigError."""
    values = tuple(_one_from_text(kind, text, name) for text in texts)
    return checked(kind, values[0] if kind.length is None else values, name)


def checked(kind: Kind, value: Any, name: str) -> Any:
    """``value`` as ``kind`` wants it (1 for 1.0, "8e-5" for 8e-5: YAML 1.1 reads it as text; a path with ``~`` in
    full). Raises ConfigError."""
    if value is None and kind.optional:
        return None
    if kind.length is None:
        return _one(kind, value, name)
    if not isinstance(value, (list, tuple)) or kind.length not in (ANY, len(value)):
        raise ConfigError(f"{name} {short_repr(value)} must be {kind}")
    return tuple(_one(kind, item, name) for item in value)


def _one_from_text(kind: Kind, text: str, name: str) -> Any:
    if kind.type is str:
        return text
    if not _NUMBER.fullmatch(text):
        raise _refusal(kind, text, name)
    if kind.type is int and len(text) > LONGEST_NUMBER:
        raise ConfigError(f"{name} {short_repr(text)} has {len(text):,} digits, and must be {kind.in_words(math.inf)}")
    try:
        value = kind.type(text)
    except ValueError as error:  # 1.5 is no int
        raise _refusal(kind, text, name) from error
    if value in (math.inf, -math.inf) and "inf" not in text.lower():  # 1e400
        raise ConfigError(f"{name} {short_repr(text)} is beyond what a float can hold, and must be {kind}")
    return value


def _one(kind: Kind, value: Any, name: str) -> Any:
    if kind.type is float and isinstance(value, int | str):
        value = _number(value)
    if kind.path is not None and isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_of_type = isinstance(value, kind.type) and isinstance(value, bool) == (kind.type is bool)
    if not is_of_type or (kind.type is float and not math.isfinite(value)):
        raise _refusal(kind, value, name)
    if kind.choices and value not in kind.choices:
        raise ConfigError(f"{name} {short_repr(value)} must be {kind}{nearest(value, kind.choices)}")
    if kind.bounds is not None and value not in kind.bounds:
        raise ConfigError(f"{name} {short_repr(value)} must be {kind.in_words(value)}")
    if kind.type is str and (why := unsound(value)):
        raise ConfigError(f"{name} {short_repr(value)} {why}; write it as UTF-8{other_locale()}")
    if kind.type is str and not value and (kind.optional or kind.path is not None):
        raise ConfigError(f"{name} '' is empty; give it a value, or leave it out")
    return value if kind.path is None else _in_full(value, name)


def _in_full(path: str, name: str) -> str:
    """With the home for a leading ``~``, as a shell would have it, but no shell has seen a preset or ``--save=~/x``."""
    full = os.path.expanduser(path)
    if path.startswith("~") and full == path and not os.path.lexists(path):
        raise ConfigError(
            f"{name} {short_repr(path)}: there is no home of {short_repr(path.split('/')[0])}; write the path out"
        )
    if (variable := _VARIABLE.search(full)) and not os.path.lexists(full):
        raise ConfigError(f"{name} {short_repr(path)}: {variable[0]} is not replaced by its value; write the path out")
    return full


def _number(value: Any) -> Any:
    """Value as a float where it is one, a number or text; else unchanged. True and False are no numbers."""
    if isinstance(value, bool) or (isinstance(value, str) and not _NUMBER.fullmatch(value)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _refusal(kind: Kind, value: Any, name: str) -> ConfigError:
    number = _number(value)
    cure = ""
    if kind.type is int and isinstance(number, float) and number.is_integer() and abs(number) <= LARGEST:
        cure = f"; write {int(number)}"
    if kind.type is str:
        cure = "; put it in quotes"
    return ConfigError(f"{name} {short_repr(value)} must be {kind}{cure}")


def normalized(arguments: Any, name: Callable[[str], str]) -> Mapping[str, Any]:
    """Values of a dataclass of arguments, converted to their kinds; only those that differ.

    ``name`` says what an argument is called in a refusal. Raises ConfigError.
    """
    values = {of: (getattr(arguments, of), kind) for of, kind in kinds(type(arguments)).items()}
    held = {of: (value, checked(kind, value, name(of))) for of, (value, kind) in values.items()}
    return {of: new for of, (old, new) in held.items() if (type(old), old) != (type(new), new) or _mixed(old, new)}


def _mixed(old: Any, new: Any) -> bool:
    """(0, 0.999) equals (0.0, 0.999)."""
    return isinstance(old, tuple) and list(map(type, old)) != list(map(type, new))
