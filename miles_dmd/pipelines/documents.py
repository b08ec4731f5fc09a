"""JSON files of a pipeline directory, each read once while it stays the same, and their values as typed dataclasses."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from miles_dmd.config.values import checked, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.inputs import MIB, parse_json, read_text
from miles_dmd.pipelines.foreign import is_pointer, pointer
from miles_dmd.shown import short_repr

C = TypeVar("C")
LARGEST = 4 * MIB
"""Bytes of a component's configuration, or of the index of its weights."""


def read_once(read: Callable[[Path], C]) -> Callable[[Path], C]:
    """Remember what ``read`` returned of a file for as long as size, time and inode stay the same. Nobody may change
    the result."""

    @functools.lru_cache(maxsize=256)
    def of_version(path: Path, version: object) -> C:
        return read(path)

    @functools.wraps(read)
    def remembered(path: Path) -> C:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return read(path)  # which says what is wrong
        return of_version(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))

    return remembered


@read_once
def read_json(path: Path) -> Mapping[str, Any]:
    """Raises ConfigError where there is no such file, or where it holds no JSON object."""
    text = read_text(path, LARGEST)
    try:
        value = parse_json(text)
    except ValueError as error:
        if is_pointer(path):
            raise ConfigError(pointer(path)) from None
        raise ConfigError(f"{path} cannot be used: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}; download it again")
    return value


def read_config(kind: type[C], path: Path) -> C:
    """``from_config`` of a file."""
    return from_config(kind, read_json(path), str(path))


def from_config(kind: type[C], content: Mapping[str, Any], where: str) -> C:
    """The fields of the dataclass ``kind`` out of a component's configuration, which has others that nobody here reads.

    Raises ConfigError for a value of another type, or out of its bounds: ``{where}: patch_size 'two' must be ...``.
    """
    values = {}
    for name, of in kinds(kind).items():
        if name not in content:
            continue
        value, label = content[name], f"{where}: {name}"
        if isinstance(value, str) and of.type is not str:
            raise ConfigError(f"{label} {short_repr(value)} must be {of}; download it again")
        values[name] = checked(of, value, label)
    return kind(**values)


def require_beside(name: str, document: Path) -> None:
    """Raises ConfigError for a name in ``document`` that leaves its folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ConfigError(f"{document} names {short_repr(name)}, which is not beside it; it is not read")
